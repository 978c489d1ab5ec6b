"""Idempotency in decisions: under one key of a tenant a request runs once, whatever ids its callers give it."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.builders import ended, placements
from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, ROUTE
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.policy import LateBindingPolicy
from tokenfleet.core.schedule import let_go, withdrawn
from tokenfleet.core.site import Heard


def keyed(request_id: str, key: str = "k", **facts: Any) -> Request:
    return asked(request_id, idempotency_key=key, **facts)


def test_another_id_under_the_key_gets_the_answer_of_the_one_that_runs_marked_and_places_nothing() -> None:
    b = Town("b", small=2)
    first = b.place(keyed("r1"))
    assert (first.verdict, first.duplicate, first.idempotency_key) == ("admit", False, "k")
    again = b.decide(keyed("r2"))
    assert (again.placement, again.outcome) == (None, None)
    assert again.decision.duplicate
    assert (again.decision.id, again.decision.request, again.decision.target) == (first.id, "r1", first.target)
    assert len(b.site.ledger) == 1
    assert not b.decide(asked("r3")).decision.duplicate
    assert not b.decide(keyed("r4", key="other")).decision.duplicate


@pytest.mark.parametrize("facts", [{"prompt_tokens": 1001}, {"max_tokens": 7}, {"body_hash": 5}])
def test_another_body_under_the_key_is_a_conflict_while_it_runs_and_afterwards(facts: dict[str, Any]) -> None:
    b = Town("b", small=2)
    first = b.place(keyed("r1"))
    for _ in range(2):
        refused = b.decide(keyed("r2", **facts))
        assert (refused.decision.verdict, refused.decision.reason) == ("reject", "key_conflict")
        assert refused.outcome is None
        assert "'k'" in refused.decision.detail
        b.hears_outcome(first, "finished")


def test_a_body_hash_of_the_caller_s_own_is_the_body() -> None:
    b = Town("b", small=2)
    b.place(keyed("r1", body_hash=5))
    assert b.decide(keyed("r2", body_hash=5, prompt_tokens=1001)).decision.duplicate
    assert b.decide(keyed("r2", body_hash=6)).decision.reason == "key_conflict"


def test_what_has_completed_is_not_run_again_for_ten_minutes() -> None:
    b = Town("b", small=2)
    b.hears_outcome(b.place(keyed("r1")), "finished")
    done = b.decide(keyed("r2"))
    assert (done.decision.verdict, done.decision.reason, done.outcome) == ("reject", "duplicate_done", None)
    assert b.decide(keyed("r1", attempt=1)).decision.reason == "duplicate_done"
    b.now_s += 601.0
    b.hears_telemetry()
    assert b.decide(keyed("r2")).decision.verdict == "admit"


@pytest.mark.parametrize("kind", ["failed", "cancelled", "timed_out"])
def test_what_ended_without_success_gives_its_key_back(kind: str) -> None:
    b = Town("b", small=2)
    b.hears_outcome(b.place(keyed("r1")), kind)
    assert not b.decide(keyed("r2", prompt_tokens=7)).decision.duplicate


def test_the_attempts_of_one_request_are_no_duplicates_and_the_last_one_keeps_the_key() -> None:
    b = Town("b", small=2)
    first = b.place(keyed("r1"))
    second = b.place(keyed("r1", attempt=1))
    assert (second.verdict, second.duplicate) == ("admit", False)
    assert second.id != first.id
    b.hears_outcome(first, "failed")  # heard late: the second attempt runs
    assert b.decide(keyed("r2")).decision.id == second.id


def test_each_tenant_has_keys_of_its_own_even_under_the_default_tenant() -> None:
    b = Town("b", small=2)
    b.site.adopt(replace(b.site.policy, default_tenant="globex"))
    b.place(keyed("r1", tenant="stranger-1"))
    assert not b.decide(keyed("r2", tenant="acme")).decision.duplicate
    assert not b.decide(keyed("r2", tenant="stranger-2")).decision.duplicate
    assert b.decide(keyed("r2", tenant="stranger-1")).decision.duplicate


def test_a_refused_request_gives_its_key_back() -> None:
    b = Town("b", small=1)
    assert b.decide(keyed("r1", prompt_tokens=200_000), steps=ADMIT).decision.reason == "context_too_long"
    assert b.decide(keyed("r2")).decision.verdict == "admit"


def test_duplicates_cost_their_tenant_nothing_and_are_answered_though_its_quota_is_used_up() -> None:
    b = Town("b", small=2, tenant_limits={"acme": 2})
    b.place(keyed("r1"))
    for n in range(5):
        assert b.decide(keyed(f"again-{n}")).decision.duplicate
        assert b.decide(keyed(f"again-{n}", body_hash=9)).decision.reason == "key_conflict"
    assert b.site.quotas.used("acme", now_s=b.now_s) == 1
    assert b.place(asked("r2")).verdict == "admit"
    assert b.decide(keyed("r3")).decision.duplicate
    assert b.decide(asked("r4")).decision.reason == "quota"


def test_a_dry_run_takes_no_key() -> None:
    b = Town("b", small=1)
    b.decide(keyed("r1", dry_run=True))
    assert len(b.site.duplicates) == 0
    assert not b.decide(keyed("r2")).decision.duplicate


def test_the_end_that_another_replica_was_told_of_gives_the_key_back() -> None:
    b = Town("b", small=1)
    first = b.place(keyed("r1"))
    gone = ended(first.id, first.target, request="r1", model="small-chat")
    b.site.heard(placements(gone, replica="1"), Heard(now_s=b.now_s))
    assert not b.decide(keyed("r2", prompt_tokens=7)).decision.duplicate


def test_what_was_never_placed_holds_no_key() -> None:
    b = Town("b", small=1)
    b.decide(keyed("r1"))  # answered, and lost before it was placed
    assert not b.decide(keyed("r2")).decision.duplicate


def test_an_admission_without_an_instance_and_a_redirect_hold_their_key_for_ten_seconds() -> None:
    a, b = Town("a"), Town("b", small=1)
    a.hears_summary_of(b)
    assert a.decide(keyed("r1", origin="a")).decision.verdict == "redirect"
    again = a.decide(keyed("r2", origin="a")).decision
    assert (again.verdict, again.site, again.duplicate) == ("redirect", "b", True)
    b.decide(keyed("r3", key="n"), steps=ADMIT)
    assert b.decide(keyed("r4", key="n"), steps=ADMIT).decision.duplicate
    assert not b.decide(keyed("r3", key="n"), steps=ROUTE).decision.duplicate
    for town in (a, b):
        town.now_s += 10.1
        town.hears_telemetry()
    a.hears_summary_of(b)
    assert not a.decide(keyed("r2", origin="a")).decision.duplicate
    assert not b.decide(keyed("r4", key="n"), steps=ADMIT).decision.duplicate


def held(town: Town) -> Decision:
    """A request with a key that waits, behind one that fills the only instance."""
    late = LateBindingPolicy(events_share_min=0.0)
    town.site.adopt(replace(town.site.policy, tokenpilot=replace(town.site.policy.tokenpilot, late=late)))
    town.place(asked("long", prompt_tokens=30_000))
    decision = town.decide(keyed("r1", wait_max_s=60.0)).decision
    assert decision.verdict == "queue"
    return decision


def test_a_duplicate_of_one_that_waits_waits_with_it_and_its_final_answer_takes_over() -> None:
    b = Town("b", small=1)
    first = held(b)
    again = b.decide(keyed("r2", wait_max_s=60.0)).decision
    assert (again.verdict, again.id, again.duplicate, len(b.site.held)) == ("queue", first.id, True, 1)
    final = let_go(b.site, ("r1", 0), b.ids(), now_s=b.now_s)
    assert final is not None
    assert not isinstance(final, Exception)
    assert final.placement is not None
    b.site.placed(final.placement, partition=0, session="", now_s=b.now_s)
    assert b.decide(keyed("r2")).decision.id == final.decision.id


def test_one_that_is_taken_back_while_it_waits_gives_its_key_back() -> None:
    b = Town("b", small=1)
    held(b)
    withdrawn(b.site, ("r1", 0), b.now_s)
    assert len(b.site.duplicates) == 0
    assert not b.decide(keyed("r2", prompt_tokens=7)).decision.duplicate


def test_with_slomax_off_keys_are_not_looked_at() -> None:
    b = Town("b", small=1)
    b.place(keyed("r1"))
    b.site.adopt(replace(b.site.policy, products=replace(b.site.policy.products, slomax=False)))
    assert not b.decide(keyed("r2")).decision.duplicate


def test_tenants_that_a_policy_lacks_lose_their_keys() -> None:
    b = Town("b", small=1)
    b.place(keyed("r1"))
    kept = b.site.policy
    b.site.adopt(replace(kept, tenants={"globex": kept.tenants["globex"]}))
    b.site.adopt(kept)
    assert len(b.site.duplicates) == 0
    assert not b.site.duplicates._originals
