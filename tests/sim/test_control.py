"""Control: turns, their densest minute, and when a number was within its band for good."""

import pytest

from tokenfleet.sim.control import control_of, settled_s, turns

UP_AND_DOWN = [(0.0, 4.0), (10.0, 5.0), (30.0, 6.0), (50.0, 5.0), (80.0, 5.0), (100.0, 6.0), (400.0, 5.0)]


def off(_: float, value: float) -> bool:
    return value < 5.0


def test_a_turn_is_a_fall_after_a_rise_or_a_rise_after_a_fall() -> None:
    assert turns(UP_AND_DOWN) == [50.0, 100.0, 400.0]
    assert turns([(0.0, 4.0)]) == turns([]) == []


@pytest.mark.parametrize(
    ("series", "from_s", "found"),
    [
        ([(0.0, 4.0), (10.0, 5.0)], 0.0, 10.0),
        ([(0.0, 4.0), (10.0, 5.0)], 4.0, 6.0),
        ([(0.0, 4.0), (10.0, 5.0)], 20.0, 0.0),  # it was there already
        ([(0.0, 5.0), (10.0, 4.0), (15.0, 5.0)], 0.0, 15.0),  # it left its band once more
        ([(0.0, 5.0), (10.0, 4.0)], 0.0, None),
        ([(0.0, 4.0), (60.0, 5.0)], 0.0, None),  # the next change came first
    ],
)
def test_settled_is_when_it_leaves_its_band_no_more(
    series: list[tuple[float, float]], from_s: float, found: float | None
) -> None:
    assert settled_s(series, from_s=from_s, until_s=50.0, off=off) == found


def test_each_change_is_settled_before_the_next() -> None:
    series = [(0.0, 4.0), (20.0, 5.0), (100.0, 4.0), (130.0, 5.0)]
    control = control_of("slots", series, changes_s=[10.0, 100.0], until_s=200.0, off=off)
    assert control.settled_s == (10.0, 30.0)
    assert (control.changes, control.reversals, control.worst_minute) == (3, 2, 2)
