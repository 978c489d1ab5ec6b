"""Deadlines: the largest set that can be in time is kept, and the others are told."""

from itertools import combinations
from math import inf, nan
from random import Random
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.slomax.batch import Job, Plan, plan


def planned(*jobs: tuple[float, float], rate: float | None = 1.0, now_s: float = 0.0) -> Plan:
    """Jobs of (seconds, deadline), named a, b, c …"""
    return plan([Job(chr(97 + i), *job) for i, job in enumerate(jobs)], free_rate=rate, now_s=now_s)


def test_jobs_go_by_deadline() -> None:
    assert planned((5.0, 60.0), (5.0, 20.0), (5.0, 40.0)) == Plan(order=("b", "c", "a"))


def test_one_giant_is_left_out_for_the_many_and_told_when_it_would_end() -> None:
    made = planned((50.0, 55.0), (10.0, 56.0), (10.0, 57.0), (10.0, 58.0))
    assert made.order == ("b", "c", "d", "a")
    assert made.will_miss == (("a", 80.0, 55.0),)


def test_a_faster_pool_makes_room_for_all() -> None:
    assert planned((50.0, 55.0), (10.0, 56.0), (10.0, 57.0), (10.0, 58.0), rate=2.0).will_miss == ()


def test_a_deadline_that_has_passed_costs_nobody_else_its() -> None:
    made = planned((3.0, 5.0), (5.0, 106.0), now_s=100.0)
    assert (made.order, [miss.id for miss in made.will_miss]) == (("b", "a"), ["a"])


@pytest.mark.parametrize("rate", [0.0, -1.0, nan, None])
def test_a_rate_of_nothing_proves_nothing(rate: float | None) -> None:
    assert planned((50.0, 1.0), (10.0, 0.5), rate=rate) == Plan(order=("b", "a"))


def test_no_deadline_is_never_missed() -> None:
    assert planned((1e9, inf), (1.0, 2.0)) == Plan(order=("b", "a"))


def most_in_time(jobs: list[Job], rate: float) -> int:
    """By trying all subsets."""

    def all_in_time(chosen: tuple[Job, ...]) -> bool:
        end_s = 0.0
        for job in sorted(chosen, key=lambda each: each.deadline_s):
            end_s += job.seconds / rate
            if end_s > job.deadline_s:
                return False
        return True

    return max(n for n in range(len(jobs) + 1) if any(map(all_in_time, combinations(jobs, n))))


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30)), max_size=8),
    st.sampled_from([0.5, 1.0, 2.0]),  # halves: sums are exact
)
def test_no_larger_set_could_be_in_time(drawn: list[tuple[int, int]], rate: float) -> None:
    jobs = [Job(f"{i}", seconds, deadline_s) for i, (seconds, deadline_s) in enumerate(drawn)]
    made = plan(jobs, free_rate=rate, now_s=0.0)
    assert sorted(made.order) == sorted(job.id for job in jobs)
    kept = len(jobs) - len(made.will_miss)
    assert kept == most_in_time(jobs, rate)
    end_s, by_id = 0.0, {job.id: job for job in jobs}
    for name in made.order[:kept]:
        end_s += by_id[name].seconds / rate
        assert end_s <= by_id[name].deadline_s


def test_the_order_of_asking_changes_nothing() -> None:
    rng = Random(4)
    jobs = [Job(f"{i}", float(rng.randrange(1, 5)), float(rng.randrange(100))) for i in range(300)]
    first = plan(jobs, free_rate=3.0, now_s=0.0)
    rng.shuffle(jobs)
    assert plan(jobs, free_rate=3.0, now_s=0.0) == first
    assert first.will_miss


def test_a_hundred_thousand_jobs_are_planned_in_a_moment() -> None:
    rng = Random(5)
    jobs = [Job(f"{i}", rng.random() * 10, rng.random() * 1e5) for i in range(100_000)]
    began_s = process_time()
    plan(jobs, free_rate=3.0, now_s=0.0)
    assert process_time() - began_s < 5.0  # measured 0.3 s
