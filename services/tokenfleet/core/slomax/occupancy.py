"""Occupancy: what part of a pool is in use, by whom, and what part would one more request take?

An instance is used up when one of three is: the time per output token that guarded requests are promised, once all that
it was given decodes; their time to first token, by its backlog; its KV memory. The greatest of the three counts.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from tokenfleet.core.columns import Floats
from tokenfleet.core.policy import RequestClass
from tokenfleet.core.pool import PoolView

REQUEST_MAX = 0.5  # the longest prompts would else run in an empty pool alone


class Promise(Struct, frozen=True, kw_only=True):
    """What the guarded `classes` of a policy are promised at least: time per output token, and to the first."""

    classes: frozenset[str]
    tpot_s: float
    ttft_s: float


class Occupancy(Struct, frozen=True, kw_only=True):
    """Parts of a pool in [0, 1]: `guarded` and `others` by who uses it, `request` what one more would take."""

    guarded: float
    others: float
    request: float


def promise_of(classes: Mapping[str, RequestClass]) -> Promise | None:
    """None where no guarded class is promised a time per output token and one to its first."""
    guarded = {name: terms for name, terms in classes.items() if terms.queue.role == "guarded"}
    tpots_s = [terms.tpot_s for terms in guarded.values() if terms.tpot_s is not None]
    ttfts_s = [terms.ttft_s for terms in guarded.values() if terms.ttft_s is not None]
    if not tpots_s or not ttfts_s:
        return None
    return Promise(classes=frozenset(guarded), tpot_s=min(tpots_s), ttft_s=min(ttfts_s))


def seat_of(pool: PoolView, promise: Promise, tokens: float) -> float:
    """The part of an instance that a sequence of so many tokens takes while it decodes."""
    c = pool.coefficients
    return min((c.a_s + c.d_s * tokens) / _batch_max_s(pool, promise), 1.0)


def occupancy_of(pool: PoolView, promise: Promise, *, tokens: float, work_s: float) -> Occupancy:
    """Of the usable instances, of which there must be one, with a request of so many KV tokens and so much prefill."""
    columns, c = pool.columns, pool.coefficients
    usable = columns.usable()
    context = np.nan_to_num(columns.context_tokens) + columns.queued_tokens
    batch_s = np.maximum(c.a_s * columns.open - c.w_min_s, 0.0) + c.d_s * context
    kv_total = np.nan_to_num(columns.fixed.kv_total, nan=np.inf)
    parts = (batch_s / _batch_max_s(pool, promise), columns.backlog_s / promise.ttft_s, columns.kv_held / kv_total)
    used = np.minimum(np.nan_to_num(np.fmax.reduce(parts)), 1.0)
    share = _guarded_share(pool, promise)
    needs = max(seat_of(pool, promise, tokens), work_s / promise.ttft_s, tokens / float(kv_total[usable].min()))
    return Occupancy(
        guarded=float((used * share)[usable].mean()),
        others=float((used * (1.0 - share))[usable].mean()),
        request=min(needs / int(usable.sum()), REQUEST_MAX),
    )


def _batch_max_s(pool: PoolView, promise: Promise) -> float:
    """What the sequences of a batch may add to an iteration."""
    c = pool.coefficients
    return max(promise.tpot_s - c.c0_s - c.w_min_s, 1e-3 * promise.tpot_s)


def _guarded_share(pool: PoolView, promise: Promise) -> Floats:
    """The part of each instance's requests that is guarded."""
    columns = pool.columns
    running = sum((each for name, each in columns.classes.items() if name in promise.classes), np.zeros(len(columns)))
    return np.minimum(running / np.maximum(columns.open, 1.0), 1.0)
