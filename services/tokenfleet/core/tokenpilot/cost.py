"""Cost: what it would cost, in seconds, to send this request to each instance.

J = wait + work + bias + κ·margin + μ·work + KV pressure + decode interference + operator's weight.
All instances at once: every term is an array over the pool's slots.
"""

import math

import numpy as np
from msgspec import Struct

from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.columns import AGE_NORMAL_S, SECONDS_MAX, Columns, Flags, Floats, most
from tokenfleet.core.known import known
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import COMPUTED_TOKENS_MIN, prefill_work_s, uncached_tokens

AGE_MAX_S = 10.0  # beyond, an instance is suspect anyway; also stands for an unknown age
KV_USE_MAX = 0.98  # keeps the pressure term finite at full KV
COST, TTFT, WAIT, WORK, SAVED, RATIO, KV, KV_USE = range(8)  # rows of the terms
TERMS = 8
ROOM, STEP, KEPT_RATIO = range(3)  # rows of what is kept from one request to the next


class Costs(Struct, frozen=True):
    """The terms of all instances, good until the same pool is weighed again.

    They are finite; ttft and cost are ≥ 0, the bias (one for all unless it must be cut) may be negative. `terms` has a
    row for each of COST to KV_USE, so that all of a few instances are looked up at once. `saved` are the expected
    seconds that the cache takes off the work, `ratio` is the p90 of the prediction's relative error, `kv_use` the share
    of KV in use once the request is there, the pool's typical one where unknown. `pace_s` is what pacing added, None
    where classes don't share.
    """

    terms: Floats
    bias_s: Floats | float
    reuse_price: float
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

    @property
    def work_s(self) -> Floats:
        return self.terms[WORK]

    @property
    def ratio(self) -> Floats:
        return self.terms[RATIO]


def weigh(
    prompt_tokens: int,
    pool: PoolView,
    weights: TokenPilotPolicy,
    able: Flags | None,
    *,
    output_q50: float,
    ahead_s: Floats | None = None,
    held_s: float = 0.0,
) -> Costs:
    """Of a prompt with a likely (q50) output. `able` are the instances that may serve it, None for all: the pool's
    mean and typical values are theirs. `ahead_s` is held work that goes first on each, `held_s` all that is held, per
    instance."""
    columns, calibration = pool.columns, pool.calibration
    if not columns.kept.terms.size:
        columns.kept.terms = np.empty((TERMS, len(columns)))
    terms = columns.kept.terms
    cost_s, ttft_s, wait_s, work_s, saved_s, ratio, kv_s, kv_use = terms
    _wait_s(prompt_tokens, pool, able, out=wait_s)
    if ahead_s is not None:
        wait_s += ahead_s
    kept = _kept(pool)
    _work(prompt_tokens, pool, kept, able, out=work_s, saved_s=saved_s)
    price = reuse_price(columns.behind_s if able is None else columns.behind_s[able], held_s, weights)
    _kv_use(columns, prompt_tokens + (known(output_q50) or 0.0), able, out=kv_use)
    kv_pressure_s(kv_use, weights, out=kv_s)
    _grow(columns, kept[KEPT_RATIO], out=ratio)
    np.add(wait_s, work_s, out=ttft_s)
    np.multiply(weights.margin_weight, ratio, out=cost_s)
    cost_s *= ttft_s
    # What was learned to come earlier than predicted is taken from the wait: no prompt beats its own prefill.
    bias = calibration.bias_s if abs(calibration.bias_s) < SECONDS_MAX else 0.0
    bias_s = bias if bias >= 0.0 else np.maximum(bias, -wait_s)
    if bias:
        ttft_s += bias_s
    cost_s += ttft_s
    cost_s += price * work_s
    cost_s += kv_s
    if weights.decode_price_s:
        cost_s += weights.decode_price_s * columns.decoding
    if columns.fixed.surcharge is not None:
        cost_s += columns.fixed.surcharge * ttft_s
    return Costs(terms, bias_s, price)


def reuse_price(behind_s: Floats, held_s: float, weights: TokenPilotPolicy) -> float:
    """μ, what a second of uncached work costs the others: min(max, base + slope · (mean work that queues + held)).

    Queued is what lies behind the prompts that are computed now: a long prompt on an instance where nobody waits is no
    congestion. As that grows, reuse is worth more than a short wait, and reuse is what lets an overloaded fleet catch
    up.
    """
    queued_s = float(np.add.reduce(behind_s)) / len(behind_s)
    return min(weights.reuse_max, weights.reuse_base + weights.reuse_slope_per_s * (queued_s + held_s))


def _wait_s(prompt_tokens: int, pool: PoolView, able: Flags | None, *, out: Floats) -> None:
    """The backlog; where it is unknown the pool's p75, and one never heard waits at least that: not idle for all we
    know."""
    columns = pool.columns
    out[:] = columns.backlog_s
    if not columns.unsure:
        return
    cold_s = prefill_work_s(
        uncached_tokens(prompt_tokens, 0),
        0,
        decoding=0,
        context_tokens=0.0,
        coefficients=pool.coefficients,
        budget_tokens=pool.budget_tokens,
    )
    typical_s = upper_quartile(out if able is None else out[able], otherwise=cold_s)
    np.fmax(out, typical_s, out=out, where=np.isnan(columns.age_s) | np.isnan(out))


def _work(
    prompt_tokens: int, pool: PoolView, kept: Floats, able: Flags | None, *, out: Floats, saved_s: Floats
) -> None:
    """Expected work, and what the cache saves of it.

    The prefix is there with chance p: p · work(hit) + (1 − p) · work(0). So a warm instance beats an idle cold one
    iff p · seconds saved > extra wait + extra margin.
    """
    columns, c = pool.columns, pool.coefficients
    room, step_s = kept[ROOM], _step_s(pool, kept, able)
    cold = float(uncached_tokens(prompt_tokens, 0))
    np.divide(cold, room, out=out)
    np.ceil(out, out=out)
    out *= step_s
    out += max(c.w_min_s, c.a_s * cold) + c.b_s * cold * cold / 2
    saved_s.fill(0.0)
    if columns.hits is None or not prompt_tokens:
        return
    warm = (columns.hits > 0.0).nonzero()[0]
    tokens = columns.hits.take(warm)
    np.minimum(tokens, prompt_tokens, out=tokens)
    left = prompt_tokens - tokens
    np.maximum(left, max(min(prompt_tokens, COMPUTED_TOKENS_MIN), 1), out=left)
    cold_s = out.take(warm)
    saved = cold_s - _prefill_s(left, tokens, room.take(warm), step_s.take(warm), c)
    np.maximum(saved, 0.0, out=saved)
    saved *= columns.p_hit.take(warm)
    saved_s[warm] = saved
    out[warm] = cold_s - saved


def dense_work_s(prompts: Floats, hits: Floats, pool: PoolView) -> Floats:
    """Expected work of several prompts (their tokens as one column) on every instance; `hits` are their cached tokens,
    a row a prompt."""
    kept = _kept(pool)
    room, step_s = kept[ROOM], _step_s(pool, kept, None)
    least = np.maximum(np.minimum(prompts, COMPUTED_TOKENS_MIN), 1.0)
    cached = np.minimum(hits, prompts)
    cold_s = _prefill_s(np.maximum(prompts, 1.0), np.zeros_like(prompts), room, step_s, pool.coefficients)
    warm_s = _prefill_s(np.maximum(prompts - cached, least), cached, room, step_s, pool.coefficients)
    chance = np.where(cached > 0.0, pool.columns.p_hit, 0.0)
    work_s = cold_s - chance * np.maximum(cold_s - warm_s, 0.0)
    return np.minimum(work_s, SECONDS_MAX)


def _step_s(pool: PoolView, kept: Floats, able: Flags | None) -> Floats:
    """What an iteration costs on each instance without the prompt's tokens."""
    if pool.columns.whole:
        return kept[STEP]
    context_tokens = _typical_where_unknown(pool.columns.context_tokens, able, otherwise=0.0)
    return pool.coefficients.d_s * context_tokens + pool.coefficients.c0_s


def _prefill_s(left: Floats, cached: Floats, room: Floats, step_s: Floats, c: Coefficients) -> Floats:
    """predict.work.prefill_work_s for arrays: `left` tokens to compute behind `cached` ones."""
    return np.ceil(left / room) * step_s + np.maximum(c.w_min_s, c.a_s * left) + c.b_s * left * (cached + left / 2)


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


def _grow(columns: Columns, ratio: Floats, *, out: Floats) -> None:
    """The ratio with the age of what it rests on: × 1 more a second beyond the normal."""
    if not columns.aged:
        out[:] = ratio
        return
    old_s = np.where(np.isnan(columns.age_s), AGE_MAX_S, np.minimum(columns.age_s, AGE_MAX_S)) - AGE_NORMAL_S
    np.multiply(ratio, 1.0 + np.maximum(old_s, 0.0), out=out)


def _kv_use(columns: Columns, load_tokens: float, able: Flags | None, *, out: Floats) -> None:
    np.add(columns.kv_held, load_tokens, out=out)
    if columns.whole:
        out /= columns.fixed.kv_total
    else:
        out /= np.maximum(columns.fixed.kv_total, 1.0)
        out[:] = _typical_where_unknown(out, able, otherwise=0.0)


def kv_pressure_s(use: Floats, weights: TokenPilotPolicy, *, out: Floats | None = None) -> Floats:
    """slope · max(0, use − knee) + λ · use / (1 − use): the nearer KV is to full, the likelier a preemption."""
    fullest = most(use)
    capped = use if fullest <= KV_USE_MAX else np.minimum(use, KV_USE_MAX)
    pressure_s = np.subtract(1.0, capped, out=out)
    np.divide(capped, pressure_s, out=pressure_s)
    pressure_s *= weights.kv_lambda_s
    if fullest > weights.kv_knee:
        pressure_s += weights.kv_slope_s * np.maximum(0.0, np.minimum(use, 2.0) - weights.kv_knee)
    return pressure_s


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
