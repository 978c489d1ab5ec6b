"""Batch tickets: how much goes first, how fast, who has the next turn and who will miss a deadline."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.fleets import POLICY, Town, asked
from tokenfleet.core.slomax.grants import Room, WaitingTicket, next_grants, room_of
from tokenfleet.core.slomax.tickets import BUCKET_RATIO, Backlog, DrainRate, Tickets, bucket_of

ROOM = Room(1_000, 1e9, 1_000)


def waits(name: str, *, gpu_s: float = 1.0, left_s: float = 1e6, kv_tokens: int = 100, **facts: Any) -> WaitingTicket:
    return WaitingTicket(("acme", name, 0), gpu_s, kv_tokens, left_s, facts.get("will_miss", False))


def names(keys: tuple[tuple[str, str, int], ...]) -> list[str]:
    return [request for _, request, _ in keys]


seconds = st.floats(1.0, 1e6)
tickets = st.lists(
    st.builds(
        lambda gpu_s, left_s, will_miss: (gpu_s, left_s, will_miss), st.floats(0.1, 500.0), seconds, st.booleans()
    ),
    min_size=1,
    max_size=30,
).map(lambda rows: [waits(f"r{i}", gpu_s=g, left_s=s, will_miss=m) for i, (g, s, m) in enumerate(rows)])


@given(st.lists(st.tuples(seconds, st.floats(0.0, 1e3)), max_size=50), seconds)
def test_what_is_told_to_go_first_is_what_is_due_first_up_to_a_tenth_of_the_time(
    rows: list[tuple[float, float]], left_s: float
) -> None:
    backlog = Backlog()
    for due_s, gpu_s in rows:
        backlog.add(due_s, gpu_s)
    least = sum(gpu_s for due_s, gpu_s in rows if due_s <= left_s)
    most = sum(gpu_s for due_s, gpu_s in rows if due_s <= left_s * BUCKET_RATIO * 1.001)
    assert least - 1e-6 <= backlog.ahead_s(left_s) <= most + 1e-6
    assert backlog.seconds == pytest.approx(sum(gpu_s for _, gpu_s in rows))


@given(st.floats(-1e9, 1e12))
def test_every_deadline_has_a_bucket(left_s: float) -> None:
    assert 0 <= bucket_of(left_s) < 256


def test_a_rate_is_measured_only_while_something_waits_all_the_time() -> None:
    rate = DrainRate()
    for now_s, waiting in ((0.0, True), (200.0, False), (210.0, True), (400.0, True)):
        rate.heard(60.0, window_s=300.0, waits=waiting, now_s=now_s)
    assert rate.per_s is None
    rate.heard(60.0, window_s=300.0, waits=True, now_s=510.0)
    assert rate.per_s == pytest.approx(0.2)


def test_a_miss_is_told_from_what_goes_first_at_the_measured_rate() -> None:
    known = Tickets()
    known.heard_backlogs({"m": Backlog({bucket_of(1000.0): 500.0}, tickets=5)})
    early = known.standing("m", left_s=100.0, gpu_s=5.0, rate_max=2.0)
    assert (early.ahead_s, early.will_miss) == (0.0, False)
    before = known.standing("m", left_s=2000.0, gpu_s=5.0, rate_max=2.0)
    assert (before.wait_s, before.end_s, before.will_miss) == (250.0, 255.0, False)
    known.rate("m").per_s = 0.2
    after = known.standing("m", left_s=2000.0, gpu_s=5.0, rate_max=2.0)
    assert (after.wait_s, after.will_miss) == (2500.0, True)


def test_a_token_is_good_for_its_own_request_at_replicas_that_share_the_secret() -> None:
    mine, another, stranger = Tickets(), Tickets(), Tickets()
    mine.secret = another.secret = b"one secret"
    stranger.secret = b"another secret"
    token = mine.token(asked("r"))
    assert another.shown(asked("r", ticket=token))
    assert not stranger.shown(asked("r", ticket=token))
    assert not another.shown(asked("other", ticket=token))
    assert not another.shown(asked("r"))
    assert not another.shown(asked("r", ticket="é" * 10))


def test_a_grant_that_was_used_here_is_none_though_postgresql_does_not_know_yet() -> None:
    known, mine = Tickets(), asked("r")
    known.heard_granted([("acme", "r", 0)])
    assert known.granted(mine)
    known.used(mine)
    known.heard_granted([("acme", "r", 0)])
    assert not known.granted(mine)
    known.heard_granted([])
    known.heard_granted([("acme", "r", 0)])  # it went back and was granted again
    assert known.granted(mine)


@given(tickets, st.floats(0.01, 10.0), st.integers(0, 30))
def test_turns_go_by_deadline_to_those_that_can_all_be_in_time(
    page: list[WaitingTicket], rate: float, most: int
) -> None:
    made = next_grants(page, Room(most, 1e9, most), rate=rate, more=True)
    granted = [each for each in page if each.key in made.granted]
    assert len(granted) <= most
    assert [each.left_s for each in granted_in_order(page, made.granted)] == sorted(each.left_s for each in granted)
    end_s = 0.0
    for each in granted_in_order(page, made.granted):
        end_s += each.gpu_s / rate
        assert end_s <= each.left_s * (1.0 + 1e-9)


def granted_in_order(page: list[WaitingTicket], keys: tuple[tuple[str, str, int], ...]) -> list[WaitingTicket]:
    by_key = {each.key: each for each in page}
    return [by_key[key] for key in keys]


@given(tickets, st.floats(0.01, 10.0))
def test_marks_tell_only_what_has_changed(page: list[WaitingTicket], rate: float) -> None:
    made = next_grants(page, ROOM, rate=rate, more=False)
    marked = {each.key: each.will_miss for each in page}
    assert not any(marked[key] for key in made.misses)
    assert all(marked[key] for key in made.in_time)
    assert len(made.granted) == len(page)  # who will miss goes too, while there is room and nobody else waits


def test_who_will_miss_its_deadline_has_no_turn_before_others_behind_the_page() -> None:
    page = [waits("hopeless", gpu_s=50.0, left_s=10.0), waits("small", gpu_s=1.0, left_s=20.0)]
    assert names(next_grants(page, ROOM, rate=1.0, more=True).granted) == ["small"]
    assert names(next_grants(page, ROOM, rate=1.0, more=False).granted) == ["small", "hopeless"]
    assert names(next_grants(page, ROOM, rate=1.0, more=True).misses) == ["hopeless"]


def test_the_first_that_finds_no_memory_is_waited_for() -> None:
    page = [waits("a", left_s=10.0), waits("large", left_s=20.0, kv_tokens=5_000), waits("b", left_s=30.0)]
    assert names(next_grants(page, Room(10, 1_000.0, 10), rate=None, more=False).granted) == ["a"]


def test_room_is_what_bounds_and_backlog_leave_on_instances_that_serve() -> None:
    town = Town("b", small=2)
    terms = POLICY.classes["batch"]
    most = terms.running_max_per_instance
    idle = room_of(town.site.pool("small-chat", town.now_s), terms, "batch")
    assert (idle.tickets, idle.seats) == (2 * most, 2 * most)
    town.place(asked("r", task="batch", deadline_s=5_000.0, stream=False))
    one = room_of(town.site.pool("small-chat", town.now_s), terms, "batch")
    assert one.tickets == 2 * most - 1
    assert one.kv_tokens < idle.kv_tokens
    town.hears_control("b-small-0", "draining")
    assert room_of(town.site.pool("small-chat", town.now_s), terms, "batch").seats == most


def test_grants_that_are_out_take_their_room_but_for_some_ahead() -> None:
    assert Room(10, 1_000.0, 20).without(4, 400.0, ahead=2) == Room(8, 600.0, 20)
    assert Room(0, 1_000.0, 20).without(4, 400.0, ahead=2).tickets == 0
