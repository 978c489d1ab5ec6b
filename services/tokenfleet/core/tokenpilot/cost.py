"""Cost: what it would cost, in seconds, to send this request to each instance.

J = wait + work + bias + κ·margin + μ·work + KV pressure + decode interference + operator's weight.
All instances at once: every term is an array over the pool's slots.
"""

import math

import numpy as np
from msgspec import Struct

from tokenfleet.core.columns import AGE_NORMAL_S, SECONDS_MAX, Columns, Flags, Floats
from tokenfleet.core.known import known
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import COMPUTED_TOKENS_MIN, prefill_work_s, uncached_tokens
from tokenfleet.core.tokenpilot.kernel import (
    COST,
    KEPT_RATIO,
    NOBODY,
    NOTHING,
    ROOM,
    STEP,
    TERMS,
    TTFT,
    WAIT,
    Scale,
    crowding_s,
    overfull_s,
    prefill_s,
    weighed,
)

AGE_MAX_S = 10.0  # beyond, an instance is suspect anyway; also stands for an unknown age


class Costs(Struct, frozen=True):
    """The terms of all instances, good until the same pool is weighed again.

    They are finite; ttft and cost are ≥ 0, the bias (cut where the wait is shorter) may be negative. `terms` has a row
    for each of COST to KV_USE (core.tokenpilot.kernel), so that all of a few instances are looked up at once. `saved`
    are the expected seconds that the cache takes off the work, `ratio` is the p90 of the prediction's relative error,
    `kv_use` the share of KV in use once the request is there, the pool's typical one where unknown. `pace_s` is what
    pacing adds, None where classes don't share. `least` are the slots of the least costs of the able, least first,
    equal ones in the order of their names; `all_least` says that they are all of the able.
    """

    terms: Floats
    bias_s: float
    reuse_price: float
    least: list[int]
    all_least: bool
    most_wait_s: float
    most_ttft_s: float
    pace_s: Floats | None = None

    @property
    def cost_s(self) -> Floats:
        return self.terms[COST]

    @property
    def ttft_s(self) -> Floats:
        return self.terms[TTFT]

    @property
    def wait_s(self) -> Floats:
        return self.terms[WAIT]


def weigh(
    prompt_tokens: int,
    pool: PoolView,
    weights: TokenPilotPolicy,
    able: Flags | None,
    *,
    output_q50: float,
    ahead_s: Floats | None = None,
    held_s: float = 0.0,
    pace_s: Floats | None = None,
) -> Costs:
    """Of a prompt with a likely (q50) output. `able` are the instances that may serve it, None for all: the pool's
    mean and typical values are theirs. `ahead_s` is held work that goes first on each, `held_s` all that is held, per
    instance; `pace_s` is added to the cost."""
    columns, c, bias_s = pool.columns, pool.coefficients, pool.calibration.bias_s
    fixed, size = columns.fixed, len(columns)
    if not columns.kept.terms.size:
        columns.kept.terms = np.empty((TERMS, size))
    terms, least = columns.kept.terms, np.empty(weights.candidates_kept + 1, np.intp)
    cold = float(uncached_tokens(prompt_tokens, 0))
    load_tokens = prompt_tokens + (known(output_q50) or 0.0)
    price = reuse_price(columns.behind_s if able is None else columns.behind_s[able], held_s, weights)
    scale = Scale(  # by place: a call that names so many fields takes five times as long
        float(prompt_tokens),
        cold,
        max(c.w_min_s, c.a_s * cold) + c.b_s * cold * cold / 2,
        float(max(min(prompt_tokens, COMPUTED_TOKENS_MIN), 1)),
        c.w_min_s,
        c.a_s,
        c.b_s,
        float(load_tokens),
        np.nan if columns.whole else _typical_kv_use(columns, load_tokens, able),
        weights.kv_lambda_s,
        weights.kv_knee,
        weights.kv_slope_s,
        bias_s if abs(bias_s) < SECONDS_MAX else 0.0,
        weights.margin_weight,
        price,
        weights.decode_price_s,
    )
    found, most_wait_s, most_ttft_s = weighed.of(size)(
        scale,
        columns.backlog_s if not columns.unsure else _backlog_s(prompt_tokens, pool, able),
        NOTHING if ahead_s is None else ahead_s,
        _kept(pool) if columns.whole and not columns.aged else _grown(pool, able),
        NOTHING if columns.hits is None or not prompt_tokens else columns.hits,
        columns.p_hit,
        columns.kv_held,
        fixed.kv_total,
        columns.decoding,
        NOTHING if fixed.surcharge is None else fixed.surcharge,
        NOTHING if pace_s is None else pace_s,
        NOBODY if able is None else able,
        terms,
        least,
    )
    return Costs(
        terms,
        scale.bias_s,
        price,
        least[:found].tolist(),
        found < len(least),
        most_wait_s,
        most_ttft_s,
        pace_s,
    )


def reuse_price(behind_s: Floats, held_s: float, weights: TokenPilotPolicy) -> float:
    """μ, what a second of uncached work costs the others: min(max, base + slope · (mean work that queues + held)).

    Queued is what lies behind the prompts that are computed now: a long prompt on an instance where nobody waits is no
    congestion. As that grows, reuse is worth more than a short wait, and reuse is what lets an overloaded fleet catch
    up.
    """
    queued_s = float(np.add.reduce(behind_s)) / len(behind_s)
    return min(weights.reuse_max, weights.reuse_base + weights.reuse_slope_per_s * (queued_s + held_s))


def _backlog_s(prompt_tokens: int, pool: PoolView, able: Flags | None) -> Floats:
    """The backlog; where it is unknown the pool's p75, and one never heard waits at least that: not idle for all we
    know."""
    columns = pool.columns
    cold_s = prefill_work_s(
        uncached_tokens(prompt_tokens, 0),
        0,
        decoding=0,
        context_tokens=0.0,
        coefficients=pool.coefficients,
        budget_tokens=pool.budget_tokens,
    )
    backlog_s = columns.backlog_s.copy()
    typical_s = upper_quartile(backlog_s if able is None else backlog_s[able], otherwise=cold_s)
    np.fmax(backlog_s, typical_s, out=backlog_s, where=np.isnan(columns.age_s) | np.isnan(backlog_s))
    return backlog_s


def dense_work_s(prompts: Floats, hits: Floats, pool: PoolView) -> Floats:
    """Expected work of several prompts (their tokens as one column) on every instance; `hits` are their cached tokens,
    a row a prompt."""
    kept, c = _kept(pool), pool.coefficients
    room, step_s = kept[ROOM], _step_s(pool, kept, None)
    least = np.maximum(np.minimum(prompts, COMPUTED_TOKENS_MIN), 1.0)
    cached = np.minimum(hits, prompts)
    cold_s = prefill_s(np.maximum(prompts, 1.0), np.zeros_like(prompts), room, step_s, c.w_min_s, c.a_s, c.b_s)
    warm_s = prefill_s(np.maximum(prompts - cached, least), cached, room, step_s, c.w_min_s, c.a_s, c.b_s)
    chance = np.where(cached > 0.0, pool.columns.p_hit, 0.0)
    work_s = cold_s - chance * np.maximum(cold_s - warm_s, 0.0)
    return np.minimum(work_s, SECONDS_MAX)


def _step_s(pool: PoolView, kept: Floats, able: Flags | None) -> Floats:
    """What an iteration costs on each instance without the prompt's tokens."""
    if pool.columns.whole:
        return kept[STEP]
    context_tokens = _typical_where_unknown(pool.columns.context_tokens, able, otherwise=0.0)
    return pool.coefficients.d_s * context_tokens + pool.coefficients.c0_s


def _kept(pool: PoolView) -> Floats:
    """Of each instance: prompt tokens that an iteration takes beside the decodes, what it costs without them, and the
    ratio while its telemetry is young. Made anew where something changed since the last request.

    The ratio is how far off a prediction may be (p90), as a share of it, by whether anything waits there. A queue never
    makes a prediction surer, whatever was learned: the queued ratio is at least the idle one.
    """
    columns, c, kept = pool.columns, pool.coefficients, pool.columns.kept
    idle, queued = known(pool.calibration.margin_idle) or 0.0, known(pool.calibration.margin_queued) or 0.0
    of = (c, pool.budget_tokens, idle, queued)
    if kept.of != of:
        kept.of, kept.rows = of, np.empty((3, len(columns)))
        np.maximum(pool.budget_tokens - columns.decoding, 1.0, out=kept.rows[ROOM])
        np.add(c.d_s * columns.context_tokens, c.c0_s, out=kept.rows[STEP])
        kept.rows[KEPT_RATIO] = np.where(columns.queued > 0.0, max(idle, queued), idle)
    else:
        for slot in kept.changed:
            kept.rows[ROOM, slot] = max(pool.budget_tokens - columns.decoding.item(slot), 1.0)
            kept.rows[STEP, slot] = c.d_s * columns.context_tokens.item(slot) + c.c0_s
            kept.rows[KEPT_RATIO, slot] = max(idle, queued) if columns.queued.item(slot) > 0.0 else idle
    kept.changed.clear()
    return kept.rows


def _grown(pool: PoolView, able: Flags | None) -> Floats:
    """The same where something is unknown or old: a ratio grows with the age of what it rests on, × 1 more a second
    beyond the normal."""
    columns, kept = pool.columns, _kept(pool).copy()
    kept[STEP] = _step_s(pool, kept, able)
    if columns.aged:
        old_s = np.where(np.isnan(columns.age_s), AGE_MAX_S, np.minimum(columns.age_s, AGE_MAX_S)) - AGE_NORMAL_S
        kept[KEPT_RATIO] *= 1.0 + np.maximum(old_s, 0.0)
    return kept


def _typical_kv_use(columns: Columns, load_tokens: float, able: Flags | None) -> float:
    use = (columns.kv_held + load_tokens) / np.maximum(columns.fixed.kv_total, 1.0)
    return upper_quartile(use if able is None else use[able], otherwise=0.0)


def kv_pressure_s(use: Floats, weights: TokenPilotPolicy) -> Floats:
    """slope · max(0, use − knee) + λ · use / (1 − use): the nearer KV is to full, the likelier a preemption."""
    return crowding_s(use, weights.kv_lambda_s) + overfull_s(use, weights.kv_knee, weights.kv_slope_s)


def _typical_where_unknown(values: Floats, able: Flags | None, *, otherwise: float) -> Floats:
    unknown = np.isnan(values)
    if not unknown.any():
        return values
    typical = upper_quartile(values if able is None else values[able], otherwise=otherwise)
    return np.where(unknown, typical, values)


def upper_quartile(values: Floats, *, otherwise: float) -> float:
    """The nearest-rank p75 of the known values: what is assumed of an instance that says nothing, so never zero load
    while the others work. `otherwise` when none is known."""
    have = np.sort(values[~np.isnan(values)])
    return float(have[math.ceil(0.75 * len(have)) - 1]) if len(have) else otherwise
