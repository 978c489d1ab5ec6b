"""Residency: no choice ever leaves what the rules permit, whatever load, age, switches and revisions do."""

from random import Random

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, request
from tests.core.sites import peer, pool_summary, send_to_site, with_residency
from tokenfleet.core.decision import Request
from tokenfleet.core.fleetmind.dispatch import dispatch
from tokenfleet.core.fleetmind.residency import residency_refusal
from tokenfleet.core.fleetmind.sends import Send, Sends
from tokenfleet.core.policy import Policy, Products, Residency, SitePolicy, Tenant
from tokenfleet.core.view import PeerView

EU = request(tenant="eu-bank")


def refusal(asked: Request, site: str, policy: Policy = POLICY, *, now_wall_s: float = 0.0) -> str:
    return residency_refusal(asked, site, policy, now_wall_s=now_wall_s)


def test_only_listed_jurisdictions_are_permitted() -> None:
    assert [bool(refusal(EU, site)) for site in "abcd"] == [False, False, False, True]
    assert not any(refusal(request(tenant="acme"), site) for site in "abcd")


@pytest.mark.parametrize("use", ["processing", "cache", "logs"])
def test_each_of_the_three_lists_must_permit(use: str) -> None:
    policy = with_residency(**{use: ("us",)})
    assert use in refusal(EU, "b", policy)


def test_the_origin_must_be_permitted_too() -> None:
    assert "(d)" in refusal(request(tenant="eu-bank", origin="d"), "b")
    assert "unknown" in refusal(request(tenant="eu-bank", origin="nowhere"), "b")


def test_what_can_t_be_told_is_not_allowed() -> None:
    blank = replace(POLICY, sites={**POLICY.sites, "b": replace(POLICY.sites["b"], jurisdiction="")})
    assert refusal(EU, "b", blank)
    assert refusal(EU, "nowhere")
    assert refusal(request(tenant="acme"), "nowhere")
    assert "missing" in refusal(EU, "b", replace(POLICY, residency={}))
    listed_blank = replace(
        with_residency(processing=("",), cache=("",), logs=("",)),
        sites={**POLICY.sites, "b": replace(POLICY.sites["b"], jurisdiction="")},
    )
    assert refusal(EU, "b", listed_blank)


def test_an_expired_rule_permits_nothing() -> None:
    policy = with_residency(expires_wall_s=1000.0)
    assert not refusal(EU, "b", policy, now_wall_s=999.9)
    assert "expired" in refusal(EU, "b", policy, now_wall_s=1000.0)
    assert "expired" in refusal(EU, "b", policy, now_wall_s=float("nan"))


def test_a_rule_for_data_classes_binds_those_and_requests_that_name_none() -> None:
    policy = with_residency(data_classes=("personal",))
    assert refusal(replace(EU, data_class="personal"), "d", policy)
    assert refusal(EU, "d", policy)
    assert not refusal(replace(EU, data_class="public"), "d", policy)


@pytest.mark.parametrize(
    "eu_sites",
    [
        [peer("b", pool_summary("b", kv_used=0.99)), peer("c", pool_summary("c", kv_used=0.99))],
        [peer("b", pool_summary("b", ready=0)), peer("c", pool_summary("c", ready=0))],
        [peer("b"), peer("c")],
        [peer("b"), peer("c", pool_summary("c"), age_s=60.0)],
        [peer("b"), peer("c", age_s=None)],
        [peer("b"), peer("c", pool_summary("c"), link_up=False)],
    ],
    ids=["saturated", "empty", "no-endpoints", "stale", "never-heard", "cut-off"],
)
def test_a_tenant_bound_to_the_eu_is_refused_rather_than_sent_to_the_us(eu_sites: list[PeerView]) -> None:
    idle_us = peer("d", pool_summary("d", ready=50))
    refused = send_to_site([*eu_sites, idle_us], EU)
    assert refused.site == ""
    assert refused.reason not in ("", "not_permitted")
    assert send_to_site([*eu_sites, idle_us], request(tenant="acme")).site == "d"


def test_rights_hold_when_the_product_is_off() -> None:
    off = replace(with_residency(processing=("us",)), products=Products(fleetmind=False))
    refused = send_to_site([peer("b", pool_summary("b"))], EU, policy=off)
    assert (refused.site, refused.reason) == ("", "not_permitted")
    assert send_to_site([peer("b", pool_summary("b"))], policy=off).site == "b"


CASES = 100_000
PLACES = ("eu", "us", "ch", "")
SITES = ("a", "b", "c", "d")


def permitted(asked: Request, site: str, policy: Policy, now_wall_s: float) -> bool:
    """The law once more, told differently: every attribute present, every list containing."""
    name = policy.tenants[asked.tenant].residency
    if name == "":
        return True
    rule = policy.residency.get(name)
    if rule is None:
        return False
    if rule.data_classes and asked.data_class and asked.data_class not in rule.data_classes:
        return True
    here, origin = policy.sites[site].jurisdiction, policy.sites[asked.origin].jurisdiction
    in_time = rule.expires_wall_s is None or now_wall_s < rule.expires_wall_s
    listed = here in (set(rule.processing) & set(rule.cache) & set(rule.logs))
    return in_time and here != "" and origin != "" and listed and origin in (set(rule.processing) & set(rule.logs))


def any_policy(rng: Random) -> Policy:
    def places() -> tuple[str, ...]:
        return tuple(place for place in PLACES if rng.random() < 0.6)

    rules = {
        name: Residency(
            processing=places(),
            cache=places(),
            logs=places(),
            data_classes=rng.choice(((), ("personal",))),
            expires_wall_s=rng.choice((None, None, 500.0)),
        )
        for name in ("r-1", "r-2")
        if rng.random() < 0.9
    }
    sites = {
        name: SitePolicy(jurisdiction=rng.choice(PLACES), rtt_s={"b": rng.choice((0.005, 0.06))}) for name in SITES
    }
    tenants = {f"t-{i}": Tenant(residency=rule) for i, rule in enumerate(("", "r-1", "r-2", "r-1"))}
    products = Products(fleetmind=rng.random() < 0.9)
    return replace(POLICY, sites=sites, residency=rules, tenants=tenants, products=products)


def any_sites(rng: Random) -> list[PeerView]:
    def one(site: str) -> PeerView:
        if rng.random() < 0.15:
            return peer(site, age_s=rng.choice((None, 0.2)))
        pool = pool_summary(site, ready=rng.choice((0, 1, 2, 40)), kv_used=rng.choice((0.0, 0.5, 0.99)))
        waits_s = tuple(sorted(rng.choice((0.0, 0.5, 30.0)) for _ in pool.waits_s))
        hit = rng.choice((0, 0, 4000))
        age_s = rng.choice((0.2, 0.2, 5.0, 60.0))
        return peer(site, replace(pool, waits_s=waits_s), age_s=age_s, hit_tokens=hit, link_up=rng.random() < 0.9)

    return [one(site) for site in SITES]


def test_no_choice_breaks_a_rule_in_100_000_cases_with_rules_changing_midway() -> None:
    rng = Random(20261129)
    policies, worlds = [any_policy(rng) for _ in range(300)], [any_sites(rng) for _ in range(300)]
    policy, world, sends = policies[0], worlds[0], Sends(kept_s=15.0)
    chosen = forbidden_better = 0
    for case in range(CASES):
        if case % 7 == 0:
            policy = rng.choice(policies)  # a new revision while requests and sends are under way
        if case % 5 == 0:
            world = rng.choice(worlds)
        now_wall_s = rng.choice((100.0, 499.9, 500.0, 900.0))
        asked = request(
            4096,
            first_key=case % 50,
            id=f"r-{case}",
            tenant=f"t-{case % 4}",
            origin=rng.choice(SITES),
            data_class=rng.choice(("", "personal", "public")),
            hop=int(case % 11 == 0),
            sites_tried=rng.choice(((), (), ("c",), ("b", "d"))),
        )
        found = dispatch(
            asked,
            rng.choice(("chat", "batch")),
            world,
            policy,
            sends,
            home="b" if asked.hop else asked.origin,
            output_q50=256.0,
            output_q90=640.0,
            now_s=case * 0.01,
            now_wall_s=now_wall_s,
            rng=rng,
        )
        if found.site:
            chosen += 1
            assert permitted(asked, found.site, policy, now_wall_s), (case, asked, found)
            assert found.site not in asked.sites_tried or not policy.products.fleetmind
        elif any(o.refused.startswith("residency") for o in found.options):
            forbidden_better += 1
        if found.send is not None and case % 3 == 0:
            sends.sent(found.send)
    assert chosen > CASES // 4
    assert forbidden_better > CASES // 20


def test_peers_sends_don_t_change_rights() -> None:
    sends = Sends(kept_s=15.0)
    for i in range(1000):
        sends.sent(Send(request=f"x-{i}", site="b", model="large-chat", at_s=999.9, work_s=1.0, kv_tokens=10**6))
    refused = send_to_site([peer("b", pool_summary("b")), peer("d", pool_summary("d"))], EU, sends=sends)
    assert (refused.site, refused.reason) == ("", "all_busy")
