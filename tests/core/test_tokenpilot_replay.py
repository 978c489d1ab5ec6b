"""Replay: a decision follows from its own record, a forged one does not, and other weights tell what they change."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.builders import snapshot
from tests.core.fleets import POLICY, Town, asked
from tokenfleet.core.asked import ROUTE, SCHEDULE, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.site import Heard
from tokenfleet.core.tokenpilot.replay import REWEIGHED, rescored, reweighed

WEIGHTS = POLICY.tokenpilot


def day(seed: int, *, instances: int = 5, requests: int = 60, steps: Steps = ROUTE, **facts: Any) -> list[Decision]:
    """Decisions of a busy site: prompts of all sizes, some with a cached prefix, some of a session; a few ends."""
    rng = Random(seed)
    town = Town("b", small=instances)
    keys = [rng.getrandbits(64) for _ in range(6)]
    for n in range(instances):
        held = rng.sample(keys, 3)
        town.site.heard(snapshot(f"b-small-{n}", held), Heard(now_s=town.now_s))
    decided: list[Decision] = []
    for n in range(requests):
        key = rng.choice(keys).to_bytes(8, "little")
        warm = rng.random() < 0.6
        known: dict[str, Any] = {
            "prompt_tokens": rng.choice((200, 2_000, 20_000)),
            "block_keys": key if warm else b"",
            "block_tokens": 128 if warm else 0,
            "session": rng.choice(("", "", "s1", "s2")),
        }
        decided.append(town.place(asked(f"r{seed}-{n}", **(known | facts)), steps=steps))
        town.now_s += rng.random() * 0.05
        town.hears_telemetry()
        if decided[-1].target and rng.random() < 0.7:
            town.hears_outcome(decided[-1], rng.choice(("first_token", "finished")))
    return decided


@pytest.mark.parametrize("steps", [ROUTE, SCHEDULE], ids=["route", "schedule"])
@pytest.mark.parametrize("instances", [1, 2, 5, 30])
def test_every_decision_follows_from_what_it_recorded(instances: int, steps: Steps) -> None:
    told = [rescored(each, WEIGHTS) for seed in range(2) for each in day(seed, instances=instances, steps=steps)]
    counts = Counter(each.outcome for each in told)
    assert counts["different"] == 0, [(each.why, each.decision.sentence) for each in told if each.why][:5]
    assert all(not each.decision.candidates for each in told if each.outcome == "no_choice")
    unknown = [each for each in told if each.outcome == "unknown"]
    assert all(each.why for each in unknown)
    if instances <= WEIGHTS.candidates_kept:
        assert not unknown
    else:  # of more near-ties than are kept the draw is known, the prefix's home is not
        assert {each.how for each in unknown} == {"prefix_home"}
        assert max(each.decision.near_ties for each in told if each.how == "near_tie") > WEIGHTS.candidates_kept
    if instances == 5:
        assert {each.how for each in told} >= {"least_cost", "near_tie", "prefix_home", "session"}


def routed(decided: list[Decision], how: str) -> list[Decision]:
    """Those with a choice to forge: found so, with a rival."""
    return [each for each in decided if each.how == how and len(each.candidates) > 1]


def test_a_target_that_its_record_does_not_give_is_told_with_the_reason() -> None:
    for each in routed(day(1), "least_cost"):
        second, first = each.candidates[:2]
        forged = replace(each, target=first.instance, candidates=(first, second, *each.candidates[2:]), runner_up="")
        told = rescored(forged, WEIGHTS)
        assert (told.outcome, told.target) == ("different", each.target)
        assert "costs" in told.why


def test_a_draw_is_the_requests_own() -> None:
    drawn = routed(day(2, block_keys=b"", session="", prompt_tokens=1000), "near_tie")
    others = [rescored(replace(each, request=f"other-{each.request}"), WEIGHTS) for each in drawn]
    assert {rescored(each, WEIGHTS).outcome for each in drawn} == {"same"}
    assert any(each.outcome == "different" and "seeded draw" in each.why for each in others)


def test_a_draw_among_more_near_ties_than_are_kept_is_told_too() -> None:
    town = Town("b", small=30)
    drawn = [town.decide(asked(f"r{n}"), steps=ROUTE).decision for n in range(40)]
    assert {(each.how, each.near_ties, len(each.candidates)) for each in drawn} == {("near_tie", 30, 8)}
    assert {rescored(each, WEIGHTS).outcome for each in drawn} == {"same"}
    others = [rescored(replace(each, request=f"other-{each.request}"), WEIGHTS) for each in drawn]
    assert Counter(each.outcome for each in others)["different"] > 30


def test_a_record_that_does_not_say_how_is_unknown_whatever_its_sentence_says() -> None:
    for each in day(1):
        if each.target:
            old = replace(each, how="", near_ties=0, drawn=None)
            assert rescored(old, WEIGHTS).outcome == "unknown"
            misled = replace(each, sentence="x; drawn among near-ties with y")
            assert rescored(misled, WEIGHTS).outcome == rescored(each, WEIGHTS).outcome


def test_a_prefix_has_one_home_among_near_ties() -> None:
    homes = routed(day(2), "prefix_home")
    others = [rescored(replace(each, block_keys=bytes(each.block_keys[:7]) + b"?"), WEIGHTS) for each in homes]
    assert {rescored(each, WEIGHTS).outcome for each in homes} == {"same"}
    assert any(each.outcome == "different" and "home" in each.why for each in others)
    assert rescored(replace(homes[0], block_keys=b""), WEIGHTS).outcome == "unknown"


def test_a_near_tie_beyond_the_limit_and_a_session_that_should_have_moved_are_told() -> None:
    decided = day(3)
    for how in ("near_tie", "prefix_home", "session"):
        [each, *_] = routed(decided, how)
        chosen = each.candidates[0]
        dear = replace(chosen, kv_s=chosen.kv_s + 9.0, cost_s=chosen.cost_s + 9.0)
        told = rescored(replace(each, candidates=(dear, *each.candidates[1:]), runner_up=""), WEIGHTS)
        assert told.outcome == "different", how
        assert told.target != each.target


def test_terms_that_do_not_add_up_and_a_false_gap_are_told() -> None:
    [each, *_] = routed(day(1), "least_cost")
    chosen = replace(each.candidates[0], kv_s=1.0)
    assert "don't add up" in rescored(replace(each, candidates=(chosen, *each.candidates[1:])), WEIGHTS).why
    assert each.gap_s is not None
    assert "gap" in rescored(replace(each, gap_s=each.gap_s + 0.1), WEIGHTS).why
    assert "first candidate" in rescored(replace(each, target="another"), WEIGHTS).why


def test_a_refusal_follows_from_the_counts_of_the_filters() -> None:
    town = Town("b", small=3)
    for n in range(3):
        town.hears_control(f"b-small-{n}", "draining")
    refused = town.decide(asked("r1"), steps=ROUTE).decision
    assert rescored(refused, WEIGHTS).outcome == "same"
    told = rescored(replace(refused, reason="all_busy"), WEIGHTS)
    assert (told.outcome, told.why) == ("different", "the filters' counts give no_instances")
    empty = Town("b").decide(asked("r1"), steps=ROUTE).decision
    assert rescored(empty, WEIGHTS).outcome == "no_choice"


def test_what_is_held_back_chose_nothing_yet() -> None:
    for each in day(1):
        held = replace(each, verdict="queue", target="", address="", sentence="held: b-small-0 is the cheapest")
        assert rescored(held, WEIGHTS).outcome == "no_choice"
        assert reweighed(held, WEIGHTS, {"reuse_max": 0.1}).outcome == "no_choice"


CHANGES: list[dict[str, float]] = [
    {"margin_weight": 3.0},
    {"reuse_base": 0.0, "reuse_slope_per_s": 0.0},
    {"reuse_max": 0.6},
    {"decode_price_s": 0.2},
    {"tie_min_s": 0.5, "tie_max_s": 0.5},
    {"session_gain_min_s": 0.0, "session_gain_min_share": 0.0},
]


@pytest.mark.parametrize("changed", CHANGES, ids=lambda changed: "-".join(changed))
def test_other_weights_give_on_the_record_what_they_would_have_given_live(changed: dict[str, float]) -> None:
    """All candidates are kept, so the record knows as much as the live choice did."""
    moved = 0
    for seed in range(2):
        town = Town("b", small=4)
        rng = Random(seed)
        now, then = TokenPilotPolicy(), replace(TokenPilotPolicy(), **changed)
        for n in range(60):
            request = asked(
                f"r{n}", prompt_tokens=rng.choice((300, 3000, 30_000)), session=rng.choice(("", "s1", "s2"))
            )
            live = town.decide(request, steps=ROUTE).decision
            town.site.adopt(replace(POLICY, tokenpilot=then))
            otherwise = town.decide(request, steps=ROUTE).decision
            town.site.adopt(replace(POLICY, tokenpilot=now))
            told = reweighed(live, now, changed)
            if told.candidates:
                costs_s = {each.instance: each.cost_s for each in told.candidates}
                live_s = {each.instance: each.cost_s for each in otherwise.candidates if not each.filtered}
                assert costs_s == pytest.approx(live_s)
            if told.outcome == "different":
                moved += 1
                assert otherwise.how != "session" or live.how != "session"
                if otherwise.how == "least_cost":
                    assert told.target == otherwise.target
            elif told.outcome == "same" and otherwise.how == live.how == "least_cost":
                assert otherwise.target == live.target
            town.hears_outcome(town.place(request, steps=ROUTE), "first_token")
            town.now_s += 0.02
            town.hears_telemetry()
    if changed in CHANGES[3:4] or "session_gain_min_s" in changed:
        assert moved > 0


def test_the_same_weights_change_nothing() -> None:
    for each in day(5):
        assert reweighed(each, WEIGHTS, {}).outcome in ("same", "no_choice")


def test_a_price_of_reuse_at_its_bound_hides_what_a_higher_one_would_do() -> None:
    low = TokenPilotPolicy(reuse_max=0.5)
    town = Town("b", small=2)
    town.site.adopt(replace(POLICY, tokenpilot=low))
    for n in range(10):
        town.place(asked(f"r{n}", prompt_tokens=30_000), steps=ROUTE)
    last = town.decide(asked("last"), steps=ROUTE).decision
    assert reweighed(last, low, {"reuse_max": 4.0}).outcome == "unknown"
    assert reweighed(last, low, {"reuse_max": 0.1}).outcome in ("same", "different")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nonsense": 1.0}, "is no weight of TokenPilot; there is: decode_price_s"),
        ({"p_hit_events": 0.5}, "changes terms that no decision records"),
        ({"reuse_base": -1.0}, "not a number from 0 on"),
        ({"reuse_base": float("nan")}, "not a number from 0 on"),
    ],
)
def test_a_weight_that_can_not_be_changed_is_told_with_the_list(changed: dict[str, float], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        reweighed(day(1, requests=1)[0], WEIGHTS, changed)


def test_what_can_be_reweighed_are_weights_of_the_policy() -> None:
    assert set(REWEIGHED) <= set(TokenPilotPolicy.__struct_fields__)
