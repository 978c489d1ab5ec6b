"""Queues: the requests that wait at the control plane for a pool that several classes share, and who goes next.

Work that is held keeps its place in line by class; work that an engine has been given is served in the engine's order.
So nothing goes out before an instance is nearly free for it (core/slomax/pacing.py). Classes go by rank; inside one,
guarded requests by the latest start that still meets their service level, with those past it behind all others;
reserving ones by least work with ageing; filling ones by latest start.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import count

import numpy as np
from msgspec import Struct

from tokenfleet.core.asked import Steps, Turn
from tokenfleet.core.columns import Floats, Labels
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import ClassQueue, PacingPolicy, Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.allowance import Allowance
from tokenfleet.core.slomax.iterations import Iterations
from tokenfleet.core.slomax.pacing import Pace, open_to, pace_of, price_s, reserved_of
from tokenfleet.core.tokenpilot.cost import dense_work_s

LOOKED_AT_MAX_S = 0.25  # a waiting prompt's cached prefixes are looked up anew at least as often

Look = Callable[[Request], Floats]  # the cached tokens of a prompt, by slot of its pool


class Ticket(Struct, kw_only=True, eq=False):
    """One waiting request: its class, its least work (seconds) and its cached tokens by slot as of `looked_s`, and the
    latest start by which its service level can be met (∞ without one)."""

    request: Request
    steps: Steps
    request_class: str
    since_s: float
    work_s: float
    hits: Floats
    labels: Labels
    looked_s: float
    latest_start_s: float
    output_s: float = 0.0

    @property
    def call(self) -> tuple[str, int]:
        return self.request.id, self.request.attempt


class Line:
    """The tickets of one class, in an order that time does not change."""

    def __init__(self) -> None:
        self._ordered: list[tuple[float, int, Ticket]] = []
        self._places: dict[tuple[str, int], tuple[float, int]] = {}
        self._numbers = count()

    def put(self, ticket: Ticket, rank: float) -> None:
        place = (rank, next(self._numbers))
        self._places[ticket.call] = place
        insort(self._ordered, (*place, ticket))

    def take(self, call: tuple[str, int]) -> Ticket | None:
        place = self._places.pop(call, None)
        if place is None:
            return None
        return self._ordered.pop(bisect_left(self._ordered, place))[2]

    def first(self, most: int) -> list[Ticket]:
        return [ticket for _, _, ticket in self._ordered[:most]]

    def from_rank(self, rank: float, most: int) -> list[Ticket]:
        """The first of at least that rank, then those below it, so many in all."""
        at = bisect_left(self._ordered, (rank,))
        chosen = self._ordered[at : at + most]
        return [ticket for _, _, ticket in (*chosen, *self._ordered[: most - len(chosen)][:at])]

    def __contains__(self, call: tuple[str, int]) -> bool:
        return call in self._places

    def __len__(self) -> int:
        return len(self._ordered)


class Queues:
    """What waits for one pool, with what pacing remembers of it."""

    def __init__(self, terms: PacingPolicy, iterations: Iterations) -> None:
        self.allowance = Allowance(terms)
        self._iterations = iterations
        self._lines: dict[str, Line] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self) -> dict[str, int]:
        """Tickets by class."""
        return {name: len(line) for name, line in self._lines.items()}

    def __contains__(self, call: tuple[str, int]) -> bool:
        return any(call in line for line in self._lines.values())

    def put(self, ticket: Ticket, terms: RequestClass, pacing: PacingPolicy) -> None:
        self._lines.setdefault(ticket.request_class, Line()).put(ticket, _rank(ticket, terms.queue, pacing))

    def take(self, call: tuple[str, int]) -> Ticket | None:
        """The ticket waits no longer: its request goes out, or its caller left."""
        return next((found for line in self._lines.values() if (found := line.take(call)) is not None), None)

    def at_once(self, ticket: Ticket, pool: PoolView, policy: Policy, now_s: float) -> Turn | None:
        """The turn of a request that comes now, None if it must wait: another of its class goes first, or nothing is
        open to it."""
        if len(self._lines.get(ticket.request_class, ())):
            return None
        return self._turn(ticket, self._paced(pool, policy, now_s), policy, now_s)

    def turns(
        self, view: Callable[[], PoolView], look: Look, policy: Policy, now_s: float
    ) -> Iterator[tuple[Ticket, Turn]]:
        """The tickets whose turn it is, in order; each must be placed before the next is asked for. `view` is the pool
        as it is then."""
        pool = view()
        pace = self._paced(pool, policy, now_s)
        for name in sorted(self._lines, key=lambda name: policy.classes[name].rank):
            line, queue = self._lines[name], policy.classes[name].queue
            for ticket in self._in_order(line, queue, policy.slomax.pacing, now_s):
                if not self._any_open(name, pace, queue, policy, ticket, now_s):
                    break
                if now_s - ticket.looked_s >= LOOKED_AT_MAX_S or ticket.labels is not pool.columns.labels:
                    ticket.hits, ticket.labels, ticket.looked_s = look(ticket.request), pool.columns.labels, now_s
                turn = self._turn(ticket, pace, policy, now_s)
                if turn is None:
                    continue
                yield ticket, turn
                if ticket.call not in line:
                    pool = view()
                    pace = self._paced(pool, policy, now_s)

    def _any_open(self, name: str, pace: Pace, queue: ClassQueue, policy: Policy, ticket: Ticket, now_s: float) -> bool:
        """Whether any instance is open to the least of requests; a late or overdue one goes in any case."""
        if _is_late(ticket, queue, now_s) or _is_overdue(ticket, now_s):
            return True
        queued = pace.pool.columns.classes_queued.get(name)
        slack_s = ticket.latest_start_s - now_s
        terms = policy.slomax.pacing
        return bool(open_to(pace, queue, queued, 0.0, 0.0, slack_s=slack_s, terms=terms).any())

    def _in_order(self, line: Line, queue: ClassQueue, terms: PacingPolicy, now_s: float) -> list[Ticket]:
        if queue.role == "guarded":
            return line.from_rank(now_s, terms.planned_max)
        return line.first(terms.planned_max)

    def _paced(self, pool: PoolView, policy: Policy, now_s: float) -> Pace:
        terms = policy.slomax.pacing
        self.allowance.advance(terms, now_s)
        recent = self._iterations.recent(pool.columns.labels, terms.window_s)
        pace = pace_of(pool, policy, recent=recent, allowance=self.allowance.share)
        waiting = self._reserving(policy, now_s)
        if waiting and self._filling_slack_s(policy, now_s) > terms.reserve_slack_s:
            reserved = reserved_of(pace, waiting, terms)
            if reserved is not None:
                return Pace(
                    pool=pool,
                    spent_s=pace.spent_s,
                    iterations=pace.iterations,
                    step_s=pace.step_s,
                    guarded_tpot_s=pace.guarded_tpot_s,
                    allowance=pace.allowance,
                    guarded=pace.guarded,
                    prefills=pace.prefills,
                    reserved=reserved,
                )
        return pace

    def _reserving(self, policy: Policy, now_s: float) -> int:
        """Reserving requests that wait and can still make it."""
        return sum(
            ticket.latest_start_s >= now_s
            for name, line in self._lines.items()
            if policy.classes[name].queue.role == "reserving"
            for ticket in line.first(policy.slomax.pacing.planned_max)
        )

    def _filling_slack_s(self, policy: Policy, now_s: float) -> float:
        """Until the first filling request must start; ∞ when none waits."""
        firsts = [
            ticket.latest_start_s - now_s
            for name, line in self._lines.items()
            if policy.classes[name].queue.role == "filling"
            for ticket in line.first(1)
        ]
        return min(firsts, default=np.inf)

    def _turn(self, ticket: Ticket, pace: Pace, policy: Policy, now_s: float) -> Turn | None:
        pool, queue, terms = pace.pool, policy.classes[ticket.request_class].queue, policy.slomax.pacing
        if not len(pool):
            return None
        prompt_tokens = float(ticket.request.prompt_tokens)
        work_s = dense_work_s(np.array([[prompt_tokens]]), ticket.hits[None, :], pool)[0]
        uncached = np.maximum(prompt_tokens - ticket.hits, 1.0)
        iterations = np.ceil(uncached / pool.budget_tokens)
        overdue = _is_overdue(ticket, now_s)
        late = _is_late(ticket, queue, now_s) and not overdue
        queued = pool.columns.classes_queued.get(ticket.request_class)
        slack_s = ticket.latest_start_s - now_s
        allowed = open_to(pace, queue, queued, work_s, iterations, slack_s=slack_s, terms=terms)
        if not allowed.any() and not overdue and not late:
            return None
        return Turn(
            ahead_s=np.zeros(len(pool)),
            held_s=0.0,
            overdue=overdue,
            allowed=None if overdue else allowed,
            pace_s=price_s(pace, queue, work_s, iterations, terms),
            late=late,
        )


def _is_overdue(ticket: Ticket, now_s: float) -> bool:
    """It has waited for as long as its gateway can."""
    return now_s - ticket.since_s >= ticket.request.wait_max_s


def _is_late(ticket: Ticket, queue: ClassQueue, now_s: float) -> bool:
    """A reserving request past its latest start: its large prefill would gain nothing and cost the others."""
    return queue.role == "reserving" and now_s > ticket.latest_start_s


def latest_start_s(request: Request, terms: RequestClass, *, arrived_s: float, work_s: float, output_s: float) -> float:
    """When its prefill must begin at the latest to meet what is agreed, on the clock of `arrived_s`; else ∞."""
    first_s = terms.ttft_max_s(request.prompt_tokens)
    starts_s = [np.inf] if first_s is None else [arrived_s + first_s - work_s]
    deadline_s = request.deadline_s if request.deadline_s is not None else terms.deadline_s
    if deadline_s is not None:
        starts_s.append(arrived_s + deadline_s - work_s - output_s)
    return float(min(starts_s))


def _rank(ticket: Ticket, queue: ClassQueue, pacing: PacingPolicy) -> float:
    """Least first, on the clock of `since_s`."""
    if queue.role == "reserving":
        return ticket.since_s + pacing.ageing * ticket.work_s
    return ticket.latest_start_s
