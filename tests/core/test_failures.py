"""Failures: held back by outcomes, a while, and never the whole pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.failures import FAILED, Failures
from tokenfleet.core.policy import LivenessPolicy

POOL = [f"i{k}" for k in range(10)]


def failures() -> Failures:
    return Failures(LivenessPolicy())


def settle(known: Failures, outcomes: str, *, instance: str = "i0", at_s: float = 100.0, every_s: float = 0.1) -> float:
    """`x` is a failure, `.` a success; returns the time of the last one."""
    for number, outcome in enumerate(outcomes):
        known.settled(instance, failed=outcome == "x", now_s=at_s + number * every_s)
    return at_s + (len(outcomes) - 1) * every_s


@pytest.mark.parametrize(
    ("outcomes", "every_s", "held"),
    [
        ("xxxx", 0.1, False),
        ("xxxxx", 0.1, True),
        ("xxxxx", 60.0, True),
        ("xxxx.xxxx", 0.1, False),
        ("x.x.x.x.x", 0.1, False),
        ("x.x.x.x.x.", 0.1, True),
        ("x..x..x..x..x", 0.1, False),
        ("x.x.x.x.x.", 2.0, False),
    ],
)
def test_five_in_a_row_or_half_of_ten_in_ten_seconds(outcomes: str, every_s: float, held: bool) -> None:
    known = failures()
    at_s = settle(known, outcomes, every_s=every_s)
    assert known.standings(POOL, at_s) == ({"i0": "out"} if held else {})


def test_out_then_one_request_a_second_until_one_succeeds() -> None:
    known = failures()
    out_s = settle(known, "xxxxx")
    assert known.standings(POOL, out_s + 9.9) == {"i0": "out"}
    assert known.standings(POOL, out_s + 10.0) == {"i0": "probe"}
    known.probed("i0", out_s + 10.0)
    assert known.standings(POOL, out_s + 10.9) == {"i0": "probed"}
    assert known.standings(POOL, out_s + 11.0) == {"i0": "probe"}
    settle(known, ".", at_s=out_s + 11.5)
    assert known.standings(POOL, out_s + 11.5) == {}
    settle(known, "xxxx", at_s=out_s + 12.0)
    assert known.standings(POOL, out_s + 12.5) == {}


def test_each_failed_probe_doubles_the_time_up_to_two_minutes() -> None:
    known = failures()
    now_s = settle(known, "xxxxx")
    lengths: list[float] = []
    for _ in range(6):
        began_s = now_s
        while known.standings(POOL, now_s) == {"i0": "out"}:
            now_s += 1.0
        lengths.append(now_s - began_s)
        settle(known, "x", at_s=now_s)
    assert lengths == pytest.approx([10, 20, 40, 80, 120, 120])


def test_outcomes_of_requests_sent_before_it_went_out_are_no_news() -> None:
    known = failures()
    out_s = settle(known, "xxxxx")
    settle(known, ".....xxxxx", at_s=out_s + 1.0)
    assert known.standings(POOL, out_s + 9.0) == {"i0": "out"}
    assert known.standings(POOL, out_s + 10.0) == {"i0": "probe"}


def test_a_fault_of_the_clients_cannot_empty_a_pool() -> None:
    known = failures()
    for name in POOL:
        settle(known, "xxxxx", instance=name)
    assert len(known.standings(POOL, 100.5)) == 3
    assert len(known.standings(POOL, 111.0)) == 3  # half-open ones are held back too


@pytest.mark.parametrize(("size", "held"), [(1, 0), (2, 1), (3, 1), (7, 2)])
def test_a_small_pool_may_lose_one_and_never_its_only_one(size: int, held: int) -> None:
    known = failures()
    for name in POOL:
        settle(known, "xxxxx", instance=name)
    assert len(known.standings(POOL[:size], 100.5)) == held


def test_a_client_that_goes_away_says_nothing_about_the_instance() -> None:
    assert {"cancelled", "rejected", "first_token", "started", "progress"}.isdisjoint(FAILED)


def test_a_new_boot_starts_afresh() -> None:
    known = failures()
    settle(known, "xxxxx")
    known.forget("i0")
    assert known.standings(POOL, 100.5) == {}


@given(outcomes=st.lists(st.tuples(st.sampled_from(POOL), st.booleans(), st.floats(0, 5)), max_size=200))
def test_never_more_than_the_share(outcomes: list[tuple[str, bool, float]]) -> None:
    known, now_s = failures(), 0.0
    for name, failed, gap_s in outcomes:
        now_s += gap_s
        known.settled(name, failed=failed, now_s=now_s)
        assert len(known.standings(POOL, now_s)) <= 3
