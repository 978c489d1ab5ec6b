"""Usage: who floods a pool, when it is over its share, and when the flood has passed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.slomax.terms import FairPolicy
from tokenfleet.core.slomax.usage import LOOKED_EVERY_S, Usage

TERMS = FairPolicy()
NOBODY: dict[str, float] = {}
MUCH = {"t0": 100.0}


def over(usage: Usage, now_s: float, *, waiting: dict[str, float] = NOBODY, heavy: str = "") -> frozenset[str]:
    return usage.over(lambda name: 8.0 if name == heavy else 1.0, lambda name: waiting.get(name, 0.0), TERMS, now_s)


def used(by: dict[str, float], now_s: float = 0.0) -> Usage:
    usage = Usage()
    for name, seconds in by.items():
        usage.spent(name, seconds, TERMS, now_s)
    return usage


TEN = {f"t{number}": 10.0 for number in range(10)}


def test_who_uses_many_times_its_share_floods() -> None:
    assert over(used(TEN), 1.0) == set()
    assert over(used(TEN | {"t0": 55.0}), 1.0) == set()  # 38 % of it all, four times its share is 40 %
    assert over(used(TEN | {"t0": 70.0}), 1.0) == {"t0"}


def test_a_tenant_alone_never_floods_and_one_of_two_only_beyond_three_quarters() -> None:
    assert over(used({"t0": 1e6}), 1.0) == set()
    assert over(used({"t0": 740.0, "t1": 260.0}), 1.0) == set()
    assert over(used({"t0": 760.0, "t1": 240.0}), 1.0) == {"t0"}


def test_a_larger_weight_is_a_larger_share() -> None:
    usage = used(TEN | {"t0": 70.0})
    assert over(usage, 1.0, heavy="t0") == set()


def test_a_few_seconds_are_no_flood() -> None:
    assert over(used({"t0": 19.0, "t1": 1.0}), 1.0) == set()


def test_a_flood_goes_on_while_much_of_it_waits_and_meanwhile_its_share_is_all_it_gets() -> None:
    usage = used(TEN | {"t0": 70.0})
    assert over(usage, 1.0) == {"t0"}
    for name in TEN:
        usage.spent(name, 0.0 if name == "t0" else 20.0, TERMS, 2.0)
    assert over(usage, 3.0, waiting=MUCH) == {"t0"}  # 70 of 340: more than its tenth
    for name in TEN:
        usage.spent(name, 0.0 if name == "t0" else 60.0, TERMS, 4.0)
    assert over(usage, 5.0, waiting=MUCH) == set()  # 70 of 880: its share is not used up
    usage.spent("t0", 60.0, TERMS, 5.0)
    assert over(usage, 5.0 + LOOKED_EVERY_S / 2, waiting=MUCH) == {"t0"}  # at once: it floods still


def test_a_flood_has_passed_when_it_is_within_its_share_and_little_of_it_waits() -> None:
    usage = used(TEN | {"t0": 70.0})
    assert over(usage, 1.0) == {"t0"}
    for name in TEN:
        usage.spent(name, 0.0 if name == "t0" else 60.0, TERMS, 4.0)
    assert over(usage, 5.0) == set()
    usage.spent("t0", 60.0, TERMS, 5.0)
    assert over(usage, 6.0) == set()  # a little more than its share, as anybody may have


def test_what_was_not_used_is_given_back() -> None:
    usage = used(TEN | {"t0": 70.0})
    usage.corrected("t0", predicted_s=60.0, actual_s=10.0)
    usage.corrected("nobody", predicted_s=60.0, actual_s=10.0)
    assert over(usage, 1.0) == set()


@given(st.dictionaries(st.sampled_from(sorted(TEN)), st.floats(0.0, 1e5), min_size=1), st.floats(0.0, 1e4))
def test_never_are_all_over_their_share(by: dict[str, float], later_s: float) -> None:
    usage = used(by)
    assert len(over(usage, later_s)) < max(len(by), 1) or not any(by.values())
    assert over(usage, later_s + 1e5) == set()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_what_is_no_time_counts_for_nothing(seconds: float) -> None:
    usage = used(TEN)
    usage.spent("t0", seconds, TERMS, 0.0)
    usage.corrected("t1", predicted_s=seconds, actual_s=0.0)
    assert over(usage, 1.0) == set()
    usage.spent("t2", 100.0, TERMS, 2.0)
    assert over(usage, 3.0) == {"t2"}
