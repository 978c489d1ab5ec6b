"""The least that a class gets: a saturated class above it starves none.

As GIE #1861, where the default policy between flows could starve those of low priority.
"""

import heapq

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.core.slomax.floor import Floor
from tokenfleet.core.slomax.terms import FairPolicy

RANKS = ("chat", "long", "batch")
ROUND = FairPolicy(floor_share=0.05, starved_after_s=15.0)


def test_classes_go_by_rank_while_none_has_waited_long() -> None:
    floor = Floor(ROUND)
    floor.dispatched("chat", 100.0, waiting={"chat", "batch"})
    assert floor.order(RANKS, {"batch": 14.9, "chat": 0.1}) == ["chat", "batch"]


def test_a_class_that_waited_long_goes_first_until_it_has_its_share() -> None:
    floor = Floor(ROUND)
    floor.dispatched("chat", 100.0, waiting=set(RANKS))
    assert floor.order(RANKS, {"chat": 1.0, "long": 15.0, "batch": 20.0}) == ["batch", "long", "chat"]
    floor.dispatched("batch", 8.0, waiting=set(RANKS))  # 5 of them were owed, 3 are 5 % of 60
    floor.dispatched("chat", 59.0, waiting=set(RANKS))
    assert not floor.owed("batch", 20.0)
    floor.dispatched("chat", 2.0, waiting=set(RANKS))
    assert floor.owed("batch", 20.0)


def test_a_class_with_its_share_goes_by_rank_however_long_it_waits() -> None:
    floor = Floor(ROUND)
    for _ in range(100):
        floor.dispatched("chat", 1.0, waiting=set(RANKS))
        floor.dispatched("batch", 0.06, waiting=set(RANKS))
    assert floor.order(RANKS, {"chat": 0.0, "batch": 60.0}) == ["chat", "batch"]


def test_what_a_class_had_while_there_was_room_is_held_against_it_for_one_request_only() -> None:
    floor = Floor(ROUND)
    for _ in range(50):
        floor.dispatched("batch", 8.0, waiting=set(RANKS))
    floor.dispatched("chat", 161.0, waiting=set(RANKS))
    assert floor.owed("batch", 20.0)


def test_who_does_not_wait_saves_nothing_and_arrears_are_bounded() -> None:
    floor = Floor(ROUND)
    floor.dispatched("chat", 1e6, waiting={"chat", "batch"})
    floor.dispatched("batch", 10.0, waiting={"chat", "batch"})
    assert not floor.owed("batch", 60.0)
    floor.dispatched("chat", 1e6, waiting={"chat", "batch"})
    floor.dispatched("chat", 1.0, waiting={"chat"})
    assert not floor.owed("batch", 60.0)


def test_no_number_breaks_it() -> None:
    floor = Floor(ROUND)
    for seconds in (float("nan"), -1.0, 0.0):
        floor.dispatched("chat", seconds, waiting=set(RANKS))
    assert not floor.owed("batch", 60.0)


@settings(max_examples=50, deadline=None)
@given(
    engines=st.integers(1, 4),
    chat_s=st.floats(0.2, 3.0),
    long_s=st.floats(0.5, 10.0),
    batch_s=st.floats(0.5, 20.0),
)
def test_ten_minutes_of_a_saturated_class_starve_none(
    engines: int, chat_s: float, long_s: float, batch_s: float
) -> None:
    floor, takes_s = Floor(FairPolicy()), {"chat": chat_s, "long": long_s, "batch": batch_s}
    nothing: dict[str, float] = dict.fromkeys(RANKS, 0.0)
    served_s, waited_most_s = dict(nothing), dict(nothing)
    since_s = dict(nothing)  # one of each waits at any time, the next as soon as one goes out
    running: list[float] = []
    now_s = 0.0
    while now_s < 600.0:
        while len(running) < engines:
            name = floor.order(RANKS, {each: now_s - since_s[each] for each in RANKS})[0]
            waited_most_s[name] = max(waited_most_s[name], now_s - since_s[name])
            since_s[name] = now_s
            served_s[name] += takes_s[name]
            floor.dispatched(name, takes_s[name], waiting=set(RANKS))
            heapq.heappush(running, now_s + takes_s[name])
        now_s = heapq.heappop(running)
    for name in ("long", "batch"):
        share = served_s[name] / sum(served_s.values())
        assert share >= 0.05 or max(waited_most_s[name], now_s - since_s[name]) <= 30.0, name
    assert served_s["chat"] >= 0.84 * sum(served_s.values()) - 2 * (long_s + batch_s)
