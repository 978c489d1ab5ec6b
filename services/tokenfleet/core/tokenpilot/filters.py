"""Filters: which instances may take this request at all, and what removed the others.

Hard filters leave a typed refusal when they leave nothing. A soft filter that would leave nothing is lifted and
named; the ones behind it still count, so that no more is given up than must be.
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from tokenfleet.core.columns import AVAILABILITIES, Columns, Flags, least, most
from tokenfleet.core.decision import Reason, Request
from tokenfleet.core.known import known
from tokenfleet.core.policy import Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.cost import Costs


class Ask(Struct, frozen=True, kw_only=True):
    """One request as the filters see it: `kv_need_tokens` is prompt plus the cautious (q90) output estimate.

    `ttft_max_s` is what the service level leaves of the time to first token from dispatch, None if not agreed.
    """

    model: str
    digests: tuple[str, ...]
    request_class: str
    terms: RequestClass
    context_tokens: int
    prompt_tokens: int
    context_max_tokens: int
    kv_need_tokens: float
    seats_max: int
    ttft_max_s: float | None
    last_instance: str


def ask_of(
    request: Request,
    pool: PoolView,
    policy: Policy,
    *,
    request_class: str,
    output_q90: float,
    network_s: float,
    last_instance: str,
) -> Ask:
    """Raises UnknownModelError for a model that the policy lacks, KeyError for a class that it lacks."""
    model, terms = policy.model(request.model), policy.classes[request_class]
    agreed_s = terms.ttft_max_s(request.prompt_tokens)
    ttft_max_s = None if agreed_s is None else agreed_s - request.elapsed_s - network_s
    return Ask(
        model=request.model,
        digests=model.digests,
        request_class=request_class,
        terms=terms,
        # Engines refuse prompt + max_tokens beyond their context; without a budget one token must fit.
        context_tokens=request.prompt_tokens + max(request.max_tokens, 1),
        prompt_tokens=request.prompt_tokens,
        context_max_tokens=model.context_max_tokens,
        kv_need_tokens=request.prompt_tokens + (known(output_q90) or 0.0),
        seats_max=pool.seats_max,
        ttft_max_s=ttft_max_s,
        last_instance=last_instance,
    )


# What a refusal says when a filter of that name removed the last instance, and how near its instances came to
# serving: the reason of the nearest speaks (waiting helps the one behind a full instance, nothing else does).
REFUSALS: dict[str, tuple[int, Reason]] = {
    "class_full": (3, "all_busy"),
    "seats_full": (3, "all_busy"),
    "kv_full": (3, "all_busy"),
    "half_open": (3, "all_busy"),
    "paced": (3, "all_busy"),
    "context": (2, "context_too_long"),
    "model": (1, "filtered_by_policy"),
    "revision": (1, "filtered_by_policy"),
    "quarantined": (1, "filtered_by_policy"),
    "weight": (1, "filtered_by_policy"),
    "draining": (0, "no_instances"),
    "starting": (0, "no_instances"),
    "sleeping": (0, "no_instances"),
    "out": (0, "no_instances"),
}


def hard(columns: Columns, ask: Ask, allowed: Flags | None = None) -> tuple[Flags | None, dict[str, int]]:
    """The instances that may serve the request, None when all may; and how many each filter removed first.

    `allowed` are those that pacing has opened to its class, None for all.
    """
    left: Flags | None = None
    excluded: dict[str, int] = {}
    for name, fails in _failing(columns, ask, allowed):
        removed = fails if left is None else fails & left
        number = int(np.count_nonzero(removed))
        if not number:
            continue
        if name:
            excluded[name] = number
        else:  # availability: its own word is the name
            excluded |= columns.availabilities(removed)
        left = ~removed if left is None else left & ~removed
    return left, excluded


def soften(
    columns: Columns, costs: Costs, able: Flags | None, ask: Ask, *, blind: bool = False
) -> tuple[Flags | None, dict[str, Flags], tuple[str, ...]]:
    """The soft filters in their order: who of the able is left (never nobody, None for all), what each filter that was
    not lifted removed, and the names of the lifted ones. `blind`: only confidence, which rests on no prediction."""
    removed: dict[str, Flags] = {}
    relaxed: list[str] = []
    left, number = able, len(columns) if able is None else np.count_nonzero(able)
    for name, fails in _pressing(columns, costs, ask, blind=blind):
        falls = fails if left is None else fails & left
        fallen = np.count_nonzero(falls)
        if 0 < fallen < number:
            removed[name], number = falls, number - fallen
            left = ~falls if left is None else left & ~falls
        elif fallen:
            relaxed.append(name)
    return left, removed, tuple(relaxed)


def trusted(columns: Columns) -> Flags | None:
    """False for a suspect: agent silent, age unknown, or a load that is no number. It is chosen last. None: all are."""
    if not columns.unsure:
        return None if columns.suspect is None else ~columns.suspect
    sure = ~(np.isnan(columns.age_s) | np.isnan(columns.backlog_s))
    return sure if columns.suspect is None else sure & ~columns.suspect


def refusal_of(excluded: dict[str, int]) -> Reason:
    """Why nothing is left, from the counts of the hard filters; `no_instances` for a pool without any."""
    return max((REFUSALS[name] for name in excluded), default=(0, "no_instances"))[1]


def _failing(columns: Columns, ask: Ask, allowed: Flags | None) -> Iterator[tuple[str, Flags]]:
    """Each hard filter in its order, with the instances that fail it; those that nobody can fail are left out."""
    if (other := columns.labels.not_model(ask.model)) is not None:
        yield "model", other
    if ask.digests:  # an instance that tells no revision fails too: a listed one is demanded, not assumed
        yield "revision", columns.labels.not_digests(ask.digests)
    if columns.fixed.unready is not None:
        yield "", _unavailable(columns, columns.fixed.unready, ask.last_instance)
    if columns.fixed.barred is not None:
        yield "weight", columns.fixed.barred
    if (too_long := _too_long(columns, ask)) is not None:
        yield "context", too_long
    if columns.probe is not None:
        yield "half_open", columns.probe & (columns.queued > 0.0)  # one request at a time until one succeeds
    # The extreme of a column costs a fraction of comparing it and counting who fails; mostly nobody does.
    running = columns.classes.get(ask.request_class)
    if running is not None and most(running) >= ask.terms.running_max_per_instance:
        yield "class_full", running >= ask.terms.running_max_per_instance
    if most(columns.open) >= ask.seats_max:
        yield "seats_full", columns.open >= ask.seats_max
    if least(columns.kv_room) < ask.kv_need_tokens:
        yield "kv_full", columns.kv_room < ask.kv_need_tokens
    if allowed is not None:
        yield "paced", ~allowed


def _unavailable(columns: Columns, unready: Flags, last_instance: str) -> Flags:
    """All but the ready; a draining one keeps its session."""
    slot = columns.labels.slots.get(last_instance) if last_instance else None
    if slot is None or AVAILABILITIES[int(columns.fixed.availability[slot])] != "draining":
        return unready
    fails = unready.copy()
    fails[slot] = False
    return fails


def _too_long(columns: Columns, ask: Ask) -> Flags | None:
    """Longer than the instance's own bound, else the model's; or than its whole KV: it could never be admitted."""
    fixed, beyond_model = columns.fixed, ask.context_tokens > ask.context_max_tokens
    if not beyond_model and ask.context_tokens <= fixed.least_context_max and ask.prompt_tokens < fixed.least_kv_total:
        return None
    fails = fixed.kv_total <= ask.prompt_tokens
    if beyond_model:
        return fails | ~(fixed.context_max >= ask.context_tokens)
    return fails | (fixed.context_max < ask.context_tokens)


def _pressing(columns: Columns, costs: Costs, ask: Ask, *, blind: bool) -> Iterator[tuple[str, Flags]]:
    if (sure := trusted(columns)) is not None:
        yield "confidence", ~sure
    if blind:
        return
    share_max, need_tokens, fixed = ask.terms.kv_share_max, ask.kv_need_tokens, columns.fixed
    roomy = columns.whole and most(columns.kv_held) + need_tokens <= share_max * fixed.least_kv_total
    if not roomy or costs.most_wait_s > ask.terms.backlog_max_s:
        too_full = columns.kv_held + need_tokens > share_max * fixed.kv_total  # unknown: false
        yield "pressure", too_full | (costs.wait_s > ask.terms.backlog_max_s)
    if ask.ttft_max_s is not None and costs.most_ttft_s > ask.ttft_max_s:
        yield "slo", costs.ttft_s > ask.ttft_max_s
