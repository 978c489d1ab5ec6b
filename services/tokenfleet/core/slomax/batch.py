"""Batch: in which order do jobs with deadlines go, and which of them will miss theirs?

Earliest deadline first. When not all can be in time, the largest number that can is kept (Moore and Hodgson 1968: take
jobs by deadline, and whenever one would be late leave out the longest so far), and the others are told early, so that
who sent them can act. Those go last, while there is room: telling is a forecast, not a refusal, and a job is told anew
by each plan.

`plan` is a function of what waits; ask it when the jobs or the pool's free rate have changed, every few seconds. The
pool counts as one machine: that a job alone takes longer on its instance than its deadline leaves is not seen here.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from msgspec import Struct


class Job(NamedTuple):
    """A waiting job: its predicted GPU seconds and when it must have ended, on the clock of `now_s`."""

    id: str
    seconds: float
    deadline_s: float


class WillMiss(NamedTuple):
    """A job that can't be in time beside those that are kept: its likely end and its deadline."""

    id: str
    end_s: float
    deadline_s: float


class Plan(Struct, frozen=True, kw_only=True):
    """The jobs' ids in the order in which they go, those that will miss their deadline last."""

    order: tuple[str, ...]
    will_miss: tuple[WillMiss, ...] = ()


def plan(jobs: Iterable[Job], *, free_rate: float | None, now_s: float) -> Plan:
    """The order of `jobs` on a pool that has `free_rate` GPU seconds a second for them.

    A rate of nothing, or one that nobody knows, proves no deadline missed: it may be otherwise in a minute.
    """
    by_deadline = sorted(jobs, key=lambda job: (job.deadline_s, job.seconds, job.id))
    if free_rate is None or not free_rate > 0.0:
        return Plan(order=tuple(job.id for job in by_deadline))
    longest: list[tuple[float, float, str, Job]] = []
    left_out: set[str] = set()
    end_s = now_s
    for job in by_deadline:
        heappush(longest, (-job.seconds, -job.deadline_s, job.id, job))
        end_s += job.seconds / free_rate
        if end_s > job.deadline_s:
            out = heappop(longest)[3]
            left_out.add(out.id)
            end_s -= out.seconds / free_rate
    kept = [job for job in by_deadline if job.id not in left_out]
    end_s = now_s + sum(job.seconds for job in kept) / free_rate
    will_miss: list[WillMiss] = []
    for job in by_deadline:
        if job.id in left_out:
            end_s += job.seconds / free_rate
            will_miss.append(WillMiss(job.id, end_s, job.deadline_s))
    return Plan(order=tuple(job.id for job in kept) + tuple(miss.id for miss in will_miss), will_miss=tuple(will_miss))
