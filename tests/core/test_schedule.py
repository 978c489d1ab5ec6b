"""Schedule: the three questions in one call, on a real Site."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, DISPATCH, ROUTE, SCHEDULE, Steps
from tokenfleet.core.blocks import block_keys, chain_seed
from tokenfleet.core.errors import BadRequestError, UnknownModelError, UnknownSiteError, UnknownTenantError
from tokenfleet.core.records import Control
from tokenfleet.core.site import Heard


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


def test_a_request_that_can_not_be_asked_costs_its_tenant_nothing() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 1})
    for n in range(5):
        with pytest.raises(BadRequestError):
            b.decide(asked(f"bad{n}", declared_class="gold"))
    assert b.place(asked("r1")).verdict == "admit"


def test_callers_under_the_default_tenant_share_its_concurrent_requests() -> None:
    b = Town("b", small=1)
    terms = replace(b.site.policy.tenants["globex"], running_max=3)
    tenants = {**b.site.policy.tenants, "globex": terms}
    b.site.adopt(replace(b.site.policy, tenants=tenants, default_tenant="globex"))
    taken = [b.place(asked(f"r{n}", tenant=f"made-up-{n}")) for n in range(3)]
    refused = b.decide(asked("r3", tenant="made-up-3", cross_site=False)).decision
    assert [d.verdict for d in taken] == ["admit"] * 3
    assert refused.reason == "quota"
    b.hears_outcome(taken[0], "cancelled")
    assert b.decide(asked("r4", tenant="made-up-4")).decision.verdict == "admit"


def test_a_quota_spent_on_redirects_tells_when_to_come_again() -> None:
    a, b = Town("a", tenant_limits={"acme": 1}), Town("b", small=1)
    a.hears_summary_of(b)
    assert a.decide(asked("r1", origin="a")).decision.verdict == "redirect"
    refused = a.decide(asked("r2", origin="a")).decision
    assert refused.reason == "quota"
    assert refused.admission is not None
    assert refused.admission.retry_after_s is not None
    assert refused.admission.retry_after_s >= 0.8 * a.site.policy.slomax.retry_after_min_s


@pytest.mark.parametrize("steps", [ADMIT, ROUTE, SCHEDULE])
def test_no_call_places_what_the_site_may_not_process(steps: Steps) -> None:
    d = Town("d", small=1)
    decided = d.decide(asked("r1", tenant="eu-bank", origin="a", hop=1), steps=steps)
    assert (decided.decision.verdict, decided.decision.reason) == ("reject", "not_permitted")
    assert decided.placement is None
    assert d.decide(asked("r2", tenant="acme", origin="a", hop=1), steps=steps).decision.verdict == "admit"


def test_a_model_that_is_not_open_to_the_tenant_is_not_routed() -> None:
    b = Town("b", small=1)
    tenants = {**b.site.policy.tenants, "acme": replace(b.site.policy.tenants["acme"], models=("large-chat",))}
    b.site.adopt(replace(b.site.policy, tenants=tenants))
    assert b.decide(asked("r1"), steps=ROUTE).decision.reason == "filtered_by_policy"


def test_a_request_that_no_instance_has_room_for_is_offered_to_the_others_or_told_when_to_come_again() -> None:
    b, c = Town("b", small=2), Town("c", small=1)
    b.beats[0] = replace(b.beats[0], kv_used_blocks=8000.0)
    b.hears_telemetry()
    b.site.heard(Control(instance="b-small-1", weight=0.0), Heard(now_s=b.now_s))
    b.hears_summary_of(c)
    assert b.decide(asked("r1")).decision.site == "c"
    refused = b.decide(asked("r1", cross_site=False)).decision
    assert (refused.verdict, refused.reason) == ("reject", "all_busy")
    assert refused.admission is not None
    assert refused.admission.retry_after_s is not None


def test_a_refusal_by_all_sites_is_as_old_as_the_youngest_telemetry_that_was_looked_at() -> None:
    a, b = Town("a"), Town("b", small=1)
    b.beats[0] = replace(b.beats[0], state="draining")
    b.hears_telemetry()
    a.hears_summary_of(b)
    fresh = a.decide(asked("r1", origin="a")).decision
    assert (fresh.verdict, fresh.mode, fresh.age_s) == ("reject", "fresh", pytest.approx(0.1))
    a.now_s += 8.0
    stale = a.decide(asked("r2", origin="a")).decision
    assert (stale.verdict, stale.mode, stale.age_s) == ("reject", "stale", pytest.approx(8.1))


def test_a_send_that_came_back_refused_no_longer_counts_there() -> None:
    a, b = Town("a"), Town("b", small=1)
    a.hears_summary_of(b)
    a.now_s += 0.1

    def waiting() -> float:
        a.decisions += 1
        seen = a.decide(asked("probe", origin="a", dry_run=True)).decision
        return max(option.wait_s or 0.0 for option in seen.sites)

    idle_s = waiting()
    a.decide(asked("r1", origin="a", prompt_tokens=50_000))
    assert waiting() > idle_s
    a.decide(asked("r1", origin="a", prompt_tokens=50_000, attempt=1, sites_tried=("b",)))
    assert waiting() == idle_s


def test_a_retry_is_free_only_for_the_tenant_that_paid() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 1, "globex": 1})
    assert b.place(asked("r1")).verdict == "admit"
    assert b.place(asked("r1", tenant="globex")).verdict == "admit"
    assert b.decide(asked("r2", tenant="globex")).decision.reason == "quota"


def test_when_the_last_instance_goes_every_question_says_so() -> None:
    b, c = Town("b", small=1), Town("c")
    assert b.decide(asked("r1")).decision.verdict == "admit"
    b.beats.clear()
    b.hears_telemetry()
    for other in (Town("a"), c, Town("d")):
        b.hears_summary_of(other)
    for steps in (SCHEDULE, ADMIT, DISPATCH, ROUTE):
        decided = b.decide(asked("r2", dry_run=False), steps=steps)
        assert (decided.decision.verdict, decided.decision.reason) == ("reject", "no_instances"), steps


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257])
def test_a_prompt_around_one_block_is_decided_by_one_rule_with_its_keys(tokens: int) -> None:
    """No keys below one block; the cost terms and filters are those of any other prompt."""
    b = Town("b", small=3)
    seed = chain_seed(b"site secret", model="small-chat")
    keys = block_keys(np.arange(tokens, dtype=np.uint32), seed=seed, block_tokens=256)
    assert len(keys) == 8 * (tokens // 256)
    chosen: Counter[str] = Counter()
    for n in range(60):
        decision = b.decide(asked(f"r{n}", prompt_tokens=tokens, block_keys=keys, block_tokens=256)).decision
        assert decision.verdict == "admit"
        assert decision.predicted_ttft_s is not None
        assert 0.0 < decision.predicted_ttft_s < 1.0
        chosen[decision.target] += 1
    assert len(chosen) == (1 if keys else 3)  # a block has a home, what has none is spread


def test_with_fleetmind_off_a_full_site_refuses_and_sends_nobody_to_itself() -> None:
    b = Town("b", small=1)
    b.site.adopt(replace(b.site.policy, products=replace(b.site.policy.products, slomax=False, fleetmind=False)))
    assert b.place(asked("first", prompt_tokens=120_000)).verdict == "admit"
    assert b.place(asked("second", prompt_tokens=120_000)).verdict == "admit"
    full = b.decide(asked("r", prompt_tokens=120_000)).decision
    assert (full.verdict, full.reason) == ("reject", "all_busy")
