"""Every reason has a situation that gives it, and each product's declared failure mode holds: closed for what the
request may, open for load that nobody knows."""

from collections.abc import Callable
from random import Random
from typing import get_args

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool, request
from tests.core.sites import peer, pool_summary, send_to_site
from tokenfleet.core.decision import Reason, Request
from tokenfleet.core.errors import UnknownModelError
from tokenfleet.core.policy import Policy, Tenant
from tokenfleet.core.pool import PoolView
from tokenfleet.core.records import Vector
from tokenfleet.core.slomax.admit import Ruling, admit
from tokenfleet.core.slomax.classify import classify
from tokenfleet.core.slomax.quota import Charge

FREE = Charge(tenant="acme")


def admitted(view: PoolView, asked: Request, *, policy: Policy = POLICY, charge: Charge = FREE) -> Ruling:
    classified = classify(asked, view, policy, output_q90_tokens=640.0)
    return admit(
        asked, classified, view, policy, charge=charge, output_q50_tokens=256.0, output_q90_tokens=640.0, rng=Random(1)
    )


def closed_tenant() -> Policy:
    return replace(POLICY, tenants={**POLICY.tenants, "acme": Tenant(models=("small-chat",))})


ONE = pool(instance("b-0"))
BY_ADMISSION: dict[Reason, Callable[[], Ruling]] = {
    "": lambda: admitted(ONE, request(500)),
    "no_instances": lambda: admitted(pool(), request(500)),
    "all_busy": lambda: admitted(pool(instance("b-0", backlog_s=60.0)), request(500)),
    "filtered_by_policy": lambda: admitted(ONE, request(500), policy=closed_tenant()),
    "quota": lambda: admitted(ONE, request(500), charge=Charge(tenant="acme", refused="used up")),
    "infeasible": lambda: admitted(ONE, request(500, deadline_s=5.0, elapsed_s=6.0)),
    "context_too_long": lambda: admitted(ONE, request(200_000)),
}
BY_DISPATCH: dict[Reason, Callable[[], Reason]] = {
    "not_permitted": lambda: send_to_site([peer("d", pool_summary("d"))], request(tenant="eu-bank")).reason,
    "no_site": lambda: send_to_site([peer("b"), peer("c", pool_summary("c"), link_up=False)]).reason,
}


@pytest.mark.parametrize("reason", BY_ADMISSION)
def test_admission_gives_the_reason_of_the_situation(reason: Reason) -> None:
    ruling = BY_ADMISSION[reason]()
    assert ruling.reason == reason
    assert (ruling.verdict == "admit") == (reason == "")
    assert bool(ruling.detail) == (reason != "")


@pytest.mark.parametrize("reason", BY_DISPATCH)
def test_dispatch_gives_the_reason_of_the_situation(reason: Reason) -> None:
    assert BY_DISPATCH[reason]() == reason


def test_an_unknown_model_is_told_by_name() -> None:
    with pytest.raises(UnknownModelError, match="large-chat, small-chat"):
        send_to_site([peer("b")], request(model="gpt-99"))


def test_no_reason_is_without_a_situation() -> None:
    by_callers = {"retry_budget", "key_conflict", "duplicate_done"}  # test_duplicates, test_retries
    assert {*BY_ADMISSION, *BY_DISPATCH, *by_callers, "unknown_model"} == set(get_args(Reason))


def test_unknown_load_is_open_at_home() -> None:
    nan = float("nan")
    blind = instance("b-0", backlog_s=nan, age_s=None, kv_total_tokens=None, context_tokens=nan, suspect=True)
    assert admitted(pool(blind), request(500)).verdict == "admit"
    unknown = Vector(capacity=nan, used=nan)
    home = pool_summary("b", ready=0, suspect=1, endpoints=1, prefill=unknown, kv=unknown, seats=unknown, waits_s=())
    assert send_to_site([peer("b", home)]).site == "b"


def test_what_can_t_be_told_of_a_remote_site_closes_it() -> None:
    heard = peer("d", pool_summary("d"), link_up=False)  # so it is not we who hear nobody
    for closed in (
        peer("c", age_s=None),
        peer("c", pool_summary("c"), age_s=float("inf")),
        peer("x", pool_summary("x")),
    ):
        assert send_to_site([peer("b"), closed, heard]).site == ""
