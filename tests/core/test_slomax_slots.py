"""Shares in slots: they follow what is offered, one at a time, quickly and without turning to and fro."""

from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.core.slotted_site import LAG_S, MOVE_S, NAMES, SLOTS, Demand, SlottedSite, sharing
from tokenfleet.core.slomax.attainment import ClassWindow
from tokenfleet.core.slomax.controller import Controller, Step, Window
from tokenfleet.core.slomax.shares import one_moved
from tokenfleet.sim.control import Control, control_of

STEP_S, LEN_S = 300.0, 900.0


def step(at_s: float) -> float:
    return 0.35 if at_s < STEP_S else 0.65


def ramp(at_s: float) -> float:
    return 0.35 + 0.3 * min(max((at_s - 300.0) / 300.0, 0.0), 1.0)


def square(at_s: float) -> float:
    return 0.65 if int(at_s // 225.0) % 2 else 0.35


def controlled(demand: Demand, changes_s: Sequence[float], *, seed: int) -> Control:
    """How slots were moved, where they belong being within one of what is asked for."""
    site = SlottedSite(demand, seed=seed, terms=sharing()).run(LEN_S)

    def off(at_s: float, value: float) -> bool:
        return abs(value - demand(at_s) * SLOTS) >= 1.0

    return control_of("slots", site.slots, changes_s=changes_s, until_s=LEN_S, off=off)


@pytest.mark.parametrize("seed", range(1, 9))
@pytest.mark.parametrize(("demand", "changes_s"), [(step, [300.0]), (ramp, [600.0]), (square, [225.0, 450.0, 675.0])])
def test_a_step_a_ramp_and_a_square_wave_are_followed_within_two_minutes(
    demand: Demand, changes_s: list[float], seed: int
) -> None:
    control = controlled(demand, changes_s, seed=seed)
    assert all(settled_s is not None and settled_s <= 120.0 for settled_s in control.settled_s)
    assert control.worst_minute <= 1
    assert control.changes >= 2


@pytest.mark.parametrize("seed", range(1, 9))
def test_slots_stay_while_demand_does(seed: int) -> None:
    control = controlled(lambda _: 0.5, [], seed=seed)
    assert control.changes <= 4  # in a quarter of an hour of windows that are off by an eighth
    assert control.worst_minute <= 1


@pytest.mark.parametrize("seed", [1, 2])
def test_noise_turns_them_round_at_most_once_a_minute(seed: int) -> None:
    site = SlottedSite(lambda _: 0.55, noise=0.6, seed=seed, terms=sharing()).run(3_600.0)
    ways = [each.new.shares["talk"] > each.old.shares["talk"] for each in site.revisions]
    turned = [later.at_s for (was, now), later in zip(pairwise(ways), site.revisions[1:], strict=True) if was != now]
    assert len(turned) > 5
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(turned))


def test_slots_that_follow_serve_more_than_those_that_stay() -> None:
    demand = square
    following = SlottedSite(demand, terms=sharing()).run(LEN_S)
    static = SlottedSite(demand, terms=sharing(enabled=False)).run(LEN_S)
    assert static.revisions == []
    assert following.met / following.of > static.met / static.of + 0.1


def test_one_slot_moves_at_a_time_and_the_next_when_it_has_arrived() -> None:
    site = SlottedSite(step, noise=0.0, terms=sharing()).run(LEN_S)
    after = [each for each in site.revisions if each.at_s > STEP_S]
    assert len(after) >= 2
    for earlier, later in pairwise(after):
        assert later.at_s >= earlier.at_s + LAG_S + MOVE_S - 10.0  # a window may have begun before it arrived
    for each in site.revisions:
        moved = {name: round((each.new.shares[name] - each.old.shares[name]) * SLOTS, 6) for name in NAMES}
        assert sorted(moved.values()) == [-1.0, 1.0]


def window(start_s: float = 0.0, *, talk: ClassWindow, read: ClassWindow) -> Window:
    return Window(start_s=start_s, width_s=10.0, classes={"talk": talk, "read": read}, ready=SLOTS)


def told(*windows: Window) -> list[Step]:
    """What came of each window, every revision being in force at once."""
    controller, steps = Controller("site", sharing()), list[Step]()
    for each in windows:
        steps.append(controller.advance(each, lag_s=LAG_S))
        if (revision := steps[-1].revision) is not None:
            controller.applied(revision.number, each.end_s)
    return steps


def test_a_slot_moves_for_what_is_offered_before_anybody_misses() -> None:
    (first,) = told(window(talk=ClassWindow(met=100, offered_s=40.0), read=ClassWindow(met=100, offered_s=20.0)))
    assert first.revision is not None
    assert first.revision.new.shares == {"talk": 0.625, "read": 0.375}
    assert first.revision.why == "talk needs 52.6%, read needs 26.3%"


def test_no_slot_moves_while_all_have_room() -> None:
    idle = window(talk=ClassWindow(met=100, offered_s=20.0), read=ClassWindow(met=100, offered_s=2.0))
    assert told(idle) == [Step(held="on target")]
    missed = window(talk=ClassWindow(met=60, missed=40, offered_s=20.0), read=ClassWindow(met=100, offered_s=2.0))
    assert told(missed)[0].revision is not None


def test_what_waits_is_asked_for_too() -> None:
    even = ClassWindow(met=100, offered_s=30.0)
    behind = ClassWindow(met=100, offered_s=30.0, waiting=50, waiting_s=60.0)
    assert told(window(talk=even, read=even))[0].revision is None
    revision = told(window(talk=even, read=behind))[0].revision
    assert revision is not None
    assert revision.new.shares == {"talk": 0.375, "read": 0.625}


def test_who_misses_more_at_equal_work_gets_the_slot_that_is_in_doubt() -> None:
    """What is offered is just too little to move one; attainment decides."""
    more, less = ClassWindow(met=100, offered_s=35.5), ClassWindow(met=100, offered_s=24.5)
    missing = ClassWindow(met=40, missed=60, offered_s=35.5)
    assert told(window(talk=more, read=less))[0].revision is None
    revision = told(window(talk=missing, read=less))[0].revision
    assert revision is not None
    assert revision.new.shares["talk"] == 0.625
    assert "talk 40.0% of 99.0%" in revision.why


def test_the_kill_switch_gives_the_static_slots_back() -> None:
    controller = Controller("site", sharing())
    uneven = {"talk": ClassWindow(met=100, offered_s=48.0), "read": ClassWindow(met=100, offered_s=12.0)}
    assert controller.advance(window(0.0, **uneven), lag_s=LAG_S).revision is not None
    controller.follow(sharing(enabled=False))
    revision = controller.advance(window(10.0, **uneven), lag_s=LAG_S).revision
    assert revision is not None
    assert (revision.kind, revision.new.shares) == ("static", {"talk": 0.5, "read": 0.5})


def test_a_slot_goes_from_who_has_most_too_many_to_who_lacks_most() -> None:
    old = {"a": 0.5, "b": 0.25, "c": 0.25}
    assert one_moved(old, {"a": 0.3, "b": 0.45, "c": 0.25}, 4, hold=0.1) == {"a": 0.25, "b": 0.5, "c": 0.25}
    assert one_moved(old, {"a": 0.4, "b": 0.35, "c": 0.25}, 4, hold=0.1) == old  # 0.8 of a slot between them
