"""Retries: when, how many, and never twice under one key."""

from itertools import pairwise
from math import inf, nan
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.pools import POLICY
from tokenfleet.core.slomax.idempotency import Asked, Keys
from tokenfleet.core.slomax.retry import RetryBudgets, retry_after_s, room_in_s
from tokenfleet.core.slomax.terms import RetryPolicy

TERMS = RetryPolicy()


def test_room_comes_when_the_backlog_and_the_request_have_drained_into_what_is_free() -> None:
    assert room_in_s(ahead_s=100.0, work_s=4.0, free_s=24.0, drain_rate=8.0) == 10.0
    assert room_in_s(ahead_s=1.0, work_s=4.0, free_s=24.0, drain_rate=8.0) == 0.0


@pytest.mark.parametrize(("ahead_s", "drain_rate"), [(1.0, 0.0), (1.0, -1.0), (1.0, nan), (nan, 1.0), (inf, 1.0)])
def test_what_never_drains_is_told_the_longest_wait(ahead_s: float, drain_rate: float) -> None:
    wait_s = room_in_s(ahead_s=ahead_s, work_s=1.0, free_s=0.0, drain_rate=drain_rate)
    assert 24.0 <= retry_after_s(wait_s, POLICY, Random(1)) <= 36.0


@given(st.floats(allow_nan=False), st.integers(0, 10**6))
def test_no_wait_is_told_outside_of_the_limits_and_their_spread(wait_s: float, seed: int) -> None:
    told_s = retry_after_s(wait_s, POLICY, Random(seed))
    assert 0.8 <= told_s <= 36.0
    assert 0.8 * min(max(wait_s, 1.0), 30.0) <= told_s <= 1.2 * min(max(wait_s, 1.0), 30.0)


def test_those_refused_together_do_not_come_back_together() -> None:
    rng = Random(2)
    told_s = sorted(retry_after_s(10.0, POLICY, rng) for _ in range(1000))
    assert told_s[0] < 8.1
    assert told_s[-1] > 11.9
    assert max(later - earlier for earlier, later in pairwise(told_s)) < 0.1


def test_ten_fresh_requests_earn_one_retry_and_no_more() -> None:
    budgets = RetryBudgets(TERMS)
    while budgets.retry("acme"):
        pass
    for _ in range(9):
        budgets.fresh("acme")
    assert not budgets.retry("acme")
    budgets.fresh("acme")
    assert budgets.retry("acme")
    assert not budgets.retry("acme")


def test_a_budget_holds_a_hundred_and_is_a_tenant_s_own() -> None:
    budgets = RetryBudgets(TERMS)
    for _ in range(5_000):
        budgets.fresh("acme")
    assert sum(budgets.retry("acme") for _ in range(1_000)) == 100
    assert budgets.left("globex") == 100.0


def test_retries_of_an_outage_are_a_tenth_of_the_fresh_requests() -> None:
    """All fail and each comes again at once."""
    budgets, retries = RetryBudgets(TERMS), 0
    for _ in range(10_000):
        budgets.fresh("acme")
        retries += budgets.retry("acme") + budgets.retry("acme")
    assert retries == 100 + 999  # the first found the budget full


def test_budgets_of_tenants_that_left_the_policy_are_forgotten() -> None:
    budgets = RetryBudgets(TERMS)
    budgets.retry("acme")
    budgets.follow(replace(POLICY, tenants={"globex": POLICY.tenants["globex"]}))
    assert budgets.left("acme") == 100.0


def opened(keys: Keys, key: str = "k", body: int = 1, *, tenant: str = "acme", now_s: float = 0.0) -> bool:
    return keys.opened("acme", tenant, key, body, ticket=f"t-{key}", now_s=now_s)


def asked(keys: Keys, key: str = "k", body: int = 1, *, tenant: str = "acme", now_s: float = 1.0) -> Asked:
    return keys.ask("acme", tenant, key, body, now_s=now_s)


def test_the_same_key_and_body_is_the_request_under_way_and_then_a_duplicate() -> None:
    keys = Keys()
    assert asked(keys) == Asked(known="new")
    opened(keys)
    assert asked(keys) == Asked(known="under_way", ticket="t-k")
    keys.done("acme", "acme", "k", now_s=2.0)
    assert asked(keys) == Asked(known="done", ticket="t-k")


def test_another_body_under_the_key_is_a_conflict_while_it_runs_and_when_it_is_done() -> None:
    keys = Keys()
    opened(keys)
    assert asked(keys, body=2).known == "conflict"
    keys.done("acme", "acme", "k", now_s=2.0)
    assert asked(keys, body=2).known == "conflict"


def test_a_request_without_success_gives_its_key_back() -> None:
    keys = Keys()
    opened(keys)
    keys.released("acme", "acme", "k")
    assert asked(keys, body=2).known == "new"


def test_a_key_is_its_tenant_s_own_though_strangers_share_an_entry() -> None:
    keys = Keys()
    opened(keys, tenant="stranger-1")
    assert asked(keys, body=2, tenant="stranger-2").known == "new"
    assert asked(keys, body=2, tenant="stranger-1").known == "conflict"


def test_what_is_done_is_remembered_for_ten_minutes() -> None:
    keys = Keys()
    opened(keys)
    keys.done("acme", "acme", "k", now_s=100.0)
    assert asked(keys, now_s=700.0).known == "done"
    assert asked(keys, now_s=700.1).known == "new"
    assert len(keys) == 0


def test_memory_is_bounded_and_what_is_under_way_is_never_forgotten() -> None:
    keys = Keys()
    opened(keys, "first")
    for i in range(50_000):
        opened(keys, f"k-{i}")
        keys.done("acme", "acme", f"k-{i}", now_s=1.0)
    assert len(keys) == 10_000
    assert asked(keys, "first").known == "under_way"
    assert asked(keys, "k-49999").known == "done"
    assert asked(keys, "k-0").known == "new"
    assert all(opened(keys, f"later-{i}") for i in range(5_000))
    assert len(keys) == 10_000


def test_one_entry_s_flood_leaves_the_others_their_keys() -> None:
    keys = Keys()
    keys.opened("globex", "globex", "k", 1, ticket="t", now_s=0.0)
    assert [opened(keys, f"k-{i}") for i in range(10_001)].count(False) == 1
    assert keys.ask("globex", "globex", "k", 1, now_s=1.0).known == "under_way"
    keys.retain(frozenset({"globex"}))
    assert len(keys) == 1


def test_an_end_that_nobody_opened_says_nothing() -> None:
    keys = Keys()
    keys.done("acme", "acme", "k", now_s=1.0)
    keys.released("acme", "acme", "k")
    assert asked(keys).known == "new"
