"""Retry budgets and team quotas in decisions: who pays for what, and what a refusal takes."""

from typing import Any

from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, ROUTE
from tokenfleet.core.policy import Tenant
from tokenfleet.core.schedule import let_go


def spent(town: Town, tenant: str = "acme") -> Town:
    """The tenant has no retry left."""
    while town.site.retries.retry(tenant):
        pass
    return town


def test_a_retry_without_budget_is_refused_with_a_time_and_ten_fresh_requests_earn_one() -> None:
    b = spent(Town("b", small=1))
    refused = b.decide(asked("r", attempt=1))
    assert (refused.decision.verdict, refused.decision.reason) == ("reject", "retry_budget")
    assert refused.decision.admission is not None
    assert refused.decision.admission.retry_after_s is not None
    terms = b.site.policy.slomax
    least_s = terms.retry_after_max_s * (1.0 - terms.retry_after_spread)
    assert refused.decision.admission.retry_after_s >= least_s
    assert refused.outcome is not None
    for n in range(10):
        assert b.decide(asked("r", attempt=1)).decision.reason == "retry_budget", n
        b.decide(asked(f"fresh-{n}"))
    assert b.decide(asked("r", attempt=1)).decision.verdict == "admit"
    assert b.decide(asked("r", attempt=2)).decision.reason == "retry_budget"


def test_an_attempt_that_a_site_only_sent_back_is_no_retry() -> None:
    b = spent(Town("b", small=1))
    assert b.decide(asked("r", attempt=1, sites_tried=("c",))).decision.verdict == "admit"
    assert b.decide(asked("r", attempt=2, sites_tried=("c", "d"))).decision.verdict == "admit"
    assert b.decide(asked("r", attempt=2, sites_tried=("c",))).decision.reason == "retry_budget"
    assert b.site.retries.left("acme") == 0.0  # and nothing fresh


def test_an_attempt_counts_once_where_it_arrived() -> None:
    b = spent(Town("b", small=1))
    assert b.decide(asked("r", attempt=1, origin="a", hop=1)).decision.verdict == "admit"
    assert b.decide(asked("r", attempt=1), steps=ROUTE).decision.verdict == "admit"
    b.decide(asked("fresh", origin="a", hop=1))
    assert b.site.retries.left("acme") == 0.0


def test_a_dry_run_neither_earns_nor_spends_and_tells_what_would_be() -> None:
    b = Town("b", small=1)
    assert b.decide(asked("r", attempt=1, dry_run=True)).decision.verdict == "admit"
    assert b.site.retries.left("acme") == 100.0
    spent(b)
    b.decide(asked("r", dry_run=True))
    assert b.site.retries.left("acme") == 0.0
    assert b.decide(asked("r", attempt=1, dry_run=True)).decision.reason == "retry_budget"


def test_a_held_retry_pays_when_it_comes_and_not_again_in_its_turn() -> None:
    b = Town("b", small=1)
    b.place(asked("long", prompt_tokens=30_000))
    assert b.decide(asked("r", attempt=1, wait_max_s=60.0)).decision.verdict == "queue"
    assert b.site.retries.left("acme") == 99.0
    spent(b)
    final = let_go(b.site, ("r", 1), b.ids(), now_s=b.now_s)
    assert final is not None
    assert not isinstance(final, Exception)
    assert final.decision.verdict == "admit"


def test_a_refused_retry_costs_no_quota_and_a_refused_right_no_retry() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 5})
    open_to = replace(b.site.policy.tenants["globex"], models=("large-chat",))
    b.site.adopt(replace(b.site.policy, tenants={**b.site.policy.tenants, "globex": open_to}))
    assert b.decide(asked("r", attempt=1, tenant="globex")).decision.reason == "filtered_by_policy"
    assert b.site.retries.left("globex") == 100.0
    spent(b)
    for _ in range(3):
        assert b.decide(asked("r", attempt=1)).decision.reason == "retry_budget"
    assert b.site.quotas.used("acme", now_s=b.now_s) == 0


def test_strangers_under_the_default_tenant_share_its_budget_and_a_new_policy_is_followed() -> None:
    b = Town("b", small=1)
    b.site.adopt(replace(b.site.policy, default_tenant="globex"))
    spent(b, "globex")
    assert b.decide(asked("r", attempt=1, tenant="stranger")).decision.reason == "retry_budget"
    terms = replace(b.site.policy.slomax.retry, budget_per_request=1.0)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, retry=terms)))
    b.decide(asked("fresh", tenant="stranger"))
    assert b.decide(asked("r", attempt=1, tenant="stranger")).decision.verdict == "admit"


def test_with_slomax_off_nobody_counts_retries() -> None:
    b = spent(Town("b", small=1))
    b.site.adopt(replace(b.site.policy, products=replace(b.site.policy.products, slomax=False)))
    assert b.decide(asked("r", attempt=1)).decision.verdict == "admit"


def teamed(**limits: Any) -> Town:
    """acme and globex are one team with these limits."""
    b = Town("b", small=2)
    tenants = {name: replace(b.site.policy.tenants[name], team="both") for name in ("acme", "globex")}
    b.site.adopt(replace(b.site.policy, tenants={**b.site.policy.tenants, **tenants, "both": Tenant(**limits)}))
    return b


def test_a_team_s_requests_a_minute_bind_its_members_together_and_refusals_refund_both() -> None:
    b = teamed(requests_per_minute_max=2)
    assert b.decide(asked("big", prompt_tokens=200_000), steps=ADMIT).decision.reason == "context_too_long"
    assert b.site.quotas.used("both", now_s=b.now_s) == 0
    assert b.place(asked("r1")).verdict == "admit"
    assert b.place(asked("r2", tenant="globex")).verdict == "admit"
    for tenant in ("acme", "globex"):
        refused = b.decide(asked(f"r3-{tenant}", tenant=tenant, cross_site=False)).decision
        assert refused.reason == "quota"
        assert "team both" in refused.detail
    assert b.decide(asked("r4", tenant="eu-bank")).decision.verdict == "admit"


def test_a_team_s_concurrent_requests_are_those_of_all_its_members() -> None:
    b = teamed(running_max=2)
    first = b.place(asked("r1"))
    b.place(asked("r2", tenant="globex"))
    assert b.decide(asked("r3", cross_site=False)).decision.reason == "quota"
    assert b.decide(asked("r3", tenant="eu-bank")).decision.verdict == "admit"
    b.hears_outcome(first, "finished")
    assert b.decide(asked("r3")).decision.verdict == "admit"
