"""Return tickets: a place in line that is signed, timed by durations alone, good once, and nobody else's."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import entry, placed
from tests.core.fleets import asked
from tokenfleet.core.decision import Request
from tokenfleet.core.sealed import seal
from tokenfleet.core.slomax.returns import VERSION, Kept, Returns, Standing
from tokenfleet.core.slomax.terms import RetryPolicy

TERMS = RetryPolicy()
SECRET = b"the site's key"
POOL = "small-chat@b"
REFUSED = asked("r", elapsed_s=3.0)


def replica(name: str = "0/1", secret: bytes = SECRET) -> Returns:
    made = Returns()
    made.sign_with(secret, issuer=name)
    return made


def given_by(returns: Returns, request: Request = REFUSED, *, now_s: float = 100.0, **facts: Any) -> str:
    """The ticket of a chat request that has stood in line for a second and is told to come again in 4 s."""
    known: dict[str, Any] = {"came_s": now_s - 1.0, "virtual_ns": 7, "work_s": 0.5, "wait_s": 4.0, "judged": True}
    return returns.give(request, entry="acme", request_class="chat", pool=POOL, now_s=now_s, **(known | facts))


def shown_to(
    returns: Returns,
    ticket: str,
    *,
    now_s: float,
    elapsed_s: float = 0.0,
    request_class: str = "chat",
    pool: str = POOL,
    **facts: Any,
) -> Standing:
    request = replace(REFUSED, **({"attempt": 1, "elapsed_s": elapsed_s, "return_ticket": ticket} | facts))
    return returns.standing(request, entry="acme", request_class=request_class, pool=pool, terms=TERMS, now_s=now_s)


@pytest.mark.parametrize(
    ("now_s", "note"), [(103.4, "early"), (103.5, "kept"), (104.0, "kept"), (114.0, "kept"), (114.1, "late")]
)
def test_a_ticket_is_good_from_its_time_on_for_ten_seconds(now_s: float, note: str) -> None:
    returns = replica()
    assert shown_to(returns, given_by(returns), now_s=now_s).note == note


def test_the_place_and_the_service_level_count_from_the_first_arrival() -> None:
    returns = replica()
    standing = shown_to(returns, given_by(returns), now_s=106.0)
    assert standing == Standing(note="kept", stood_s=1.0 + 6.0, elapsed_s=3.0 + 6.0, virtual_ns=7, judged=True)


def test_who_gave_a_ticket_times_it_by_its_own_clock_whatever_the_gateway_says() -> None:
    returns = replica()
    assert shown_to(returns, given_by(returns), now_s=101.0, elapsed_s=1e6).note == "early"


@pytest.mark.parametrize(("elapsed_s", "note"), [(6.0, "early"), (7.0, "kept"), (17.0, "kept"), (17.5, "late")])
def test_another_replica_times_it_by_the_gateway_s_clock_and_no_clock_of_two(elapsed_s: float, note: str) -> None:
    """Its own clock began a million seconds later; what its virtual time was then it does not know."""
    ticket, other = given_by(replica()), replica("1/9")
    standing = shown_to(other, ticket, now_s=1e6, elapsed_s=elapsed_s)
    assert standing.note == note
    if note == "kept":
        assert standing == Standing(note="kept", stood_s=1.0 + elapsed_s - 3.0, elapsed_s=elapsed_s, judged=True)


def test_a_ticket_is_good_once() -> None:
    returns = replica()
    ticket = given_by(returns)
    assert shown_to(returns, ticket, now_s=104.0, dry_run=True).keeps
    assert [shown_to(returns, ticket, now_s=now_s).note for now_s in (104.0, 105.0)] == ["kept", "used"]
    assert shown_to(returns, ticket, now_s=106.0, attempt=2).note == "foreign"


def test_an_attempt_that_a_site_sent_back_keeps_the_place_too() -> None:
    returns = replica()
    ticket = given_by(returns)
    assert shown_to(returns, ticket, now_s=104.0).keeps
    assert shown_to(returns, ticket, now_s=104.2, attempt=2, sites_tried=("c",)).keeps


@pytest.mark.parametrize(
    "other",
    [
        {"tenant": "globex"},
        {"id": "r-2"},
        {"request_class": "long"},
        {"pool": "large-chat@b"},
        {"pool": "small-chat@c"},
        {"attempt": 0},
        {"attempt": 2},
    ],
)
def test_a_ticket_is_nobody_else_s(other: dict[str, Any]) -> None:
    returns = replica()
    assert shown_to(returns, given_by(returns), now_s=104.0, **other).note == "foreign"


def test_what_this_site_did_not_sign_is_worth_nothing() -> None:
    returns = replica()
    others = given_by(replica("0/1", b"another site's key"))
    unsigned = seal(VERSION + b"\x93no ticket", SECRET)
    a_token = seal(b"\x01" + b"of a waiting request", SECRET)
    for text in (others, unsigned, a_token, "x", "x" * 5000, "é", "AAAA" * 20):
        assert shown_to(returns, text, now_s=104.0).note == "forged"
    assert shown_to(Returns(), given_by(returns), now_s=104.0).note == "forged"


@given(st.integers(0, 10_000), st.characters(codec="ascii", categories=("Lu", "Ll", "Nd")))
def test_no_character_of_a_ticket_can_be_another(at: int, character: str) -> None:
    returns = replica()
    ticket = given_by(returns)
    at %= len(ticket)
    changed = ticket[:at] + character + ticket[at + 1 :]
    note = shown_to(returns, changed, now_s=104.0).note
    assert note == ("kept" if changed == ticket else "forged")


def test_without_a_key_there_are_no_tickets() -> None:
    assert given_by(Returns()) == ""
    assert shown_to(replica(), "", now_s=104.0) == Standing()


def sent_away(returns: Returns, names: range, *, now_s: float) -> list[tuple[Request, str]]:
    requests = [replace(REFUSED, id=f"r-{n}") for n in names]
    return [(each, given_by(returns, each, now_s=now_s)) for each in requests]


def kept(returns: Returns, now_s: float) -> Kept:
    return returns.kept("small-chat", "chat", TERMS, now_s)


def test_places_are_kept_for_those_who_are_due_as_far_as_they_have_come_of_late() -> None:
    returns = replica()
    sent_away(returns, range(10), now_s=0.0)
    assert kept(returns, 5.0).places == 0  # whether any comes is not known
    for number in range(100):
        away = sent_away(returns, range(number, number + 1), now_s=100.0 + number)
        for request, ticket in away:
            again = replace(request, attempt=1, return_ticket=ticket)
            at_s = 104.0 + number
            found = returns.standing(again, entry="acme", request_class="chat", pool=POOL, terms=TERMS, now_s=at_s)
            assert found.keeps
    sent_away(returns, range(1000, 1010), now_s=300.0)
    assert kept(returns, 303.0).places == 0
    there = kept(returns, 304.0)
    assert (there.places, there.work_s) == (10, pytest.approx(5.0, rel=0.05))
    for number in range(20):
        sent_away(returns, range(2000 + 10 * number, 2010 + 10 * number), now_s=320.0 + 20.0 * number)
    assert kept(returns, 704.0).places == 0  # none of two hundred came


def test_who_was_placed_elsewhere_is_not_waited_for() -> None:
    returns = replica()
    sent_away(returns, range(2), now_s=0.0)
    assert returns.absent_s("small-chat", "chat", came_s=1e9) == 1.0
    returns.told(placed("d-1", request="r-0", attempt=1, tenant="acme", model="small-chat"))
    assert returns.absent_s("small-chat", "chat", came_s=1e9) == 0.5


def test_a_flood_of_refused_requests_is_not_remembered_without_end() -> None:
    returns = replica()
    sent_away(returns, range(3_000), now_s=0.0)
    assert returns.absent_s("small-chat", "chat", came_s=1e9) == 0.5 * 1_000
    returns.retain(frozenset())
    assert returns.absent_s("small-chat", "chat", came_s=1e9) == 0.0


def test_what_came_later_does_not_go_before() -> None:
    returns = replica()
    for number in range(4):
        sent_away(returns, range(number, number + 1), now_s=10.0 * number)
    assert returns.absent_s("small-chat", "chat", came_s=15.0) == 1.0


def test_room_comes_by_what_drains_and_by_a_second_an_instance_where_that_is_unknown() -> None:
    returns = replica()

    def room(running: float) -> tuple[float, float | None]:
        return returns.room_in_s("small-chat", "chat", ahead_s=7.0, work_s=1.0, running=running, instances=4)

    for number in range(3):
        assert room(8.0) == (2.0, None)
        returns.ended(entry(f"d-{number}", model="small-chat", work_s=0.5, age_s=4.0))
    assert room(8.0) == (8.0, pytest.approx(1.0))  # one ends each half second, and each brings half a second
    assert room(0.0) == (2.0, None)
    for number in range(200):
        returns.ended(entry(f"e-{number}", model="small-chat", work_s=0.5, age_s=8.0))
    assert room(8.0)[0] == pytest.approx(16.0, rel=0.05)
