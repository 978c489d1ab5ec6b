"""Quotas: N a minute admits N, and what is refused is given back."""

from random import Random

from tokenfleet.core.policy import Tenant
from tokenfleet.core.slomax.quota import Quotas, tenant_entry

TWO = Tenant(requests_per_minute_max=2)


def test_two_a_minute_admits_two_whichever_path_asks() -> None:
    quotas = Quotas()
    charges = [quotas.charge("team", TWO, running=0, now_s=10.0) for _ in range(3)]
    assert [bool(charge.refused) for charge in charges] == [False, False, True]


def test_room_comes_back_when_it_is_told() -> None:
    quotas = Quotas()
    quotas.charge("team", TWO, running=0, now_s=10.5)
    quotas.charge("team", TWO, running=0, now_s=30.0)
    refused = quotas.charge("team", TWO, running=0, now_s=40.0)
    assert refused.retry_after_s is not None
    assert 60.0 <= 40.0 + refused.retry_after_s - 10.5 <= 61.0
    assert quotas.charge("team", TWO, running=0, now_s=40.0 + refused.retry_after_s - 0.01).refused
    assert not quotas.charge("team", TWO, running=0, now_s=40.0 + refused.retry_after_s).refused


def test_refused_work_is_given_back_once() -> None:
    quotas = Quotas()
    kept = quotas.charge("team", TWO, running=0, now_s=10.0)
    given_back = quotas.charge("team", TWO, running=0, now_s=11.0)
    quotas.refund(given_back)
    assert quotas.used("team", now_s=12.0) == 1
    quotas.refund(given_back)  # again: its own count is gone
    assert quotas.used("team", now_s=12.0) == 1
    quotas.refund(quotas.charge("team", TWO, running=0, now_s=80.0))
    quotas.refund(kept)  # its minute is over
    assert quotas.used("team", now_s=80.0) == 0


def test_concurrent_requests_are_bounded_by_the_ledger_s_count() -> None:
    terms = Tenant(running_max=3)
    quotas = Quotas()
    assert not quotas.charge("team", terms, running=2, now_s=0.0).refused
    refused = quotas.charge("team", terms, running=3, now_s=0.0)
    assert refused.refused
    assert refused.retry_after_s is None


def test_a_team_s_concurrent_requests_are_bounded_too() -> None:
    quotas, team = Quotas(), ("team", Tenant(running_max=3))
    assert not quotas.charge("a", Tenant(), running=0, now_s=0.0, team=team, team_running=2).refused
    refused = quotas.charge("a", Tenant(), running=0, now_s=0.0, team=team, team_running=3)
    assert (refused.refused, refused.bucket) == ("3 requests of the team team running, 3 allowed at once", None)


def test_never_more_than_the_limit_in_any_minute_and_memory_is_bounded() -> None:
    rng, quotas, now_s = Random(3), Quotas(), 0.0
    terms, admitted = Tenant(requests_per_minute_max=50), list[float]()
    for _ in range(20_000):
        now_s += rng.expovariate(5.0)
        if not (charge := quotas.charge("team", terms, running=0, now_s=now_s)).refused:
            if rng.random() < 0.2:
                quotas.refund(charge)
            else:
                admitted.append(now_s)
    for first, beyond in zip(admitted, admitted[50:], strict=False):
        assert beyond - first > 60.0
    assert len(admitted) > 0.97 * 50 * now_s / 61.0  # and the limit is used
    assert len(quotas._counts["team"]) <= 61


def test_unknown_names_share_the_default_tenant_s_quota() -> None:
    quotas, tenants = Quotas(), {"default": TWO}
    names = [tenant_entry(f"stranger-{i}", tenants=tenants, default_tenant="default") for i in range(10_000)]
    admitted = [name for name in names if not quotas.charge(name, TWO, running=0, now_s=1.0).refused]
    assert len(admitted) == 2
    assert len(quotas._counts) == 1


def test_tenants_that_left_the_policy_are_forgotten() -> None:
    quotas = Quotas()
    quotas.charge("team", TWO, running=0, now_s=1.0)
    quotas.retain(frozenset({"other"}))
    assert quotas.used("team", now_s=1.0) == 0


def test_no_limit_counts_nothing() -> None:
    quotas = Quotas()
    assert not any(quotas.charge("team", Tenant(), running=10**6, now_s=0.0).refused for _ in range(100))
    assert quotas.used("team", now_s=0.0) == 0


def test_a_limit_that_two_levels_lead_to_counts_once() -> None:
    quotas = Quotas()
    charges = [quotas.charge("team", TWO, running=0, now_s=10.0, team=("team", TWO)) for _ in range(3)]
    assert [bool(charge.refused) for charge in charges] == [False, False, True]
    quotas.refund(charges[0])
    assert quotas.used("team", now_s=10.0) == 1


def test_a_team_s_limit_binds_its_members_together_and_each_has_its_own() -> None:
    quotas, three = Quotas(), Tenant(requests_per_minute_max=3)

    def charged(tenant: str, terms: Tenant = TWO) -> str:
        return quotas.charge(tenant, terms, running=0, now_s=10.0, team=("team", three)).refused

    assert [charged(name) for name in ("a", "a", "b")] == ["", "", ""]
    assert charged("b") == "3 requests a minute allowed to the team team, all used"
    assert charged("a") == "2 requests a minute allowed, all used"
    assert (quotas.used("a", now_s=10.0), quotas.used("b", now_s=10.0), quotas.used("team", now_s=10.0)) == (2, 1, 3)
    assert charged("c", Tenant()) != ""  # no limit of its own


def test_what_one_level_refuses_the_other_is_not_charged_for_and_both_are_refunded() -> None:
    quotas, one = Quotas(), Tenant(requests_per_minute_max=1)
    kept = quotas.charge("a", one, running=0, now_s=10.0, team=("team", TWO))
    for _ in range(5):
        assert quotas.charge("a", one, running=0, now_s=10.0, team=("team", TWO)).refused
    assert quotas.used("team", now_s=10.0) == 1
    quotas.refund(kept)
    assert quotas.used("a", now_s=10.0) == quotas.used("team", now_s=10.0) == 0


def test_the_longest_wait_of_the_levels_is_told() -> None:
    quotas, one = Quotas(), Tenant(requests_per_minute_max=1)
    quotas.charge("team", one, running=0, now_s=10.0)
    quotas.charge("a", one, running=0, now_s=40.0)
    refused = quotas.charge("a", one, running=0, now_s=50.0, team=("team", one))
    assert refused.retry_after_s is not None
    assert not quotas.charge("a", one, running=0, now_s=50.0 + refused.retry_after_s, team=("team", one)).refused


def test_a_limit_of_two_to_the_sixty_third_is_a_limit_like_any_other() -> None:
    quotas, terms = Quotas(), Tenant(requests_per_minute_max=2**63, running_max=2**63)
    assert not quotas.charge("a", terms, running=10**6, now_s=10.0).refused
    assert quotas.charge("a", terms, running=2**63, now_s=10.0).refused
