"""Paced: who waits in the queue of its class instead of being refused, and where it stands there."""

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.paced_towns import PACED, answers, ask, release, town
from tokenfleet.core.asked import ROUTE, SCHEDULE, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.paced import standing
from tokenfleet.core.policy import ClassQueue
from tokenfleet.core.schedule import withdrawn
from tokenfleet.core.slomax.waits import Waits

KV_TOKENS = 8000 * 32  # of an instance of these towns


def busy(b: Town, name: str = "first", prompt_tokens: int = 100_000) -> Decision:
    decision = ask(b, name, prompt_tokens=prompt_tokens)
    assert decision.verdict == "admit"
    return decision


def ends(b: Town, decision: Decision) -> None:
    b.hears_outcome(decision, "first_token", ttft_s=0.1)
    b.hears_outcome(decision, "finished", ttft_s=0.1, output_tokens=10, prompt_tokens=1000, cached_tokens=0)


def positions(b: Town, *names: str) -> list[int | None]:
    places = [standing(b.site, "small-chat", (name, 0), b.now_s) for name in names]
    return [place and place.position for place in places]


@pytest.mark.parametrize("steps", [ROUTE, SCHEDULE])
def test_what_no_instance_has_memory_for_waits_until_one_has(steps: Steps) -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=KV_TOKENS // 2)
    b.hears_outcome(first, "first_token", ttft_s=5.0)  # it decodes: no work lies before anybody, half of the KV is free
    assert ask(b, "r", prompt_tokens=KV_TOKENS // 2, steps=steps).verdict == "queue"
    b.now_s += 1.0
    assert answers(b) == []
    b.hears_outcome(first, "finished", ttft_s=5.0, output_tokens=10)
    assert answers(b) == [("r", "admit")]


@pytest.mark.parametrize("steps", [ROUTE, SCHEDULE])
def test_a_class_that_has_all_its_places_waits_for_one(steps: Steps) -> None:
    b = town(small=1, running_max_per_instance=1)
    first = busy(b, prompt_tokens=100)
    b.hears_outcome(first, "first_token", ttft_s=0.1)
    assert ask(b, "r", steps=steps).verdict == "queue"
    assert answers(b) == []
    ends(b, first)
    assert answers(b) == [("r", "admit")]


def test_bounds_on_load_refuse_nobody_who_can_wait_and_who_cant_as_before() -> None:
    b = town(small=1, running_max_per_instance=1)
    busy(b)
    assert ask(b, "waits", steps=SCHEDULE).verdict == "queue"
    refused = ask(b, "can't", steps=SCHEDULE, wait_max_s=0.0)
    assert (refused.verdict, refused.reason) == ("reject", "all_busy")


def test_a_site_that_is_full_for_all_keeps_who_can_wait_in_line_at_home() -> None:
    """FleetMind's ceiling closes home too; there the request waits."""
    b = town(small=1)
    for name in ("first", "second"):
        b.hears_outcome(busy(b, name), "first_token", ttft_s=4.0)
    waits = ask(b, "waits", prompt_tokens=KV_TOKENS // 5, steps=SCHEDULE)
    assert (waits.verdict, waits.site) == ("queue", "b")
    refused = ask(b, "can't", prompt_tokens=KV_TOKENS // 5, steps=SCHEDULE, wait_max_s=0.0)
    assert (refused.verdict, refused.reason) == ("reject", "all_busy")
    assert any("ceiling" in option.refused for option in refused.sites)


def test_what_can_never_be_served_is_refused_on_arrival() -> None:
    b = town(small=1)
    busy(b)
    for steps, reason in ((ROUTE, "context_too_long"), (SCHEDULE, "no_site")):
        assert ask(b, "r", prompt_tokens=10_000_000, steps=steps).reason == reason
    assert len(b.site.held) == 0


def test_no_more_wait_than_the_policy_has_places_for() -> None:
    b = town(small=1, pacing=replace(PACED, waiting_max=2))
    busy(b)
    assert [ask(b, f"r{n}").verdict for n in range(2)] == ["queue", "queue"]
    for steps in (ROUTE, SCHEDULE):
        full = ask(b, "r2", steps=steps)
        assert (full.verdict, full.reason) == ("reject", "all_busy")
        assert full.admission is not None
        assert full.admission.retry_after_s is not None
    withdrawn(b.site, ("r0", 0), b.now_s)
    assert ask(b, "r3").verdict == "queue"


def test_a_dry_run_would_wait_and_takes_no_place() -> None:
    b = town(small=1)
    busy(b)
    told = b.decide(asked("r", wait_max_s=60.0, dry_run=True), steps=ROUTE).decision
    assert (told.verdict, told.place, len(b.site.held)) == ("queue", None, 0)


def test_a_place_is_counted_among_those_of_its_class_and_moves_up() -> None:
    b = town(small=1)
    busy(b)
    told = [ask(b, f"batch-{n}", "batch", 100).place for n in range(3)]
    assert [place and place.position for place in told] == [1, 2, 3]
    chat = ask(b, "chat", "chat", 100)
    assert chat.place is not None
    assert chat.place.position == 1
    assert "number 1 of the chat requests" in chat.sentence
    withdrawn(b.site, ("batch-0", 0), b.now_s)
    assert positions(b, "batch-1", "batch-2", "chat", "batch-0") == [1, 2, 1, None]


def test_tenants_take_turns_in_what_a_place_says() -> None:
    b = town(small=1)
    busy(b)
    for n in range(5):
        ask(b, f"acme-{n}", "batch", 100)
    place = ask(b, "globex", "batch", 100, tenant="globex").place
    assert place is not None
    assert place.position == 1
    assert positions(b, "acme-4") == [6]


def test_a_guarded_request_that_is_late_stands_behind_those_that_are_not() -> None:
    b = town(small=1)
    busy(b)
    ask(b, "late", "chat", 100)
    b.now_s += 3.0
    ask(b, "in time", "chat", 100)
    assert positions(b, "in time", "late") == [1, 2]


def test_the_estimate_is_what_the_last_ones_waited_for_each_place() -> None:
    b = town(small=1)
    first = busy(b, prompt_tokens=20_000)
    places = [ask(b, f"r{n}", "batch", 100).place for n in range(2)]
    assert all(place is not None and place.wait_p50_s is None for place in places)
    b.now_s += 2.0
    b.hears_outcome(first, "first_token", ttft_s=2.0)
    for _ in range(2):
        for decision in list(release(b)):
            ends(b, decision)
    busy(b, "second", prompt_tokens=20_000)
    place = ask(b, "r", "batch", 100).place
    assert place is not None
    assert place.wait_p50_s == pytest.approx(2.0)
    assert place.wait_p90_s == pytest.approx(2.0)


def test_waits_are_seconds_a_place() -> None:
    waits = Waits()
    assert waits.expected_s(1) is None
    for n in range(1, 11):
        waits.went(position=10, waited_s=float(n))
    assert waits.expected_s(20) == (12.0, 20.0)


def test_the_shipped_policy_says_how_each_class_waits() -> None:
    classes = Town("b").site.policy.classes
    assert {name: terms.queue.role for name, terms in classes.items()} == {
        "chat": "guarded",
        "long": "reserving",
        "batch": "filling",
    }
    assert classes["long"].queue != ClassQueue(role="reserving")


@pytest.mark.parametrize(("lag_s", "verdict"), [(0.0, "queue"), (0.2, "admit"), (0.4, "queue")])
def test_of_the_backlog_that_is_seen_as_much_is_over_as_first_tokens_are_late(lag_s: float, verdict: str) -> None:
    """A batch job goes to an instance with 0.05 s before it; a prompt of 2,500 tokens is about 0.2 s."""
    b = town(small=1, pacing=replace(PACED, late_max_s=0.25 if lag_s < 0.3 else 0.01))
    for _ in range(2_000):
        b.site.held.heard_first_token("small-chat", ttft_s=0.3, lag_s=lag_s)
    busy(b, prompt_tokens=2_500)
    assert ask(b, "batch", "batch", 100).verdict == verdict
