"""Admission: verdict and reason for each situation, never swapped."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool, request
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, Products, Tenant
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.admit import Ruling, admit
from tokenfleet.core.slomax.classify import Classification, classify
from tokenfleet.core.slomax.quota import Charge

FREE = Charge(tenant="acme")
IDLE = pool(instance("b-0"), instance("b-1"))


def ruled(view: PoolView = IDLE, asked: Request | None = None, *, policy: Policy = POLICY, **facts: Any) -> Ruling:
    asked = asked or request(500)
    known: dict[str, Any] = {"charge": FREE, "output_q50_tokens": 256.0, "output_q90_tokens": 640.0, "rng": Random(1)}
    classified = facts.pop("classified", None) or classify(asked, view, policy, output_q90_tokens=640.0)
    return admit(asked, classified, view, policy, **(known | facts))


def crowd(name: str, running: int, request_class: str = "chat") -> Any:
    return instance(name, class_running={request_class: running}, decoding=running)


def test_room_admits_and_shows_it() -> None:
    ruling = ruled(pool(crowd("b-0", 10), crowd("b-1", 4)))
    assert (ruling.verdict, ruling.reason) == ("admit", "")
    assert (ruling.admission.running, ruling.admission.bound) == (14, 128)
    assert ruling.admission.request_class == "chat"


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ((), "no_instances"),
        (("out", "draining"), "no_instances"),
        (("starting", "sleeping"), "no_instances"),
        (("quarantined", "out"), "filtered_by_policy"),
    ],
)
def test_nothing_that_can_serve_is_not_busy(states: tuple[Any, ...], reason: str) -> None:
    ruling = ruled(pool(*[instance(f"b-{i}", availability=state) for i, state in enumerate(states)]))
    assert (ruling.verdict, ruling.reason) == ("reject", reason)
    assert ruling.admission.retry_after_s is None


def test_a_full_class_is_busy_and_leaves_the_others_alone() -> None:
    view = pool(crowd("b-0", 64), crowd("b-1", 64), instance("b-2", availability="out"))
    assert (ruled(view).verdict, ruled(view).reason) == ("reject", "all_busy")
    assert ruled(view, request(500, declared_class="batch")).verdict == "admit"


def test_suspects_add_no_room_unless_all_are_suspect() -> None:
    view = pool(crowd("b-0", 64), instance("b-1", suspect=True))
    assert ruled(view).reason == "all_busy"
    silent = pool(instance("b-0", suspect=True, age_s=None), instance("b-1", suspect=True))
    assert ruled(silent).verdict == "admit"


def test_a_wait_beyond_the_class_s_backlog_is_busy() -> None:
    assert ruled(pool(instance("b-0", backlog_s=6.1), instance("b-1", backlog_s=6.2))).reason == "all_busy"
    assert ruled(pool(instance("b-0", backlog_s=6.1), instance("b-1", backlog_s=5.9))).verdict == "admit"
    assert ruled(pool(instance("b-0", backlog_s=float("nan")))).verdict == "admit"  # unknown vetoes nothing


def test_retry_after_follows_the_backlog_within_its_limits_and_is_spread() -> None:
    def hint(backlog_s: float, seed: int) -> float:
        ruling = ruled(pool(instance("b-0", backlog_s=backlog_s)), rng=Random(seed))
        assert ruling.admission.retry_after_s is not None
        return ruling.admission.retry_after_s

    near, far = [hint(7.0, seed) for seed in range(200)], [hint(500.0, seed) for seed in range(200)]
    assert 0.8 <= min(near) < 0.95
    assert 1.05 < max(near) <= 1.3
    assert 24.0 <= min(far) < 25.0
    assert 35.0 < max(far) <= 36.0
    assert hint(12.0, 1) > hint(8.0, 1)
    assert hint(8.0, 5) == hint(8.0, 5)


def test_context_counts_prompt_and_budget_and_an_absent_budget_reserves_nothing() -> None:
    most = POLICY.model("large-chat").context_max_tokens
    assert ruled(asked=request(most, declared_class="long")).reason == "context_too_long"
    assert ruled(asked=request(most - 1, declared_class="long")).verdict == "admit"
    assert ruled(asked=request(500, max_tokens=65_536)).verdict == "admit"
    assert ruled(asked=request(500, max_tokens=2**31 - 1)).reason == "context_too_long"
    small = pool(instance("b-0", context_max_tokens=8192), instance("b-1", context_max_tokens=32_768))
    assert ruled(small, request(16_000, declared_class="chat")).verdict == "admit"


def test_an_output_estimate_is_cut_at_the_budget() -> None:
    ruling = ruled(asked=request(500, max_tokens=300))
    assert (ruling.admission.output_q50_tokens, ruling.admission.output_q90_tokens) == (256.0, 300.0)


def test_a_used_up_quota_says_so_and_when() -> None:
    spent = Charge(tenant="acme", refused="2 requests a minute allowed, all used", retry_after_s=20.0)
    ruling = ruled(charge=spent)
    assert (ruling.verdict, ruling.reason) == ("reject", "quota")
    assert ruling.admission.retry_after_s is not None
    assert 16.0 <= ruling.admission.retry_after_s <= 24.0
    running = ruled(pool(crowd("b-0", 10)), charge=Charge(tenant="acme", refused="10 running"))
    assert running.admission.retry_after_s is not None


def test_an_empty_pool_is_told_before_quota_and_load() -> None:
    assert ruled(pool(), charge=Charge(tenant="acme", refused="used")).reason == "no_instances"


def test_a_deadline_that_can_t_be_met_is_infeasible_and_not_busy() -> None:
    late = request(500, declared_class="batch", deadline_s=100.0, elapsed_s=99.5)
    assert (ruled(asked=late).verdict, ruled(asked=late).reason) == ("reject", "infeasible")
    assert ruled(asked=replace(late, elapsed_s=50.0)).verdict == "admit"
    crowded = pool(instance("b-0", backlog_s=101.0))
    assert ruled(crowded, replace(late, elapsed_s=0.0)).reason == "infeasible"


def test_a_batch_with_a_far_deadline_comes_later_and_early_enough() -> None:
    view = pool(instance("b-0", backlog_s=100.0))
    ruling = ruled(view, request(500, declared_class="batch", deadline_s=3600.0))
    assert (ruling.verdict, ruling.reason) == ("defer", "all_busy")
    assert ruling.admission.not_before_s == pytest.approx(70.0, abs=1.0)  # when the wait is down to the class's 30 s
    soon = ruled(view, request(500, declared_class="batch", deadline_s=150.0))
    assert (soon.verdict, soon.reason) == ("reject", "all_busy")
    tight = ruled(pool(instance("b-0", backlog_s=2000.0)), request(500, declared_class="batch", deadline_s=3600.0))
    assert tight.admission.not_before_s is not None
    assert tight.admission.not_before_s < 800.0  # at most half of the slack


def test_chat_is_never_deferred() -> None:
    view = pool(instance("b-0", backlog_s=100.0))
    assert ruled(view, request(500, deadline_s=3600.0)).verdict == "reject"


def test_a_class_or_model_that_is_not_open_is_filtered_by_policy() -> None:
    barred = Classification(request_class="chat", rule="r", refused="not open")
    assert ruled(classified=barred).reason == "filtered_by_policy"
    other = replace(POLICY, tenants={**POLICY.tenants, "acme": Tenant(models=("small-chat",))})
    ruling = ruled(policy=other)
    assert ruling.reason == "filtered_by_policy"
    assert "small-chat" in ruling.detail


def test_switched_off_it_passes_all_load_and_no_right() -> None:
    off = replace(POLICY, products=Products(slomax=False))
    spent = Charge(tenant="acme", refused="used")
    ruling = ruled(pool(crowd("b-0", 500)), policy=off, charge=spent)
    assert ruling.verdict == "admit"
    assert "off" in ruling.detail
    barred = Classification(request_class="chat", rule="r", refused="not open")
    assert ruled(policy=off, classified=barred).reason == "filtered_by_policy"
