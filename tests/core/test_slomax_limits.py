"""Output budgets bound what may come and are never what is reserved; no number of a caller or a policy overflows."""

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.decision import Admission
from tokenfleet.core.policy import Model
from tokenfleet.core.predict.output import PRIOR_Q90_RATIO

MOST = 2**31 - 1  # what the rim reads of any greater budget


def admission(town: Town, budget_tokens: int) -> Admission:
    decision = town.decide(asked("r1", prompt_tokens=100, max_tokens=budget_tokens)).decision
    assert decision.verdict == "admit", decision.sentence
    assert decision.admission is not None
    return decision.admission


def kv_tokens(town: Town, budget_tokens: int) -> int:
    placement = town.decide(asked("r1", prompt_tokens=100, max_tokens=budget_tokens)).placement
    assert placement is not None
    assert placement.entry is not None
    return placement.entry.kv_tokens


def prior_tokens(town: Town) -> float:
    return town.site.policy.models["small-chat"].output_tokens_prior


def test_without_a_budget_the_estimate_is_stated_and_its_cautious_one_reserved() -> None:
    town = Town("b", small=1)
    prior = prior_tokens(town)
    stated = admission(town, 0)
    assert (stated.output_q50_tokens, stated.output_q90_tokens) == (prior, PRIOR_Q90_RATIO * prior)
    assert kv_tokens(Town("b", small=1), 0) == 100 + PRIOR_Q90_RATIO * prior


@pytest.mark.parametrize("budget_tokens", [65_536, MOST])
def test_the_largest_budget_reserves_no_more_than_none(budget_tokens: int) -> None:
    assert admission(Town("b", small=1), budget_tokens) == admission(Town("b", small=1), 0)
    assert kv_tokens(Town("b", small=1), budget_tokens) == kv_tokens(Town("b", small=1), 0)


def test_a_short_prompt_with_a_large_budget_goes_where_the_budget_would_not_fit() -> None:
    town = Town("b", small=1)
    town.hears_telemetry(kv_total_blocks=100)  # 3,200 tokens
    assert admission(town, MOST).output_q50_tokens == prior_tokens(town)


def test_a_small_budget_bounds_both_estimates() -> None:
    stated = admission(Town("b", small=1), 7)
    assert (stated.output_q50_tokens, stated.output_q90_tokens) == (7.0, 7.0)
    assert kv_tokens(Town("b", small=1), 7) == 107


@pytest.mark.parametrize("limit", [2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64])
@pytest.mark.parametrize("budget_tokens", [0, 1, MOST])
def test_no_limit_of_a_policy_overflows(limit: int, budget_tokens: int) -> None:
    town = Town("b", small=1)
    model: Model = replace(town.site.policy.models["small-chat"], context_max_tokens=limit, seats_max=limit)
    tenant = replace(town.site.policy.tenants["acme"], requests_per_minute_max=limit, running_max=limit)
    town.site.policy = replace(
        town.site.policy,
        models={**town.site.policy.models, "small-chat": model},
        tenants={**town.site.policy.tenants, "acme": tenant},
    )
    assert admission(town, budget_tokens).output_q50_tokens <= prior_tokens(town)
