"""Pacing: which instance of a pool may take which class now, and what it would cost the requests that decode there.

Prefill and decode share an engine's iterations, so work given to an instance stretches the tokens of all who decode on
it. The forecast is the mean time that a token will have taken once the work at hand and the new one are through.
Reserving and filling work is gated by it, guarded work is steered by it.
"""

import numpy as np
from msgspec import Struct

from tokenfleet.core.columns import Flags, Floats
from tokenfleet.core.policy import ClassQueue, PacingPolicy, Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import decode_iteration_s

EXCLUDED_S = np.inf


class Pace(Struct, frozen=True, kw_only=True):
    """One pool as pacing sees it now, by slot of its columns.

    `spent_s` and `iterations` are of the last window, `step_s` is the time of one full iteration, `guarded_tpot_s` the
    time per output token that is guarded (None: nobody's). `guarded` and `prefills` count the guarded requests and the
    reserving ones without a first token, `late_s` is how late first tokens are heard of. `reserved` are instances kept
    free for reserving work, None for none.
    """

    pool: PoolView
    spent_s: Floats
    iterations: Floats
    step_s: float
    guarded_tpot_s: float | None
    allowance: float
    guarded: Floats
    prefills: Floats
    late_s: float = 0.0
    reserved: Flags | None = None

    def forecast_s(self, work_s: Floats | float, iterations: Floats | float) -> Floats:
        """Mean seconds per token of those who decode, once the backlog and `work_s` in so many `iterations` are done;
        0 where nobody decodes.

        (Δt + W + w) / (ΔC + W/t_f + ceil(u/B)): the window's time and iterations, the backlog at full iterations, and
        the new work.
        """
        backlog_s = self.pool.columns.backlog_s
        taken = self.iterations + backlog_s / self.step_s + iterations
        spent_s = self.spent_s + backlog_s + work_s
        forecast_s = np.divide(spent_s, taken, out=np.zeros(len(taken)), where=taken > 0.0)
        forecast_s[self.pool.columns.decoding <= 0.0] = 0.0
        return forecast_s


def pace_of(
    pool: PoolView,
    policy: Policy,
    *,
    recent: tuple[Floats, Floats],
    allowance: float,
    late_s: float = 0.0,
) -> Pace:
    """The pool now. `recent` are seconds and iterations of each instance (Iterations.recent); where they are unknown
    the forecast assumes the pace of its decodes alone."""
    columns, c = pool.columns, pool.coefficients
    spent_s, iterations = recent
    if np.isnan(spent_s).any():
        alone_s = np.array(
            [
                decode_iteration_s(decoding=decoding, context_tokens=context, coefficients=c)
                for decoding, context in zip(columns.decoding.tolist(), columns.context_tokens.tolist(), strict=True)
            ]
        )
        window_s = policy.slomax.pacing.window_s
        known = ~np.isnan(spent_s)
        spent_s = np.where(known, spent_s, window_s)
        iterations = np.where(known, iterations, window_s / np.maximum(alone_s, c.c0_s))
    none = np.zeros(len(columns))
    guarded, prefills = none, none
    tpots_s: list[float] = []
    for name, terms in policy.classes.items():
        if terms.queue.role == "guarded":
            guarded = guarded + columns.classes.get(name, none)
            tpots_s += [] if terms.tpot_s is None else [terms.tpot_s]
        elif terms.queue.role == "reserving":
            prefills = prefills + columns.classes_queued.get(name, none)
    return Pace(
        pool=pool,
        spent_s=spent_s,
        iterations=iterations,
        step_s=c.c0_s + max(c.w_min_s, c.a_s * pool.budget_tokens),
        guarded_tpot_s=min(tpots_s, default=None),
        allowance=allowance,
        guarded=guarded,
        prefills=prefills,
        late_s=min(late_s, policy.slomax.pacing.late_max_s),
    )


def reserved_of(pace: Pace, waiting: int, terms: PacingPolicy) -> Flags | None:
    """The instances kept from filling work for `waiting` reserving requests: those that will soonest have a gap."""
    number = min(int(len(pace.pool) * terms.reserve_share), waiting)
    if number <= 0:
        return None
    rank = pace.forecast_s(0.0, 0.0) + GUARDED_RANK * pace.guarded + PREFILL_RANK * pace.prefills
    rank[pace.prefills >= 1.0] = EXCLUDED_S
    nearest = rank.argsort(kind="stable")[:number]
    reserved = np.zeros(len(rank), np.bool_)
    reserved[nearest[rank[nearest] < EXCLUDED_S]] = True
    return reserved if reserved.any() else None


GUARDED_RANK, PREFILL_RANK = 0.0003, 0.02  # seconds of forecast that a guarded request and a prefill are worth there


def open_to(
    pace: Pace,
    queue: ClassQueue,
    queued: Floats | None,
    work_s: Floats | float,
    iterations: Floats | float,
    *,
    slack_s: float,
    terms: PacingPolicy,
) -> Flags:
    """The instances that may take a request of the class now. `queued` are its requests there without a first token,
    `slack_s` the time until it must start."""
    columns = pace.pool.columns
    allowed = columns.usable() & (columns.backlog_s <= queue.backlog_max_s + pace.late_s)
    if queue.prefills_max and queued is not None:
        allowed &= queued < queue.prefills_max
    if queue.role == "filling" and pace.reserved is not None:
        allowed &= ~pace.reserved
    if queue.role != "guarded" and pace.guarded_tpot_s is not None:
        share = queue.gate_share
        if queue.role == "reserving":
            share += pace.allowance * max(0.0, 1.0 - slack_s / terms.allowance_slack_s)
        fits = pace.forecast_s(work_s, iterations) <= share * pace.guarded_tpot_s
        fits |= pace.guarded <= 0.0  # nobody is to be guarded there
        allowed &= fits
    return allowed


def has_room(pool: PoolView, terms: RequestClass, request_class: str, kv_tokens: float) -> Flags:
    """The instances where one more of the class, of so many KV tokens, keeps within its bounds; an empty one has room
    for whatever fits into it at all."""
    columns = pool.columns
    room = ~(columns.kv_held + kv_tokens > terms.kv_share_max * columns.fixed.kv_total)  # unknown: room
    room |= columns.open <= 0.0
    if (running := columns.classes.get(request_class)) is not None:
        room &= running < terms.running_max_per_instance
    return room


def price_s(pace: Pace, queue: ClassQueue, work_s: Floats, iterations: Floats, terms: PacingPolicy) -> Floats:
    """What pacing adds to the cost of each instance, in seconds."""
    from_s = queue.steer_from_share * (pace.guarded_tpot_s or 0.0)
    columns = pace.pool.columns
    added_s = queue.steer_weight * np.maximum(pace.forecast_s(work_s, iterations) - from_s, 0.0)
    added_s += queue.per_guarded_s * pace.guarded
    added_s += queue.per_decode_s * columns.decoding
    added_s += queue.per_prefill_s * pace.prefills
    if queue.role == "guarded" and pace.reserved is not None:
        added_s += terms.reserved_price_s * pace.reserved
    return added_s
