"""Evidence: the routing as a value, with the terms of the best candidates; made after the choice, of a few."""

import math
from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from tokenfleet.core.columns import KV_STATES, Columns, Flags
from tokenfleet.core.decision import Candidate, How
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import uncached_tokens
from tokenfleet.core.records import PlacedOn
from tokenfleet.core.tokenpilot.cost import Costs
from tokenfleet.core.tokenpilot.explain import deciding_term, refusal_sentence, sentence_of
from tokenfleet.core.tokenpilot.filters import refusal_of
from tokenfleet.core.tokenpilot.routing import Routing


class Chosen(Struct, frozen=True):
    """The slot of the target and how it was found; `other` is the second drawn, −1 for the cheapest that is left.

    `near_ties` counts those that were as good, itself included; `drawn` is its part of the draw among them.
    """

    slot: int
    how: How
    other: int = -1
    near_ties: int = 0
    drawn: tuple[float, float] | None = None


def routing_of(
    chosen: Chosen,
    columns: Columns,
    costs: Costs,
    *,
    able: Flags | None,
    removed: Mapping[str, Flags],
    excluded: dict[str, int],
    relaxed: tuple[str, ...],
    weights: TokenPilotPolicy,
    prompt_tokens: int,
    ttft_max_s: float | None,
    network_s: float,
    suspect_only: bool,
) -> Routing:
    """`able` passed the hard filters (None: all); `removed` are those of them that each soft filter took out."""
    second = chosen.other if chosen.other >= 0 else _runner_up(chosen, costs, able, removed)
    others = [slot for slot in costs.least if slot != chosen.slot][: weights.candidates_kept - 1]
    kept = [chosen.slot, *others]
    told = [*kept, second] if second >= 0 and second not in kept else kept
    by_slot = dict(zip(told, _candidates(told, columns, costs, removed, weights, prompt_tokens), strict=True))
    target, runner_up = by_slot[chosen.slot], by_slot.get(second)
    deciding = deciding_term(target, runner_up) if runner_up and chosen.how == "least_cost" else ""
    named = {c.instance: c.filtered for c in by_slot.values() if c.filtered} if runner_up is None else {}
    return Routing(
        target=target.instance,
        address=columns.labels.addresses[chosen.slot],
        how=chosen.how,
        near_ties=chosen.near_ties,
        drawn=chosen.drawn,
        candidates=tuple([by_slot[slot] for slot in kept]),
        considered=len(columns),
        excluded=excluded | {name: int(np.count_nonzero(flags)) for name, flags in removed.items()},
        relaxed=relaxed,
        runner_up=runner_up.instance if runner_up else "",
        gap_s=runner_up.cost_s - target.cost_s if runner_up else None,
        deciding=deciding,
        predicted_ttft_s=network_s + target.ttft_s,
        suspect_only=suspect_only,
        placed=_placed_on(chosen.slot, target, columns),
        sentence=sentence_of(
            target,
            runner_up,
            how=chosen.how,
            network_s=network_s,
            deciding=deciding,
            removed=named,
            relaxed=relaxed,
            ttft_max_s=ttft_max_s,
        ),
    )


def refusal(pool: PoolView, excluded: dict[str, int]) -> Routing:
    """Why no instance may serve the request."""
    reason = refusal_of(excluded)
    said = refusal_sentence(pool.pool, reason, len(pool.columns), excluded)
    return Routing(reason=reason, detail=said, sentence=said, considered=len(pool.columns), excluded=excluded)


def _runner_up(chosen: Chosen, costs: Costs, able: Flags | None, removed: Mapping[str, Flags]) -> int:
    """The cheapest but the target that no filter removed, −1 without one."""
    for slot in costs.least:
        if slot != chosen.slot and not any(flags[slot] for flags in removed.values()):
            return slot
    if costs.all_least:
        return -1
    left_s = costs.cost_s.copy() if able is None else np.where(able, costs.cost_s, np.inf)
    for flags in removed.values():
        left_s[flags] = np.inf
    left_s[chosen.slot] = np.inf
    slot = int(left_s.argmin())
    return slot if left_s[slot] < np.inf else -1


def _candidates(
    slots: list[int],
    columns: Columns,
    costs: Costs,
    removed: Mapping[str, Flags],
    weights: TokenPilotPolicy,
    prompt_tokens: int,
) -> list[Candidate]:
    names, now_s, hits, p_hits = columns.labels.names, columns.now_s, columns.hits, columns.p_hit
    decodings, births_s, surcharges, paces_s = columns.decoding, columns.born_s, columns.fixed.surcharge, costs.pace_s
    bias_s, margin_weight, price, decode_price_s = (
        costs.bias_s,
        weights.margin_weight,
        costs.reuse_price,
        weights.decode_price_s,
    )
    computed_min = uncached_tokens(prompt_tokens, prompt_tokens)
    told: list[Candidate] = []
    terms: list[list[float]] = costs.terms.take(slots, axis=1).T.tolist()
    for slot, (cost_s, ttft_s, wait_s, work_s, saved_s, ratio, kv_s, kv_use) in zip(slots, terms, strict=True):
        hit = 0 if hits is None else int(hits.item(slot))
        hit = hit if hit < prompt_tokens else prompt_tokens
        left = prompt_tokens - hit
        age_s = now_s - births_s.item(slot)
        told.append(
            Candidate(  # by place: a call that names so many fields takes five times as long
                names[slot],
                cost_s,
                ttft_s,
                wait_s,
                work_s,
                bias_s if bias_s >= -wait_s else -wait_s,
                margin_weight * ratio * (wait_s + work_s),
                price * work_s,
                kv_s,
                decode_price_s * decodings.item(slot),
                0.0 if surcharges is None else surcharges.item(slot) * ttft_s,
                hit,
                left if left > computed_min else computed_min,
                p_hits.item(slot) if hit else 0.0,
                saved_s,
                None if age_s != age_s else age_s if age_s > 0.0 else 0.0,
                age_s != age_s or (columns.suspect is not None and columns.suspect.item(slot)),
                kv_use if columns.whole or _is_sized(slot, columns) else None,
                _remover(slot, removed) if removed else "",
                0.0 if paces_s is None else paces_s.item(slot),
            )
        )
    return told


def _is_sized(slot: int, columns: Columns) -> bool:
    """Whether both what is held and what there is are known."""
    return not math.isnan(columns.kv_held.item(slot) + columns.fixed.kv_total.item(slot))


def _remover(slot: int, removed: Mapping[str, Flags]) -> str:
    """The first filter that removed it, empty for none."""
    for name, flags in removed.items():
        if flags.item(slot):
            return name
    return ""


def _placed_on(slot: int, target: Candidate, columns: Columns) -> PlacedOn:
    """What was believed of the target, for the outcome to carry."""
    return PlacedOn(
        hit_tokens=target.hit_tokens,
        uncached_tokens=target.uncached_tokens,
        queued=int(columns.queued[slot]),
        decoding=int(columns.decoding[slot]),
        context_tokens=_told(float(columns.context_tokens[slot])) or 0.0,
        wait_s=target.wait_s,
        work_s=target.work_s,
        bias_s=target.bias_s,
        kv_state=KV_STATES[int(columns.kv_state[slot])],
    )


def _told(value: float) -> float | None:
    return value if value == value else None
