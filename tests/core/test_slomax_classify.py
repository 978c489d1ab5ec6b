"""The classifier: which class, by which rule, and what entitlement makes of it."""

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool, request
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import BadRequestError, UnknownTenantError
from tokenfleet.core.policy import Policy, RequestClass, Tenant
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.budget import bounded_tokens
from tokenfleet.core.slomax.classify import Classification, classify, long_from_tokens

VIEW = pool(instance("b-0"))


def classified(asked: Request, *, view: PoolView = VIEW, policy: Policy = POLICY, q90: float = 640.0) -> Classification:
    return classify(asked, view, policy, output_q90_tokens=q90)


def tenant(policy: Policy = POLICY, **terms: object) -> Policy:
    return replace(policy, tenants={**policy.tenants, "acme": Tenant(**terms)})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"prompt_tokens": 500}, "chat"),
        ({"prompt_tokens": 500, "task": "evaluation"}, "batch"),
        ({"prompt_tokens": 500, "stream": False, "deadline_s": 600.0}, "batch"),
        ({"prompt_tokens": 500, "stream": False, "deadline_s": 599.0}, "chat"),
        ({"prompt_tokens": 500, "stream": True, "deadline_s": 3600.0}, "chat"),
        ({"prompt_tokens": 500, "stream": False}, "chat"),
        ({"prompt_tokens": 100_000}, "long"),
        ({"prompt_tokens": 100_000, "task": "batch"}, "batch"),
        ({"prompt_tokens": 500, "declared_class": "long"}, "long"),
    ],
)
def test_the_first_rule_that_holds_names_the_class(facts: dict[str, object], expected: str) -> None:
    assert classified(request(**facts)).request_class == expected  # pyright: ignore[reportArgumentType]


def test_long_begins_where_prefill_takes_a_quarter_of_chats_first_token() -> None:
    edge = long_from_tokens(VIEW, POLICY)
    assert edge is not None
    assert 8_000 < edge < 16_000  # .25 · 2 s · about 23,000 tokens/s
    assert classified(request(int(edge))).request_class == "chat"
    assert classified(request(int(edge) + 1)).request_class == "long"


def test_cached_tokens_don_t_make_a_request_long() -> None:
    warm = pool(instance("b-0"), instance("b-1", hit_tokens=38_000))
    assert classified(request(40_000), view=warm).request_class == "chat"


def test_a_request_that_fills_an_instance_s_kv_is_long() -> None:
    small = pool(instance("b-0", kv_total_tokens=100_000.0, hit_tokens=4_000), instance("b-1", kv_total_tokens=None))
    assert classified(request(4_200), view=small, q90=1_000.0).request_class == "long"
    assert classified(request(4_200), view=small, q90=800.0).request_class == "chat"


def test_a_retry_keeps_its_class_though_less_time_is_left() -> None:
    asked = request(500, stream=False, deadline_s=700.0)
    assert classified(replace(asked, elapsed_s=400.0, attempt=1)).request_class == "batch"


def test_a_class_that_is_not_open_becomes_the_nearest_less_urgent_one() -> None:
    found = classified(request(500), policy=tenant(classes=("long", "batch")))
    assert found.request_class == "long"
    assert "chat is not open" in found.rule


def test_declaring_urgency_does_not_buy_it() -> None:
    policy = tenant(classes=("batch",))
    assert classified(request(500, declared_class="chat"), policy=policy).request_class == "batch"


def test_no_less_urgent_class_left_is_a_refusal() -> None:
    found = classified(request(500, task="batch"), policy=tenant(classes=("chat",)))
    assert found.request_class == "batch"
    assert "not open" in found.refused


def test_further_classes_are_reached_by_declaration_only() -> None:
    policy = replace(POLICY, classes={**POLICY.classes, "gold": RequestClass(ttft_s=0.5, rank=0)})
    gold_only = tenant(policy, classes=("gold",))
    assert classified(request(500, declared_class="gold"), policy=policy).request_class == "gold"
    assert classified(request(500), policy=policy).request_class == "chat"
    assert classified(request(500), policy=gold_only).refused
    no_gold = tenant(policy, classes=("chat", "batch"))
    assert classified(request(500, declared_class="gold"), policy=no_gold).request_class == "chat"


def test_unknown_names_are_errors_of_the_request() -> None:
    with pytest.raises(BadRequestError, match="batch, chat, long"):
        classified(request(500, declared_class="urgent"))
    with pytest.raises(UnknownTenantError):
        classified(request(500, tenant="nobody"))


def test_the_budget_bounds_the_estimate_and_is_never_it() -> None:
    assert bounded_tokens(256.0, 0) == 256.0
    assert bounded_tokens(256.0, 65_536) == 256.0
    assert bounded_tokens(256.0, 10) == 10.0
