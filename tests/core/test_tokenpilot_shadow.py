"""Shadows: where other weights would send a request, told beside the decision and without effect on it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.pools import POLICY, instance, pool, request, route
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy, TokenPilotPolicy, parse_policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.tokenpilot.shadow import Watched, falls_to_shadows, watched

GREEDY = TokenPilotPolicy(reuse_base=0.0, reuse_slope_per_s=0.0, margin_weight=0.0)
LOYAL = TokenPilotPolicy(reuse_base=20.0, reuse_max=20.0)


def with_shadows(policy: Policy, share: float = 1.0, **shadows: TokenPilotPolicy) -> Policy:
    return replace(policy, shadows=shadows, shadow_share=share)


def told_beside(view: PoolView, question: Request, policy: Policy) -> tuple[Routing, Watched]:
    routing = route(view, question, policy=policy)
    return routing, watched(
        question,
        view,
        policy,
        routing,
        lambda other: route(view, question, policy=other),
        request_class="chat",
        output_q50=256.0,
        output_q90=640.0,
        network_s=0.0,
        last_instance="",
        ahead_s=None,
        held_s=0.0,
    )


def test_a_shadow_is_told_with_what_its_choice_would_have_cost() -> None:
    """The warm instance waits 0.35 s: greedy weights leave it for an idle one, loyal ones stay."""
    view = pool(instance("warm", backlog_s=0.35, queued=1, hit_tokens=7168, p_hit=0.97), instance("cold"))
    policy = with_shadows(POLICY, greedy=GREEDY, loyal=LOYAL)
    question = request(8192, first_key=7)
    routing, told = told_beside(view, question, policy)
    by_name = {each.shadow: each for each in told.shadows}
    costs = {each.instance: each for each in routing.candidates}
    assert (by_name["loyal"].instance, by_name["greedy"].instance) == ("warm", "cold")
    for shadow, weights in (("greedy", GREEDY), ("loyal", LOYAL)):
        choice = by_name[shadow]
        assert choice.instance == route(view, question, policy=replace(POLICY, tokenpilot=weights)).target
        assert choice.cost_s == pytest.approx(costs[choice.instance].cost_s)
        assert choice.ttft_s == pytest.approx(costs[choice.instance].ttft_s)
        assert choice.regret_s == pytest.approx(choice.ttft_s - costs[routing.target].ttft_s)
        assert choice.hit_tokens == costs[choice.instance].hit_tokens
    assert told.regret is not None
    assert told.regret.available_tokens == 7168
    assert told.regret.captured_tokens == costs[routing.target].hit_tokens
    least_s = min(each.ttft_s for each in routing.candidates)
    assert told.regret.ttft_s == pytest.approx(costs[routing.target].ttft_s - least_s)


def test_reuse_on_an_instance_that_may_not_serve_is_not_available() -> None:
    full = instance("full", hit_tokens=7168, p_hit=0.97, availability="draining")
    view = pool(full, instance("cold"), instance("other", hit_tokens=512, p_hit=0.97))
    _, told = told_beside(view, request(8192), with_shadows(POLICY, same=POLICY.tokenpilot))
    assert told.regret is not None
    assert told.regret.available_tokens == 512


def test_a_shadow_with_the_same_weights_makes_the_same_draw_and_regrets_nothing() -> None:
    b = Town("b", small=8)
    b.site.adopt(replace(with_shadows(b.site.policy, same=b.site.policy.tokenpilot), revision=2))
    targets: set[str] = set()
    for n in range(40):
        decision = b.decide(asked(f"r{n}")).decision
        [shadow] = decision.shadows
        assert (shadow.instance, shadow.regret_s) == (decision.target, 0.0)
        targets.add(decision.target)
    assert len(targets) > 3


def test_shadows_change_nothing_of_the_decision_and_place_nothing() -> None:
    one, other = Town("b", small=3), Town("b", small=3)
    one.site.adopt(replace(with_shadows(one.site.policy, greedy=GREEDY, loyal=LOYAL), revision=2))
    other.site.adopt(replace(other.site.policy, revision=2))
    told, plain = one.decide(asked("r1")), other.decide(asked("r1"))
    assert [each.shadow for each in told.decision.shadows] == ["greedy", "loyal"]
    assert replace(told.decision, shadows=(), regret=None) == plain.decision
    assert told.placement == plain.placement


def test_none_is_asked_where_none_is_named_where_the_request_is_not_sampled_and_where_nothing_was_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_of: list[TokenPilotPolicy] = []

    def counting(*args: object, **options: object) -> object:
        asked_of.append(args[2].tokenpilot)  # type: ignore[attr-defined]  # the policy
        return choose(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("tokenfleet.core.answers.choose", counting)
    for policy, instances, times in (
        (Town("b").site.policy, 2, 1),
        (with_shadows(Town("b").site.policy, 0.0, greedy=GREEDY), 2, 1),
        (with_shadows(Town("b").site.policy, greedy=GREEDY), 2, 2),
    ):
        b = Town("b", small=instances)
        b.site.adopt(replace(policy, revision=2))
        decision = b.decide(asked("r1")).decision
        assert (len(asked_of), len(decision.shadows)) == (times, times - 1)
        asked_of.clear()
    empty = Town("b")
    empty.site.adopt(replace(with_shadows(empty.site.policy, greedy=GREEDY), revision=2))
    assert empty.decide(asked("r1", cross_site=False)).decision.regret is None


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.text())
def test_a_greater_share_samples_all_that_a_smaller_does(one: float, other: float, name: str) -> None:
    least, most = sorted((one, other))
    assert falls_to_shadows(name, most) or not falls_to_shadows(name, least)
    assert falls_to_shadows(name, 1.0)
    assert not falls_to_shadows(name, 0.0)


def test_about_the_share_is_sampled() -> None:
    assert 400 <= sum(falls_to_shadows(f"r{n}", 0.05) for n in range(10_000)) <= 600


def test_shadows_are_read_from_the_policy_and_bounded() -> None:
    text = policy_text() + "\n[shadows.greedy]\nreuse_base = 0.0\n"
    policy = parse_policy(text, source="a test")
    assert policy.shadows == {"greedy": TokenPilotPolicy(reuse_base=0.0)}
    with pytest.raises(PolicyError, match="at most 8"):
        parse_policy(policy_text() + "".join(f"\n[shadows.s{n}]" for n in range(9)), source="a test")
    with pytest.raises(PolicyError, match="reuse_bass"):
        parse_policy(text.replace("reuse_base = 0.0", "reuse_bass = 0.0"), source="a test")
