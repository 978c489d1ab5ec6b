"""The reserve for interactive work: as much as may arrive before what runs has drained."""

from random import Random

import numpy as np
import pytest

from tokenfleet.core.slomax.reserve import Reserve, Reserved, may_start
from tokenfleet.core.slomax.terms import ReservePolicy

TERMS = ReservePolicy()
WHOLE = ReservePolicy(share_min=0.0, share_max=1.0)


def busy(
    rate: float, *, seconds: float = 0.5, for_s: int = 600, terms: ReservePolicy = WHOLE, seed: int = 1
) -> Reserve:
    """A pool at which so many interactive requests came a second, at random."""
    made, rng, at_s = Reserve(terms), Random(seed), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < for_s:
        made.arrived(seconds, at_s)
    return made


def test_the_drain_time_is_the_q90_of_what_still_runs() -> None:
    made = Reserve(TERMS)
    assert made.now([float(i) for i in range(1, 11)], instances=8, now_s=0.0).drain_s == 9.0
    assert made.now([], instances=8, now_s=0.0).drain_s == 0.0
    assert made.now([1e9], instances=8, now_s=0.0).drain_s == 300.0


def test_the_need_is_the_q99_of_what_came_in_so_long_a_time() -> None:
    made = busy(4.0)
    draws = np.random.default_rng(2).poisson(40.0, 100_000)
    assert made.now([10.0], instances=8, now_s=600.0).need_s == pytest.approx(0.5 * np.quantile(draws, 0.99), rel=0.1)


def test_the_reserve_is_the_need_in_shares_of_the_pool() -> None:
    reserved = busy(4.0).now([10.0], instances=8, now_s=600.0)
    assert reserved.share == pytest.approx(reserved.need_s / 80.0)
    assert 0.25 < reserved.share < 0.45  # the mean would be a quarter


def test_longer_work_needs_less_of_a_reserve_in_proportion() -> None:
    made = busy(4.0)
    assert (
        made.now([60.0], instances=8, now_s=600.0).share
        < made.now([10.0], instances=8, now_s=600.0).share
        < made.now([1.0], instances=8, now_s=600.0).share
    )


def test_it_stays_within_its_bounds() -> None:
    assert busy(0.1, terms=TERMS).now([10.0], instances=8, now_s=600.0).share == 0.1
    assert busy(20.0, terms=TERMS).now([10.0], instances=8, now_s=600.0).share == 0.5
    assert busy(20.0, terms=TERMS).now([], instances=8, now_s=600.0).share == 0.1  # nothing to wait for
    assert busy(20.0, terms=TERMS, for_s=50).now([10.0], instances=8, now_s=50.0).share == 0.1  # too little seen


def test_what_came_ten_minutes_ago_is_forgotten() -> None:
    made = busy(4.0)
    assert made.now([10.0], instances=8, now_s=899.0).need_s > 0.0
    assert made.now([10.0], instances=8, now_s=1200.0).need_s == 0.0
    made.arrived(0.5, 1e9)
    assert made.now([10.0], instances=8, now_s=1e9 + 100.0).need_s == 0.5


def test_no_number_is_an_arrival() -> None:
    made = Reserve(WHOLE)
    for second in range(100):
        made.arrived(float("nan"), float(second))
        made.arrived(-1.0, float(second))
    assert made.now([10.0], instances=8, now_s=100.0).need_s == 0.0


@pytest.mark.parametrize(
    ("free_share", "ends_in_s", "may"),
    [
        (0.5, 100.0, True),
        (0.41, 100.0, True),
        (0.39, 100.0, False),  # touches the reserve
        (0.39, 10.0, True),  # and borrows it
        (0.39, 10.1, False),
        (0.05, 1.0, False),  # there is no room at all
    ],
)
def test_only_what_ends_soon_borrows_the_reserve(free_share: float, ends_in_s: float, may: bool) -> None:
    reserved = Reserved(share=0.3, drain_s=20.0, need_s=48.0)
    assert may_start(free_share=free_share, needs_share=0.1, ends_in_s=ends_in_s, reserved=reserved, terms=TERMS) is may
