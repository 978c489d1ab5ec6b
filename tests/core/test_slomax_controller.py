"""The controller of shares and ceiling: it follows what was delivered, and each guard keeps it from doing harm."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.shared_pool import CLASSES, TERMS, Demand, SharedPool
from tokenfleet.core.slomax.attainment import Attainment, ClassWindow, enough, half_width
from tokenfleet.core.slomax.controller import Controller, Step, Window
from tokenfleet.core.slomax.shares import projected
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy

CALM = {"chat": 0.45, "long": 0.25, "batch": 0.15}


def step(to: dict[str, float], at_s: float = 120.0) -> Demand:
    return lambda now_s: CALM if now_s < at_s else to


def ramp(to: dict[str, float], *, from_s: float, for_s: float) -> Demand:
    def demand(now_s: float) -> dict[str, float]:
        done = min(max((now_s - from_s) / for_s, 0.0), 1.0)
        return {name: CALM[name] + done * (to[name] - CALM[name]) for name in CALM}

    return demand


def square(high: dict[str, float], period_s: float) -> Demand:
    return lambda now_s: high if int(now_s // period_s) % 2 else CALM


def at_most_one_turn_a_minute(pool: SharedPool) -> bool:
    turns = pool.turns()
    return all(later - earlier >= 60.0 for earlier, later in pairwise(turns))


@pytest.mark.parametrize("requests", [60, 300, 3_000])
@pytest.mark.parametrize(
    "to",
    [
        {"chat": 0.65, "long": 0.15, "batch": 0.10},
        {"chat": 0.30, "long": 0.25, "batch": 0.35},
        {"chat": 0.35, "long": 0.42, "batch": 0.10},
    ],
)
def test_a_step_of_the_load_is_followed_within_five_minutes(to: dict[str, float], requests: int) -> None:
    pool = SharedPool(step(to), requests=requests).run(900.0)
    assert pool.settled_s(since_s=120.0, at_least=0.96) <= (180.0 if requests >= 300 else 300.0)
    assert at_most_one_turn_a_minute(pool)
    assert [each for each in pool.revisions if each.at_s > 600.0] == []  # and it stands still then


def test_a_ramp_is_followed_all_the_way() -> None:
    pool = SharedPool(ramp({"chat": 0.65, "long": 0.15, "batch": 0.10}, from_s=120.0, for_s=300.0)).run(1200.0)
    assert pool.settled_s(since_s=420.0, at_least=0.96) <= 60.0
    assert min(worst for _, worst in pool.worst) > 0.8
    assert pool.turns() == []


@pytest.mark.parametrize("period_s", [20.0, 30.0, 60.0, 90.0, 150.0, 300.0])
@pytest.mark.parametrize("requests", [60, 300])
def test_a_square_wave_turns_it_at_most_once_a_minute(period_s: float, requests: int) -> None:
    """Each half asks for what the other has: no shares suit both."""
    pool = SharedPool(square({"chat": 0.2, "long": 0.2, "batch": 0.5}, period_s), requests=requests).run(3600.0)
    assert at_most_one_turn_a_minute(pool)
    assert len(pool.turns()) <= 60


def test_a_square_wave_that_some_shares_suit_comes_to_rest() -> None:
    pool = SharedPool(square({"chat": 0.55, "long": 0.15, "batch": 0.15}, 60.0)).run(1800.0)
    assert pool.settled_s(since_s=0.0, at_least=0.96) <= 300.0
    assert [each for each in pool.revisions if each.at_s > 600.0] == []


def test_what_nobody_can_satisfy_moves_nothing_for_ever() -> None:
    """All three classes miss: shares have settled between them."""
    pool = SharedPool(lambda _: {"chat": 0.75, "long": 0.45, "batch": 0.3}).run(3600.0)
    assert all(0.05 <= share <= 0.9 for each in pool.revisions for share in each.new.shares.values())
    assert at_most_one_turn_a_minute(pool)


def window(start_s: float = 0.0, *, chat: ClassWindow | None = None, **facts: Any) -> Window:
    known: dict[str, Any] = {"output_tokens": 100_000, "ready": 8, "utilisation": 0.9, "residual_ratio": 1.0}
    classes = {"chat": chat or MISSING, "long": ClassWindow(offered_s=16.0), "batch": ClassWindow(offered_s=4.0)}
    return Window(start_s=start_s, width_s=10.0, classes=classes, **(known | facts))


MISSING = ClassWindow(met=70, missed=30, offered_s=40.0)
WELL = ClassWindow(met=100, missed=0, offered_s=40.0)


def told(controller: Controller, *windows: Window, lag_s: float = 5.0) -> list[Step]:
    """What came of each window; every revision is taken up at once."""
    steps: list[Step] = []
    for each in windows:
        steps.append(controller.advance(each, lag_s=lag_s))
        if (revision := steps[-1].revision) is not None:
            controller.applied(revision.number, each.end_s)
    return steps


def made(**terms: Any) -> Controller:
    return Controller("p", replace(TERMS, **terms))


def test_a_revision_says_what_was_and_what_is_and_why() -> None:
    (first,) = told(made(), window())
    revision = first.revision
    assert revision is not None
    assert (revision.pool, revision.number, revision.at_s, revision.kind) == ("p", 1, 10.0, "step")
    assert revision.old.shares == {"chat": 0.5, "long": 0.3, "batch": 0.2}
    assert revision.new.shares == pytest.approx({"chat": 0.53, "long": 0.285, "batch": 0.185})
    assert revision.why == "chat 70.0% of 98.0%"


def test_no_step_is_larger_than_three_points_and_all_add_up_to_one() -> None:
    for revision in SharedPool(step({"chat": 0.1, "long": 0.1, "batch": 0.7})).run(900.0).revisions:
        assert sum(revision.new.shares.values()) == pytest.approx(1.0)
        for name, share in revision.new.shares.items():
            assert CLASSES[name].floor - 1e-9 <= share <= CLASSES[name].ceiling + 1e-9
            assert share - revision.old.shares[name] <= 0.03 + 1e-6


def test_within_two_points_of_the_target_nothing_moves() -> None:
    near = ClassWindow(met=965, missed=35, offered_s=40.0)
    assert told(made(), *[window(10.0 * i, chat=near) for i in range(20)])[-1] == Step(held="on target")


def test_a_rejected_request_is_a_missed_one() -> None:
    refused = ClassWindow(met=70, missed=0, rejected=30, offered_s=40.0)
    assert told(made(), window(chat=refused))[0].revision is not None


def test_a_class_gives_no_share_that_it_needs() -> None:
    controller = made()
    steps = told(controller, *[window(20.0 * i) for i in range(20)])
    assert steps[0].revision is not None
    assert controller.setting.shares["long"] == pytest.approx(16.0 / 80.0 / 0.95, abs=1e-3)
    assert controller.setting.shares["batch"] == pytest.approx(0.0526, abs=1e-3)


def test_few_outcomes_are_gathered_until_they_say_enough() -> None:
    few = ClassWindow(met=7, missed=3, offered_s=40.0)
    steps = told(made(), *[window(10.0 * i, chat=few) for i in range(5)])
    assert [step.revision is None for step in steps] == [True] * 4 + [False]
    fewer = ClassWindow(met=5, missed=3, offered_s=40.0)  # 48 in a minute
    steps = told(made(), *[window(10.0 * i, chat=fewer) for i in range(20)])
    assert all(step.revision is None for step in steps)


def test_a_sure_share_needs_fewer_outcomes() -> None:
    assert half_width(40, 40) < 0.05 < half_width(20, 40)
    assert enough(40, 40, TERMS)
    assert not enough(20, 40, TERMS)
    assert enough(25, 50, TERMS)
    assert not enough(0, 0, TERMS)


@pytest.mark.parametrize(
    ("facts", "lag_s", "why"),
    [
        ({}, 20.1, "the watermark is 20 s behind"),
        ({"ready": 7}, 5.0, "7 instances are ready, 8 were"),
        ({"residual_ratio": 1.6}, 5.0, "first tokens take 1.60 times as long as predicted"),
        ({"residual_ratio": 0.6}, 5.0, "first tokens take 0.60 times as long as predicted"),
    ],
)
def test_it_stands_still_while_its_view_is_no_good(facts: dict[str, Any], lag_s: float, why: str) -> None:
    controller = made()
    told(controller, window(chat=WELL))
    assert controller.advance(window(10.0, **facts), lag_s=lag_s) == Step(held=why)
    assert controller.advance(window(20.0, ready=facts.get("ready", 8)), lag_s=5.0).revision is not None


def test_one_change_at_a_time_and_the_next_on_a_whole_window_of_its_own() -> None:
    controller = made()
    first = controller.advance(window(), lag_s=5.0).revision
    assert first is not None
    assert controller.advance(window(10.0), lag_s=5.0) == Step(held="revision 1 is in flight")
    controller.applied(7, 12.0)  # another's
    assert controller.advance(window(20.0), lag_s=5.0) == Step(held="revision 1 is in flight")
    controller.applied(1, 32.0)
    assert controller.advance(window(30.0), lag_s=5.0) == Step(held="revision 1 came into force during this window")
    assert controller.advance(window(40.0), lag_s=5.0).revision is not None


def test_a_window_counts_once() -> None:
    controller = made()
    told(controller, window(20.0, chat=WELL))
    for start_s in (20.0, 10.0):
        assert controller.advance(window(start_s), lag_s=5.0) == Step(held="this window has been seen")


LATE = ClassWindow(met=90, missed=10, waiting=5, offered_s=40.0)


def test_the_ceiling_falls_when_admitted_work_is_late_and_wasted() -> None:
    controller = made()
    (first,) = told(controller, window(chat=LATE, waste_tokens=6_000))
    assert controller.setting.ceiling == pytest.approx(0.855)
    assert first.revision is not None
    assert "admitted work is 8.0% under its target and 6.0% of the output is waste" in first.revision.why


def test_the_ceiling_stays_when_what_is_late_is_little_waste_or_was_refused() -> None:
    refused = ClassWindow(met=90, missed=0, rejected=30, offered_s=40.0)
    for each in (window(chat=LATE, waste_tokens=4_000), window(chat=refused, waste_tokens=6_000)):
        controller = made()
        told(controller, each)
        assert controller.setting.ceiling == 0.95


def test_a_ceiling_that_may_fall_no_further_is_no_reason() -> None:
    (first,) = told(made(ceiling_min=0.95), window(chat=LATE, waste_tokens=9_000))
    assert first.revision is not None
    assert first.revision.why == "chat 90.0% of 98.0%"


def test_the_ceiling_rises_by_a_point_while_all_is_well_and_a_queue_waits_below_it() -> None:
    queued = ClassWindow(met=100, missed=0, waiting=5, offered_s=40.0)
    for facts, ceiling in (({"utilisation": 0.7}, 0.81), ({"utilisation": 0.8}, 0.8)):
        controller = made(ceiling=0.8)
        told(controller, window(chat=queued, **facts))
        assert controller.setting.ceiling == pytest.approx(ceiling)
    controller = made(ceiling=0.8)
    told(controller, window(chat=WELL, utilisation=0.7))
    assert controller.setting.ceiling == 0.8  # nobody waits


def test_the_ceiling_stays_within_its_bounds_and_turns_at_most_once_a_minute() -> None:
    controller, queued = made(), ClassWindow(met=100, missed=0, waiting=5, offered_s=40.0)
    told(controller, *[window(20.0 * i, chat=LATE, waste_tokens=9_000) for i in range(30)])
    assert controller.setting.ceiling == 0.5
    way, turned_s, worst = -1, list[float](), ClassWindow(met=80, missed=20, waiting=5)
    for i in range(120):
        now_s, before = 1000.0 + 10.0 * i, controller.setting.ceiling
        facts: dict[str, Any] = {"chat": worst, "waste_tokens": 9_000} if i % 5 == 4 else {"chat": queued}
        told(controller, window(now_s, utilisation=0.3, **facts))
        rise = controller.setting.ceiling - before
        if rise * way < 0.0:
            way, turned_s = -way, [*turned_s, now_s]
    assert len(turned_s) > 5
    assert all(later - earlier >= 60.0 for earlier, later in pairwise(turned_s))
    assert controller.setting.ceiling >= 0.5


def after_a_change(controller: Controller) -> float:
    """Ten calm windows, then one that makes it change; when the next window begins."""
    told(controller, *[window(10.0 * i, chat=WELL) for i in range(10)])
    assert told(controller, window(100.0, chat=ClassWindow(met=0, missed=100, offered_s=40.0)))[0].revision is not None
    return 110.0


def test_a_change_that_costs_throughput_at_equal_load_is_taken_back_after_three_windows() -> None:
    controller = made()
    start_s = after_a_change(controller)
    steps = told(controller, *[window(start_s + 10.0 * i, output_tokens=94_000) for i in range(3)])
    assert [step.revision is None for step in steps] == [True, True, False]
    assert steps[0].held == "9400 tokens/s, 10000 before revision 1 at the same load; watched"
    revision = steps[2].revision
    assert revision is not None
    assert (revision.kind, revision.number, revision.new.shares["chat"]) == ("revert", 2, 0.5)


def test_after_a_revert_nothing_is_tried_for_five_minutes() -> None:
    controller = made()
    start_s = after_a_change(controller)
    told(controller, *[window(start_s + 10.0 * i, output_tokens=94_000) for i in range(3)])
    steps = told(controller, *[window(start_s + 30.0 + 10.0 * i) for i in range(31)])
    assert [i for i, step in enumerate(steps) if step.revision is not None][:1] == [29]


def test_a_revert_says_nothing_of_another_load() -> None:
    controller = made()
    start_s = after_a_change(controller)
    told(controller, *[window(start_s + 10.0 * i, output_tokens=94_000) for i in range(3)])
    more = ClassWindow(met=0, missed=100, offered_s=80.0)
    steps = told(controller, *[window(start_s + 30.0 + 10.0 * i, chat=more) for i in range(10)])
    assert [i for i, step in enumerate(steps) if step.revision is not None][:1] == [5]  # a minute after it turned back


@pytest.mark.parametrize(
    "facts",
    [
        {"output_tokens": 96_000},  # within a twentieth
        {"output_tokens": 80_000, "chat": ClassWindow(met=70, missed=30, offered_s=30.0)},  # less was asked for
    ],
)
def test_less_output_for_another_cause_reverts_nothing(facts: dict[str, Any]) -> None:
    controller = made()
    start_s = after_a_change(controller)
    steps = told(controller, *[window(start_s + 10.0 * i, **facts) for i in range(6)])
    assert [step.revision.kind for step in steps if step.revision] == ["step"] * 6


def test_one_slow_window_is_no_evidence() -> None:
    controller = made()
    start_s = after_a_change(controller)
    for i in range(12):
        (done,) = told(controller, window(start_s + 10.0 * i, chat=WELL, output_tokens=90_000 if i % 3 else 100_000))
        assert done.revision is None or done.revision.kind == "step"


def test_the_kill_switch_puts_the_static_shares_into_force_at_once_and_keeps_them() -> None:
    controller = made()
    told(controller, *[window(20.0 * i) for i in range(5)])
    controller.advance(window(100.0), lag_s=5.0)  # one is in flight
    controller.follow(replace(TERMS, enabled=False))
    revision = controller.advance(window(110.0), lag_s=1e9).revision
    assert revision is not None
    assert (revision.kind, revision.new.shares) == ("static", {"chat": 0.5, "long": 0.3, "batch": 0.2})
    assert controller.advance(window(120.0), lag_s=5.0) == Step(held="switched off")
    controller.follow(TERMS)
    controller.applied(revision.number, 121.0)
    assert controller.advance(window(130.0), lag_s=5.0).revision is not None


def test_what_was_changed_before_the_kill_switch_is_not_taken_back_after_it() -> None:
    controller = made()
    start_s = after_a_change(controller)
    controller.follow(replace(TERMS, enabled=False))
    told(controller, window(start_s, chat=WELL))
    controller.follow(TERMS)
    steps = told(controller, *[window(start_s + 10.0 * i, chat=WELL, output_tokens=80_000) for i in range(1, 9)])
    assert [step.revision.kind for step in steps if step.revision] == []


def test_other_classes_in_the_policy_begin_with_its_shares() -> None:
    controller = made()
    told(controller, window())
    two = {"chat": ClassShare(share=0.7), "batch": ClassShare(share=0.3)}
    controller.follow(ControllerPolicy(enabled=True, classes=two))
    (first,) = told(controller, window(10.0))
    assert first.revision is not None
    assert (first.revision.kind, first.revision.new.shares) == ("static", {"chat": 0.7, "batch": 0.3})


def test_a_restart_goes_on_from_the_last_revision() -> None:
    before = made()
    last = told(before, *[window(20.0 * i) for i in range(5)])[-1].revision
    assert last is not None
    after = made()
    after.restored(last, at_s=last.at_s)
    (first,) = told(after, window(1000.0))
    assert first.revision is not None
    assert (first.revision.number, first.revision.old) == (last.number + 1, last.new)


def test_without_classes_it_shares_nothing_out() -> None:
    controller = Controller("p", ControllerPolicy(enabled=True))
    assert told(controller, *[window(10.0 * i) for i in range(5)])[-1] == Step(held="on target")


def test_the_same_windows_give_the_same_revisions() -> None:
    demand = square({"chat": 0.2, "long": 0.2, "batch": 0.5}, 90.0)
    assert SharedPool(demand).run(1200.0).revisions == SharedPool(demand).run(1200.0).revisions


def test_a_class_that_misses_gets_its_step_whole_where_others_can_spare_it_and_else_what_there_is() -> None:
    assert projected({"chat": 0.53, "long": 0.3, "batch": 0.2}, CLASSES, {"chat": 0.53})["chat"] == 0.53
    needs = {"long": 0.29, "batch": 0.19}
    shares = projected({"chat": 0.53, "long": 0.3, "batch": 0.2}, CLASSES, needs | {"chat": 0.53}, needs)
    assert shares == pytest.approx({"chat": 0.52, "long": 0.29, "batch": 0.19})


@given(st.lists(st.floats(-1.0, 2.0), min_size=3, max_size=3), st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3))
def test_projected_shares_add_up_within_their_bounds_and_are_the_nearest(
    wanted: list[float], needed: list[float]
) -> None:
    names = list(CLASSES)
    shares = projected(dict(zip(names, wanted, strict=True)), CLASSES, dict(zip(names, needed, strict=True)))
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-5)
    for name, share in shares.items():
        assert CLASSES[name].floor <= share <= CLASSES[name].ceiling
    if not any(needed):
        off = [share - want for share, want in zip(shares.values(), wanted, strict=True)]
        free = [by for by, (name, share) in zip(off, shares.items(), strict=True) if CLASSES[name].floor < share < 0.9]
        assert max(free, default=0.0) - min(free, default=0.0) < 1e-5  # all that may move move alike


def test_what_was_acted_on_once_is_not_acted_on_again() -> None:
    known = Attainment()
    known.hear({"chat": MISSING}, TERMS)
    assert known.error("chat", TERMS) == pytest.approx(0.28)
    known.begin_anew()
    assert known.error("chat", TERMS) == 0.0
    known.hear({"chat": WELL}, TERMS)
    assert known.of("chat") == pytest.approx(0.7 + 0.3 * 0.3)


def test_the_sum_of_errors_is_bounded_and_ends_with_the_error() -> None:
    known = Attainment()
    for _ in range(50):
        known.hear({"chat": ClassWindow(missed=100)}, TERMS)
    assert known.error_sum("chat") == 1.0
    for _ in range(50):
        known.hear({"chat": WELL}, TERMS)
    assert known.error_sum("chat") == 0.0
