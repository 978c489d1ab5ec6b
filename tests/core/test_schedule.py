"""Schedule: the three questions in one call, on a real Site."""

from typing import Any

import pytest

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, DISPATCH, ROUTE
from tokenfleet.core.errors import BadRequestError, UnknownModelError, UnknownSiteError, UnknownTenantError


def test_a_request_is_admitted_placed_and_explained() -> None:
    b = Town("b", small=2)
    decided = b.decide(asked("r1"))
    decision = decided.decision
    assert (decision.verdict, decision.mode, decision.site) == ("admit", "fresh", "b")
    assert decision.target in ("b-small-0", "b-small-1")
    assert decision.runner_up in decision.sentence
    assert decided.placement is not None
    assert decided.placement.entry is not None
    assert decided.placement.entry.placed is not None


def test_an_ingress_site_redirects_and_the_other_site_picks() -> None:
    a, b = Town("a"), Town("b", small=1)
    a.hears_summary_of(b)
    sent = a.decide(asked("r1", origin="a")).decision
    assert (sent.verdict, sent.site, sent.gateways) == ("redirect", "b", ("gate-b",))
    taken = b.decide(asked("r1", origin="a", hop=1)).decision
    assert (taken.verdict, taken.target) == ("admit", "b-small-0")
    assert taken.predicted_ttft_s is not None
    assert taken.predicted_ttft_s >= 0.005  # the way from a


def test_an_empty_pool_is_no_instances_not_busy() -> None:
    assert Town("b").decide(asked("r1"), steps=ADMIT).decision.reason == "no_instances"
    assert Town("b").decide(asked("r1"), steps=ROUTE).decision.reason == "no_instances"


def test_a_site_without_room_offers_the_request_to_the_others_once() -> None:
    b, c = Town("b", small=1), Town("c", small=1)
    b.hears_summary_of(c)
    bound = b.site.policy.classes["batch"].running_max_per_instance
    for n in range(bound):
        assert b.place(asked(f"r{n}", task="batch", cross_site=False)).verdict == "admit"
    full = b.decide(asked("one-more", task="batch")).decision
    assert (full.verdict, full.site) == ("redirect", "c")
    stays = b.decide(asked("stays", task="batch", cross_site=False)).decision
    assert stays.verdict in ("reject", "defer")
    assert stays.reason == "all_busy"


def test_a_refusal_is_reported_as_an_outcome_unless_it_is_a_dry_run() -> None:
    b = Town("b")
    outcome = b.decide(asked("r1")).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.request, outcome.stop) == ("rejected", "r1", "no_site")
    assert b.decide(asked("r2", dry_run=True)).outcome is None


@pytest.mark.parametrize(
    ("facts", "error", "named"),
    [
        ({"model": "gpt-9"}, UnknownModelError, "large-chat, small-chat"),
        ({"tenant": "nobody"}, UnknownTenantError, "acme, archive"),
        ({"origin": "mars", "hop": 1}, UnknownSiteError, "a, b, c, d"),
        ({"declared_class": "gold"}, BadRequestError, "batch, chat, long"),
        ({"origin": "c"}, BadRequestError, "without a redirect"),
    ],
)
def test_an_unknown_name_is_an_error_that_lists_what_exists(
    facts: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error, match=named):
        Town("b", small=1).decide(asked("r1", **facts))


def test_a_budget_beyond_the_context_refuses_nobody() -> None:
    decision = Town("b", small=1).decide(asked("r1", prompt_tokens=100, max_tokens=2**31 - 1)).decision
    assert decision.verdict == "admit"


def test_a_prompt_beyond_the_context_is_context_too_long() -> None:
    decision = Town("b", small=1).decide(asked("r1", prompt_tokens=200_000), steps=ADMIT).decision
    assert (decision.verdict, decision.reason) == ("reject", "context_too_long")


@pytest.mark.parametrize("prompt_tokens", [0, 1, 255, 256, 257])
def test_prompts_around_one_block_are_all_decided(prompt_tokens: int) -> None:
    assert Town("b", small=2).decide(asked("r1", prompt_tokens=prompt_tokens)).decision.verdict == "admit"


def test_equal_tables_and_requests_give_equal_decisions() -> None:
    one, other = Town("b", small=3), Town("b", small=3)
    assert one.decide(asked("r1")).decision == other.decide(asked("r1")).decision


def test_a_tenant_at_its_quota_is_refused_and_its_retries_are_free() -> None:
    b = Town("b", small=2, tenant_limits={"acme": 2})
    first = b.place(asked("r1"))
    retry = b.place(asked("r1", attempt=1))
    second = b.place(asked("r2"))
    third = b.decide(asked("r3")).decision
    assert [first.verdict, retry.verdict, second.verdict] == ["admit"] * 3
    assert (third.verdict, third.reason) == ("reject", "quota")


def test_a_resident_tenant_never_leaves_whatever_happens_at_home() -> None:
    b, d = Town("b"), Town("d", large=2)
    b.hears_summary_of(d)
    refused = b.decide(asked("r1", tenant="eu-bank", model="large-chat"), steps=DISPATCH).decision
    assert refused.verdict == "reject"
    assert any(option.site == "d" and "residency" in option.refused for option in refused.sites)
    assert b.decide(asked("r2", tenant="globex", model="large-chat"), steps=DISPATCH).decision.site == "d"
