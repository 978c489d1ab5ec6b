"""Rules: what a blind rule of the policy picks, what it still refuses, and what its decisions say."""

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.policy import BlindRule
from tokenfleet.core.tokenpilot.replay import rescored
from tokenfleet.core.tokenpilot.rules import RULES


def town(rule: str, **engines: Any) -> Town:
    b = Town("b", **engines)
    b.site.adopt(replace(b.site.policy, tokenpilot=replace(b.site.policy.tokenpilot, rule=rule)))
    return b


def targets(b: Town, count: int, **facts: Any) -> list[str]:
    return [b.place(asked(f"r{n}", **facts), steps=ROUTE).target for n in range(count)]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    b = town("round_robin", small=3)
    assert targets(b, 6) == ["b-small-0", "b-small-1", "b-small-2"] * 2
    b.place(asked("long", prompt_tokens=100_000), steps=ROUTE)
    assert targets(b, 3) == ["b-small-1", "b-small-2", "b-small-0"]


def test_least_requests_evens_the_count_and_draws_among_equals() -> None:
    b = town("least_requests", small=4)
    assert set(Counter(targets(b, 40)).values()) == {10}
    firsts = {town("least_requests", small=4).decide(asked(f"f{n}"), steps=ROUTE).decision.target for n in range(40)}
    assert len(firsts) == 4


def test_power_of_two_avoids_the_loaded_and_random_does_not() -> None:
    taken: dict[str, int] = {}
    for rule in ("power_of_two", "random"):
        b = town(rule, small=2)
        first = b.place(asked("first"), steps=ROUTE).target
        taken[rule] = sum(b.decide(asked(f"r{n}"), steps=ROUTE).decision.target == first for n in range(100))
    assert taken["power_of_two"] == 0
    assert 30 < taken["random"] < 70


@pytest.mark.parametrize("rule", RULES)
def test_hard_filters_hold_and_the_decision_tells_its_rule(rule: BlindRule) -> None:
    b = town(rule, small=3)
    b.hears_control("b-small-1", "draining")
    decisions = [b.place(asked(f"r{n}"), steps=ROUTE) for n in range(12)]
    assert {decision.target for decision in decisions} == {"b-small-0", "b-small-2"}
    assert {decision.how for decision in decisions} == {rule}
    outcomes = {rescored(decision, b.site.policy.tokenpilot).outcome for decision in decisions}
    assert outcomes == {"unknown"}
    assert b.place(asked("held", prompt_tokens=90_000, wait_max_s=60.0), steps=ROUTE).verdict == "admit"
    assert b.place(asked("held too", prompt_tokens=90_000, wait_max_s=60.0), steps=ROUTE).verdict == "admit"
    assert f"rule {rule} holds nothing" in b.site.held.off(b.site.policy.tokenpilot, b.now_s)


@pytest.mark.parametrize("rule", RULES)
def test_predictions_filter_nothing_and_silence_is_the_suspects_draw(rule: BlindRule) -> None:
    b = town(rule, small=2)
    b.place(asked("long", prompt_tokens=120_000), steps=ROUTE)
    assert b.decide(asked("r"), steps=ROUTE).decision.excluded == {}
    b.hears_telemetry(agent_silent_s=30.0)
    assert b.decide(asked("r"), steps=ROUTE).decision.how == "suspect"


def test_equal_questions_get_equal_answers() -> None:
    for rule in RULES:
        one, other = (targets(town(rule, small=5), 20) for _ in range(2))
        assert one == other
