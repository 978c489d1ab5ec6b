"""Reserving: what of a pool is kept free for interactive requests where classes have no queues, and from whom?

Interactive are the guarded classes. What they use counts as theirs: the others together leave free what may still come.
Where classes have queues their forecasts do this, where replicas share a book its owner's line does, and who can be
held for an instance that is nearly idle takes nothing from anybody.
"""

from tokenfleet.core.asked import Asked
from tokenfleet.core.credit import book_of
from tokenfleet.core.predict.work import prefill_work_s, uncached_tokens
from tokenfleet.core.records import Entry
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.occupancy import Promise, occupancy_of, promise_of, seat_of
from tokenfleet.core.slomax.reserve import may_start


def kept_free(site: Site, asked: Asked) -> str:
    """Why the request must leave room for interactive ones, in words; empty if it need not. An interactive one is
    counted, so that as much is kept for those to come."""
    policy, pool = asked.policy, asked.pool
    if not policy.slomax.reserve.enabled or asked.paces or asked.turn is not None:
        return ""
    if asked.request.wait_max_s > 0.0 and not site.held.off(policy.tokenpilot, asked.now_s):
        return ""  # it is held until an instance is nearly idle
    promise = promise_of(policy.classes)
    if promise is None or book_of(site, policy, pool) is not None:
        return ""
    work_s, reserve = _work_s(asked), site.reserves.of(asked.request.model)
    if asked.classified.request_class in promise.classes:
        if not asked.request.dry_run and not asked.request.is_retry:
            seat = seat_of(pool, promise, asked.request.prompt_tokens + asked.output_q50)
            reserve.arrived(work_s + asked.output_q50 * promise.tpot_s * seat, asked.now_s)
        return ""
    tokens = asked.request.prompt_tokens + asked.output_q50
    found = occupancy_of(pool, promise, tokens=tokens, work_s=work_s)
    if not found.others:
        return ""  # something of theirs runs at any time, however much interactive there is
    instances = int(pool.columns.usable().sum())
    reserved = reserve.lately(lambda: _left_s(site, asked, promise), instances=instances, now_s=asked.now_s)
    free = 1.0 - found.others - max(found.guarded - reserved.share, 0.0)
    ends_in_s = pool.columns.least_backlog_s + work_s + asked.output_q90 * promise.tpot_s
    if may_start(
        free_share=free,
        needs_share=found.request,
        ends_in_s=ends_in_s,
        reserved=reserved,
        terms=policy.slomax.reserve,
    ):
        return ""
    return f"{max(free, 0.0):.0%} of the pool is free, {reserved.share:.0%} is kept for interactive requests"


def _work_s(asked: Asked) -> float:
    """Its prefill where the most of it is cached, on an instance that does nothing else."""
    hit_tokens = min(asked.pool.columns.most_hit_tokens, asked.request.prompt_tokens)
    return prefill_work_s(
        uncached_tokens(asked.request.prompt_tokens, hit_tokens),
        hit_tokens,
        decoding=0.0,
        context_tokens=0.0,
        coefficients=asked.pool.coefficients,
        budget_tokens=asked.pool.budget_tokens,
    )


def _left_s(site: Site, asked: Asked, promise: Promise) -> list[float]:
    """The times that running work of other classes still needs."""
    running = [
        site.ledger.entry(entry.decision, asked.now_s)
        for entry in site.ledger.entries()
        if entry.model == asked.request.model and entry.request_class not in promise.classes
    ]
    return [
        max((entry.predicted_ttft_s or entry.work_s) + _output_tokens(entry) * promise.tpot_s - entry.age_s, 0.0)
        for entry in running
        if entry is not None
    ]


def _output_tokens(entry: Entry) -> float:
    """The cautious length of its output."""
    cached = entry.placed.hit_tokens if entry.placed is not None else 0
    return max(entry.kv_tokens - entry.uncached_tokens - cached, 0)
