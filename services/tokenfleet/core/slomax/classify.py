"""Which class does this request belong to, and may its tenant use it?

Deterministic: the same request over the same tables gives the same class, and the rule is told with its numbers.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from tokenfleet.core.decision import Request
from tokenfleet.core.errors import NAME_SHOWN_CHARS, BadRequestError, listed
from tokenfleet.core.policy import REQUIRED_CLASSES, Policy, Tenant
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.rate import prefill_tokens_per_s
from tokenfleet.core.predict.work import uncached_tokens


class Classification(Struct, frozen=True, kw_only=True):
    """The class in force and the rule that put the request there.

    `refused` says why the tenant has no class for it, empty otherwise; `request_class` is then what it asked for.
    """

    request_class: str
    rule: str
    refused: str = ""


def classify(request: Request, pool: PoolView, policy: Policy, *, output_q90_tokens: float) -> Classification:
    """The declared class, else batch, long or chat by the first rule that holds, capped by the tenant's entitlement.

    `pool` gives the prefill rate, the KV size of an instance and the cached prefix, with no instances if need be.
    `output_q90_tokens` is the cautious output estimate, already bounded by the caller's budget. Raises
    BadRequestError for a class that the policy lacks, UnknownTenantError for a tenant that it lacks.
    """
    if request.declared_class and request.declared_class not in policy.classes:
        raise BadRequestError(
            "declared_class",
            f"no class {request.declared_class[:NAME_SHOWN_CHARS]!r}; there is: {listed(policy.classes)}",
        )
    found = (
        Classification(request_class=request.declared_class, rule="declared by the caller")
        if request.declared_class
        else _by_rule(request, pool, policy, output_q90_tokens=output_q90_tokens)
    )
    return _capped(found, policy.tenant(request.tenant), policy)


def long_from_tokens(pool: PoolView, policy: Policy) -> float | None:
    """L*, the uncached tokens from which a request is long: the share of chat's TTFT that its prefill may take, at
    the pool's prefill rate. None when chat has no TTFT agreed."""
    ttft_s = policy.classes["chat"].ttft_s
    rate = prefill_tokens_per_s(pool.coefficients, budget_tokens=pool.budget_tokens)
    return None if ttft_s is None else policy.slomax.long_ttft_share * ttft_s * rate


def _by_rule(request: Request, pool: PoolView, policy: Policy, *, output_q90_tokens: float) -> Classification:
    terms = policy.slomax
    if request.task in terms.batch_tasks:
        return Classification(request_class="batch", rule=f"task {request.task!r} is batch work")
    # The deadline as it was given at arrival: a retry keeps its class though less time is left.
    deadline_s = request.deadline_s
    if not request.stream and deadline_s is not None and deadline_s >= terms.batch_deadline_min_s:
        return Classification(
            request_class="batch",
            rule=f"no stream, deadline {deadline_s:.0f} s ≥ {terms.batch_deadline_min_s:.0f} s",
        )
    uncached = uncached_tokens(request.prompt_tokens, pool.columns.most_hit_tokens)
    long_from = long_from_tokens(pool, policy)
    if long_from is not None and uncached >= long_from:
        return Classification(request_class="long", rule=f"{uncached} uncached tokens ≥ {long_from:.0f}")
    kv_need_tokens = request.prompt_tokens + output_q90_tokens
    kv_total_tokens = float(np.fmax.reduce(pool.columns.fixed.kv_total, initial=0.0))
    if kv_total_tokens and kv_need_tokens > terms.long_kv_share * kv_total_tokens:
        return Classification(
            request_class="long",
            rule=f"{kv_need_tokens:.0f} KV tokens > {terms.long_kv_share:.0%} of an instance's {kv_total_tokens:.0f}",
        )
    return Classification(request_class="chat", rule=f"{uncached} uncached tokens, neither batch nor long")


def _capped(found: Classification, tenant: Tenant, policy: Policy) -> Classification:
    """The class if the tenant may use it, else its nearest one that is no more urgent among the classifier's three
    (further classes are reached by declaration only)."""
    if not tenant.classes or found.request_class in tenant.classes:
        return found
    rank = policy.classes[found.request_class].rank
    allowed = [c for c in REQUIRED_CLASSES if c in tenant.classes and policy.classes[c].rank >= rank]
    if not allowed:
        return Classification(
            request_class=found.request_class,
            rule=found.rule,
            refused=f"class {found.request_class!r} is not open to the tenant; it may use {_listed(tenant.classes)}",
        )
    nearest = min(allowed, key=lambda c: policy.classes[c].rank)
    return Classification(
        request_class=nearest,
        rule=f"{found.rule}; {found.request_class} is not open to the tenant, {nearest} is the nearest that is",
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
