"""Returning: who is refused for want of room is told when to come again, and then stands where it stood."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.paced_towns import PACED, ask, town
from tests.core.sharing import POOL, Sharing
from tokenfleet.core.asked import SCHEDULE, Decided
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.paced import standing
from tokenfleet.core.schedule import withdrawn

SECRET = b"the site's key"
BIG: dict[str, Any] = {"prompt_tokens": 8_000}  # an eighth of the one instance's KV, with its output


def signs(b: Town, issuer: str = "0/1") -> Town:
    b.site.returns.sign_with(SECRET, issuer=issuer)
    return b


def bound(b: Town, most: int = 1) -> Town:
    """At most so many requests of each class run on an instance."""
    policy = b.site.policy
    classes = {name: replace(terms, running_max_per_instance=most) for name, terms in policy.classes.items()}
    b.site.adopt(replace(policy, classes=classes))
    return signs(b)


def again(request: Request, refused: Decision, **facts: Any) -> Request:
    known: dict[str, Any] = {"attempt": refused.attempt + 1, "return_ticket": refused.return_ticket}
    return replace(request, **(known | facts))


def wait_s(refused: Decision) -> float:
    assert refused.admission is not None
    told_s = refused.admission.retry_after_s
    return told_s if told_s is not None else refused.admission.not_before_s or 0.0


def ends(b: Town, decision: Decision) -> None:
    b.hears_outcome(decision, "finished", output_tokens=10)


def test_who_comes_again_with_its_ticket_pays_no_retry_and_its_service_level_runs_on() -> None:
    b = bound(Town("b", small=1))
    running = b.place(asked("running"))
    request = asked("r", elapsed_s=0.5)
    refused = b.place(request)
    assert (refused.verdict, refused.reason, refused.returned) == ("reject", "all_busy", "")
    while b.site.retries.retry("acme"):
        pass
    ends(b, running)
    b.now_s += wait_s(refused)
    assert b.decide(again(request, refused, return_ticket="")).decision.reason == "retry_budget"
    came = b.decide(again(request, refused)).decision
    assert (came.verdict, came.returned) == ("admit", "kept")
    assert came.stood_s == pytest.approx(wait_s(refused))
    assert b.site.retries.left("acme") == 0.0


def test_the_logical_clock_is_the_ticket_s_where_the_gateway_s_stands_still() -> None:
    """Of a deadline of 20 s more than 10 have passed, and its output takes 10."""
    b = bound(Town("b", small=1))
    b.place(asked("running", declared_class="batch"))
    request = asked("r", deadline_s=20.0, declared_class="batch", max_tokens=700)
    refused = b.place(request)
    ended = b.site.ledger.entries()
    assert (refused.reason, bool(refused.return_ticket), len(list(ended))) == ("all_busy", True, 1)
    b.now_s += wait_s(refused) + 9.9
    late = b.decide(again(request, refused, return_ticket="", elapsed_s=25.0)).decision
    assert late.reason == "infeasible"
    came = b.decide(again(request, refused)).decision
    assert came.returned == "kept"
    assert came.admission is not None
    assert came.reason == "all_busy"
    told = b.site.returns.standing(
        again(request, came, attempt=2),
        entry="acme",
        request_class="batch",
        pool="small-chat@b",
        terms=b.site.policy.slomax.retry,
        now_s=b.now_s + wait_s(came),
    )
    assert told.elapsed_s == pytest.approx(wait_s(refused) + 9.9 + wait_s(came))
    assert told.stood_s == pytest.approx(told.elapsed_s)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"model": "large-chat", "cross_site": False}, "no_instances"),
        ({"prompt_tokens": 200_000}, "no_site"),
    ],
)
def test_what_no_room_would_help_is_given_no_ticket(facts: dict[str, Any], reason: str) -> None:
    b = bound(Town("b", small=1))
    refused = b.place(asked("r", **facts)).reason, b.place(asked("r", **facts)).return_ticket
    assert refused == (reason, "")


def test_a_quota_is_no_want_of_room() -> None:
    b = signs(Town("b", small=1, tenant_limits={"acme": 1}))
    b.place(asked("first"))
    refused = b.place(asked("second"))
    assert (refused.reason, refused.return_ticket) == ("quota", "")


def test_a_dry_run_is_told_when_and_given_no_ticket() -> None:
    b = bound(Town("b", small=1))
    b.place(asked("running"))
    told = b.decide(asked("r", dry_run=True)).decision
    assert (told.reason, told.return_ticket) == ("all_busy", "")
    assert wait_s(told) > 0.0


def test_a_worthless_ticket_loses_no_request() -> None:
    b = bound(Town("b", small=2))
    for text, note in (("forged", "forged"), (b"\0".decode(), "forged"), ("x" * 9_000, "forged")):
        came = b.place(asked(f"r-{len(text)}", attempt=1, return_ticket=text))
        assert came.returned == note
        assert came.reason in ("", "all_busy")


def test_who_comes_new_finds_the_places_taken_of_those_who_are_due() -> None:
    b = bound(Town("b", small=1), most=4)
    running = [b.place(asked(f"running-{n}")) for n in range(4)]
    for number in range(12):  # tickets come back here
        request = asked(f"early-{number}")
        refused = b.place(request)
        b.now_s += wait_s(refused)
        assert b.place(again(request, refused)).returned == "kept"
    requests = [asked(f"first-{n}") for n in range(4)]
    told = [b.place(each) for each in requests]
    b.now_s += max(map(wait_s, told))
    for each in running[:2]:
        ends(b, each)
    b.hears_telemetry()
    new = b.place(asked("new"))
    assert new.reason == "all_busy"
    assert new.admission is not None
    assert new.admission.kept >= 2
    assert "told to come again" in new.detail
    came = [b.place(again(request, refused)).verdict for request, refused in zip(requests, told, strict=True)]
    assert came == ["admit", "admit", "reject", "reject"]


def test_the_time_told_grows_with_what_was_sent_away_before() -> None:
    b = bound(Town("b", small=1))
    b.place(asked("running", prompt_tokens=15_000))
    told = [b.place(asked(f"r-{n}", prompt_tokens=15_000)) for n in range(40)]
    ahead_s = [each.admission.ahead_s or 0.0 for each in told if each.admission is not None]
    assert ahead_s[0] == 0.0
    assert all(later > earlier for earlier, later in pairwise(ahead_s))
    assert max(map(wait_s, told[-5:])) > 3.0 * max(map(wait_s, told[:3]))


def test_who_would_be_late_is_told_to_come_again_only_if_it_could_be_in_time_then() -> None:
    b = signs(Town("b", small=1))
    for number in range(40):
        b.site.gates.of("small-chat").first_token(predicted_s=1.0, actual_s=1.0 + number / 1000.0)
    b.place(asked("long", prompt_tokens=50_000, declared_class="long"))
    chat = b.place(asked("chat"))
    assert chat.admission is not None
    assert (chat.admission.gate, chat.return_ticket, chat.admission.retry_after_s) == ("reject", "", None)
    reserve = replace(b.site.policy.slomax.reserve, enabled=False)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, reserve=reserve)))
    told = [b.place(asked(f"r-{n}", declared_class="batch", deadline_s=5.5, max_tokens=8)) for n in range(40)]
    assert {each.reason for each in told} <= {"infeasible", ""}
    helped = [each for each in told if each.return_ticket]
    assert 0 < len(helped) < len([each for each in told if each.reason])
    assert all(wait_s(each) < 5.5 for each in helped)
    early = next(each for each in helped)
    b.now_s += wait_s(early)
    came = b.decide(again(asked(early.request, declared_class="batch", deadline_s=5.5, max_tokens=8), early)).decision
    assert came.admission is not None
    assert (came.returned, came.admission.gate != "") == ("kept", True)  # and is judged again


@pytest.mark.parametrize("keeps", [True, False])
def test_in_line_it_stands_before_those_who_came_while_it_was_away(keeps: bool) -> None:
    b = signs(town(small=1, pacing=replace(PACED, waiting_max=1)))
    gate = replace(b.site.policy.slomax.gate, enabled=False)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, gate=gate)))
    ask(b, "running", prompt_tokens=50_000)
    long: dict[str, Any] = {"declared_class": "long", "prompt_tokens": 20_000, "wait_max_s": 60.0}
    assert b.place(asked("line", **long)).verdict == "queue"
    refused = b.place(asked("r", **long))
    assert (refused.reason, bool(refused.return_ticket)) == ("all_busy", True)
    b.now_s += wait_s(refused) - 0.1
    pacing = replace(PACED, waiting_max=9)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, pacing=pacing)))
    assert b.place(asked("later", **long)).verdict == "queue"
    b.now_s += 0.1
    ticket = {} if keeps else {"return_ticket": ""}
    came = b.place(again(asked("r", **long), refused, **ticket))
    assert (came.verdict, came.returned) == ("queue", "kept" if keeps else "")
    places = [standing(b.site, "small-chat", call, b.now_s) for call in (("line", 0), ("r", 1), ("later", 0))]
    assert [place and place.position for place in places] == ([1, 2, 3] if keeps else [1, 3, 2])


def test_with_a_line_that_is_full_no_one_new_takes_the_place_of_who_is_due() -> None:
    b = signs(town(small=1, pacing=replace(PACED, waiting_max=5)))
    ask(b, "running", prompt_tokens=50_000)
    for number in range(5):
        assert ask(b, f"line-{number}", steps=SCHEDULE).verdict == "queue"
    for number in range(14):
        request = asked(f"away-{number}", wait_max_s=600.0, declared_class="chat")
        refused = b.place(request)
        b.now_s += wait_s(refused)
        assert b.place(again(request, refused)).returned == "kept"
    waits = [asked(f"due-{number}", wait_max_s=600.0, declared_class="chat") for number in range(3)]
    told = [b.place(each) for each in waits]
    b.now_s += max(map(wait_s, told))
    for number in range(2):
        withdrawn(b.site, (f"line-{number}", 0), b.now_s)
    full = b.place(asked("new", wait_max_s=600.0, declared_class="chat"))
    assert (full.reason, "places are kept" in full.detail) == ("all_busy", True)
    came = [b.place(again(request, refused)).verdict for request, refused in zip(waits, told, strict=True)]
    assert came == ["queue", "queue", "reject"]


def filled() -> Sharing:
    """One replica, all of whose credit is spent."""
    site = Sharing("one", small=1)
    site.passes(2.0)
    signs(site.owner.town)
    while site.owner.asks(f"big-{site.owner.town.decisions}", **BIG).verdict == "admit":
        site.passes(1.5)
    return site


def test_who_waited_in_vain_comes_again_with_all_that_it_has_waited() -> None:
    """What it was held counts, and so does the time that it was away."""
    site = filled()
    one = site.owner
    assert one.asks("r", wait_max_s=1.0, **BIG).verdict == "queue"
    site.passes(1.1)
    (refused,) = [answer.decision for answer in one.releases() if isinstance(answer, Decided)]
    assert (refused.reason, bool(refused.return_ticket)) == ("all_busy", True)
    site.passes(wait_s(refused))
    came = one.asks("r", attempt=1, return_ticket=refused.return_ticket, wait_max_s=60.0, **BIG)
    assert came.stood_s == pytest.approx(1.1 + wait_s(refused), abs=0.1)


def test_the_owner_s_line_has_who_comes_again_before_those_of_its_tenant_who_came_later() -> None:
    site = filled()
    one = site.owner
    assert one.asks("before", wait_max_s=60.0, **BIG).verdict == "queue"
    site.passes(1.0)
    refused = one.asks("r", **BIG)
    assert (refused.reason, bool(refused.return_ticket)) == ("all_busy", True)
    site.passes(0.5)
    assert one.asks("later", wait_max_s=60.0, **BIG).verdict == "queue"
    site.passes(max(wait_s(refused) - 0.5, 0.1))
    came = one.asks("r", attempt=1, return_ticket=refused.return_ticket, wait_max_s=60.0, **BIG)
    assert (came.verdict, came.returned) == ("queue", "kept")
    site.passes(0.5)
    assert [place.ticket.ticket for place in one.owners[POOL].line.first(9)] == ["before#0", "r#1", "later#0"]
