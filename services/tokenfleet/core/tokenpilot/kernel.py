"""Kernel: the arithmetic of a choice, once as whole arrays and once as one pass that can be compiled.

Both are made of the same formulas, which take one instance's numbers as well as arrays of them.
"""

from typing import Any, NamedTuple

import numpy as np

from tokenfleet.core.columns import Flags, Floats, Slots, most
from tokenfleet.core.compiled import Twin

COST, TTFT, WAIT, WORK, SAVED, RATIO, KV, KV_USE = range(8)  # rows of the terms
TERMS = 8
ROOM, STEP, KEPT_RATIO = range(3)  # rows of what is kept from one request to the next
KV_USE_MAX = 0.98  # keeps the pressure term finite at full KV

NOTHING: Floats = np.empty(0)  # stands for an array that isn't there
NOBODY: Flags = np.empty(0, np.bool_)  # stands for no word on who may serve: all may


class Scale(NamedTuple):
    """What is the same for all instances, all of it floats. `cold_rest_s` is the part of the work without a cache that
    no instance changes, `computed_min_tokens` the least that is computed of a cached prompt. `kv_use_typical` is
    assumed where an instance's own is unknown."""

    prompt_tokens: float
    cold_tokens: float
    cold_rest_s: float
    computed_min_tokens: float
    w_min_s: float
    a_s: float
    b_s: float
    kv_load_tokens: float
    kv_use_typical: float
    kv_lambda_s: float
    kv_knee: float
    kv_slope_s: float
    bias_s: float
    margin_weight: float
    reuse_price: float
    decode_price_s: float


# How many slots of the least costs were found, the greatest wait and the greatest time to first token of all.
Found = tuple[int, float, float]
Number = Any  # a float or Floats: numba takes no type variable, and the same formula serves both


def prefill_s(
    left: Number, cached: Number, room: Number, step_s: Number, w_min_s: float, a_s: float, b_s: float
) -> Any:
    """predict.work.prefill_work_s: `left` tokens to compute behind `cached` ones."""
    return np.ceil(left / room) * step_s + np.maximum(w_min_s, a_s * left) + b_s * left * (cached + left / 2)


def cold_s(scale: Scale, room: Number, step_s: Number) -> Any:
    """Work without a cache."""
    return np.ceil(scale.cold_tokens / room) * step_s + scale.cold_rest_s


def saved_s(scale: Scale, hit: Number, p_hit: Number, cold_s: Number, room: Number, step_s: Number) -> Any:
    """What the cache is expected to save. The prefix is there with chance p: p · work(hit) + (1 − p) · work(0). So a
    warm instance beats an idle cold one iff p · seconds saved > extra wait + extra margin."""
    cached = np.minimum(hit, scale.prompt_tokens)
    left = np.maximum(scale.prompt_tokens - cached, scale.computed_min_tokens)
    warm_s = prefill_s(left, cached, room, step_s, scale.w_min_s, scale.a_s, scale.b_s)
    return np.maximum(cold_s - warm_s, 0.0) * p_hit


def kv_use(scale: Scale, held: Number, total: Number) -> Any:
    return (held + scale.kv_load_tokens) / np.maximum(total, 1.0)


def crowding_s(use: Number, lambda_s: float) -> Any:
    """λ · use / (1 − use): the nearer KV is to full, the likelier a preemption."""
    capped = np.minimum(use, KV_USE_MAX)
    return capped / (1.0 - capped) * lambda_s


def overfull_s(use: Number, knee: float, slope_s: float) -> Any:
    return slope_s * np.maximum(0.0, np.minimum(use, 2.0) - knee)


def bias_s(scale: Scale, wait_s: Number) -> Any:
    """What was learned to come earlier than predicted is taken from the wait: no prompt beats its own prefill."""
    return np.maximum(scale.bias_s, -wait_s)


def cost_s(scale: Scale, ratio: Number, predicted_s: Number, ttft_s: Number, work_s: Number, kv_s: Number) -> Any:
    return scale.margin_weight * ratio * predicted_s + ttft_s + scale.reuse_price * work_s + kv_s


FORMULAS = (prefill_s, cold_s, saved_s, kv_use, crowding_s, overfull_s, bias_s, cost_s)


def by_arrays(
    scale: Scale,
    backlog_s: Floats,
    ahead_s: Floats,
    kept: Floats,
    hits: Floats,
    p_hit: Floats,
    kv_held: Floats,
    kv_total: Floats,
    decoding: Floats,
    surcharge: Floats,
    pace_s: Floats,
    able: Flags,
    terms: Floats,
    least: Slots,
) -> Found:
    """Fills `terms`, and `least` with the slots of the least costs of the able, least first, equal ones in order."""
    room, step_s, ratio = kept
    wait_s, work_s, saved = terms[WAIT], terms[WORK], terms[SAVED]
    np.add(backlog_s, ahead_s, out=wait_s) if ahead_s.size else np.copyto(wait_s, backlog_s)
    work_s[:] = cold_s(scale, room, step_s)
    saved.fill(0.0)
    if hits.size:
        warm = (hits > 0.0).nonzero()[0]
        cold = work_s.take(warm)
        saves = saved_s(scale, hits.take(warm), p_hit.take(warm), cold, room.take(warm), step_s.take(warm))
        saved[warm] = saves
        work_s[warm] = cold - saves
    use = kv_use(scale, kv_held, kv_total)
    if scale.kv_use_typical == scale.kv_use_typical:
        use = np.where(np.isnan(use), scale.kv_use_typical, use)
    kv_s = crowding_s(use, scale.kv_lambda_s)
    if most(use) > scale.kv_knee:
        kv_s += overfull_s(use, scale.kv_knee, scale.kv_slope_s)
    predicted_s = wait_s + work_s
    ttft_s = predicted_s + bias_s(scale, wait_s) if scale.bias_s else predicted_s
    cost = cost_s(scale, ratio, predicted_s, ttft_s, work_s, kv_s)
    if scale.decode_price_s:
        cost += scale.decode_price_s * decoding
    if surcharge.size:
        cost += surcharge * ttft_s
    if pace_s.size:
        cost += pace_s
    terms[COST], terms[TTFT], terms[RATIO], terms[KV], terms[KV_USE] = cost, ttft_s, ratio, kv_s, use
    slots = least_of(np.where(able, cost, np.inf) if able.size else cost, len(least))
    if able.size:
        slots = slots[able[slots]]
    least[: len(slots)] = slots
    return len(slots), most(wait_s), most(ttft_s)


def one_by_one(
    scale: Scale,
    backlog_s: Floats,
    ahead_s: Floats,
    kept: Floats,
    hits: Floats,
    p_hit: Floats,
    kv_held: Floats,
    kv_total: Floats,
    decoding: Floats,
    surcharge: Floats,
    pace_s: Floats,
    able: Flags,
    terms: Floats,
    least: Slots,
) -> Found:
    """The same, an instance at a time, to be compiled."""
    room, step_s, ratios = kept[ROOM], kept[STEP], kept[KEPT_RATIO]
    cost, ttft_s, wait_s, work_s = terms[COST], terms[TTFT], terms[WAIT], terms[WORK]
    saved, ratio, kv_s, use = terms[SAVED], terms[RATIO], terms[KV], terms[KV_USE]
    for slot in range(len(backlog_s)):
        wait_s[slot] = backlog_s[slot] + ahead_s[slot] if ahead_s.size else backlog_s[slot]
        work_s[slot] = cold_s(scale, room[slot], step_s[slot])
        saved[slot] = 0.0
    if hits.size:
        for slot in range(len(hits)):
            if hits[slot] > 0.0:
                saved[slot] = saved_s(scale, hits[slot], p_hit[slot], work_s[slot], room[slot], step_s[slot])
                work_s[slot] -= saved[slot]
    for slot in range(len(cost)):
        its_use = kv_use(scale, kv_held[slot], kv_total[slot])
        use[slot] = scale.kv_use_typical if np.isnan(its_use) else its_use
        kv_s[slot] = crowding_s(use[slot], scale.kv_lambda_s) + overfull_s(use[slot], scale.kv_knee, scale.kv_slope_s)
        predicted_s = wait_s[slot] + work_s[slot]
        ttft_s[slot] = predicted_s + bias_s(scale, wait_s[slot]) if scale.bias_s else predicted_s
        ratio[slot] = ratios[slot]
        cost[slot] = cost_s(scale, ratio[slot], predicted_s, ttft_s[slot], work_s[slot], kv_s[slot])
        cost[slot] += scale.decode_price_s * decoding[slot]
    for slot in range(len(surcharge)):
        cost[slot] += surcharge[slot] * ttft_s[slot]
    for slot in range(len(pace_s)):
        cost[slot] += pace_s[slot]
    found, below_s, most_wait_s, most_ttft_s = 0, np.inf, -np.inf, -np.inf
    for slot in range(len(cost)):
        most_wait_s, most_ttft_s = max(most_wait_s, wait_s[slot]), max(most_ttft_s, ttft_s[slot])
        if not cost[slot] < below_s or (able.size and not able[slot]):
            continue
        found = min(found + 1, len(least))
        place = found - 1
        while place > 0 and cost[slot] < cost[least[place - 1]]:
            least[place] = least[place - 1]
            place -= 1
        least[place] = slot
        if found == len(least):
            below_s = cost[least[-1]]
    return found, most_wait_s, most_ttft_s


RUN = 64  # slots, evenly apart, whose least tells first how small the least of all are
SORTED_MAX = 512  # costs that are sorted faster than they are sifted


def least_of(cost_s: Floats, number: int) -> Slots:
    """The slots of so many least costs, least first; equal costs in their order."""
    if len(cost_s) <= max(SORTED_MAX, RUN * number):
        return cost_s.argsort(kind="stable")[:number]
    runs = len(cost_s) // RUN
    least = np.minimum.reduce(cost_s[: runs * RUN].reshape(RUN, runs), axis=0)
    least.partition(number - 1)
    slots: Slots = (cost_s <= least[number - 1]).nonzero()[0]  # as many at least: each run has one
    order = cost_s.take(slots).argsort(kind="stable")[:number]
    return slots.take(order)


def _sample() -> tuple[object, ...]:
    one, kept = np.ones(1), np.ones((3, 1))
    alike = (one,) * 7
    return (
        Scale(*[1.0] * len(Scale._fields)),
        one,
        one,
        kept,
        *alike,
        NOBODY,
        np.ones((TERMS, 1)),
        np.zeros(1, np.intp),
    )


weighed = Twin(by_arrays, one_by_one, sample=_sample, formulas=FORMULAS)
