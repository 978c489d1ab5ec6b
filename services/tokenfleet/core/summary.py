"""Summary: what one site tells the others about its pools.

Absolute headroom, never averages: a site of 2 instances at the mean use of one of 200 must not attract as much. Only
finite numbers leave: what an instance doesn't know is left out or taken as its pool's mean, and an idle site is a
valid site with all its headroom.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import msgpack
from msgspec.structs import replace

from tokenfleet.core.columns import AVAILABILITIES, READY, Columns, Floats, Slots
from tokenfleet.core.known import known
from tokenfleet.core.policy import Policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.rate import prefill_tokens_per_s
from tokenfleet.core.records import PoolSummary, SiteSummary, Vector

SUMMARY_BYTES_MAX = 8 * 1024  # the topic is read by every decide replica of every site
WAITS_MAX = 64
WAITS_MIN = 4  # fewer lose the shape that replay needs; then whole pools are left out instead
GATEWAYS_MAX = 16
STARTING, DRAINING = AVAILABILITIES.index("starting"), AVAILABILITIES.index("draining")


def summarise(
    site: str,
    pools: Sequence[PoolView],
    policy: Policy,
    *,
    cluster: str,
    epoch: int,
    n: int,
    period_s: float,
    gateways: Sequence[str],
    attainment: Mapping[str, float] | None = None,
) -> SiteSummary:
    """The site's record number `n` under writer (cluster, epoch): one PoolSummary a model revision.

    A pool without instances is told with 0 endpoints; a model without a pool not at all. `attainment` is the share of
    requests within their service level by pool name, where it is known. At most 8 KiB encoded: waits are thinned
    first, then the pools with the fewest ready instances are left out, which closes them to other sites.
    """
    ages_s = [age_s for pool in pools if (age_s := known(pool.age_s)) is not None]
    price_per_hour = policy.site(site).price_per_instance_hour
    told = [
        summary
        for pool in pools
        for summary in pool_summaries(pool, price_per_hour=price_per_hour, attainment=(attainment or {}).get(pool.pool))
    ]
    whole = SiteSummary(
        site=site,
        cluster=cluster,
        epoch=epoch,
        n=n,
        period_s=period_s,
        age_s=min(ages_s, default=None),
        gateways=tuple(gateways[:GATEWAYS_MAX]),
        pools=tuple(told),
    )
    return _within_size(whole)


def pool_summaries(pool: PoolView, *, price_per_hour: float, attainment: float | None = None) -> list[PoolSummary]:
    """One summary a revision, in the order of the digests; one without endpoints for an empty pool."""
    revisions = pool.columns.labels.by_digest or (("", np.array([], np.intp)),)
    return [
        _summary(digest, slots, pool, price_per_hour=price_per_hour, attainment=known(attainment))
        for digest, slots in revisions
    ]


def thinned(waits_s: Sequence[float], most: int) -> tuple[float, ...]:
    """At most `most` of the waits, least first: the least itself and the others evenly spaced by rank."""
    if len(waits_s) <= most:
        return tuple(waits_s)
    last = len(waits_s) - 1
    return tuple(waits_s[round(i * last / (most - 1))] for i in range(most)) if most > 1 else tuple(waits_s[:1])


def _summary(
    digest: str, slots: Slots, pool: PoolView, *, price_per_hour: float, attainment: float | None
) -> PoolSummary:
    columns = pool.columns
    states = columns.fixed.availability[slots]
    ready = slots[states == READY]
    trusted = ready if columns.suspect is None else ready[~columns.suspect[ready]]
    serving = trusted if len(trusted) else ready  # all suspect: they are still all there is, and `ready` = 0 tells it
    waits_s = columns.backlog_s[serving]
    rate = prefill_tokens_per_s(pool.coefficients, budget_tokens=pool.budget_tokens)
    return PoolSummary(
        pool=pool.pool,
        model=pool.model,
        model_digest=digest,
        engine=columns.labels.engines[int(serving[0])] if len(serving) else "vllm",
        context_max_tokens=int(np.fmax.reduce(columns.fixed.context_max[serving], initial=0.0)),
        endpoints=len(slots),
        ready=len(trusted),
        warming=int(np.count_nonzero(states == STARTING)),
        draining=int(np.count_nonzero(states == DRAINING)),
        suspect=len(ready) - len(trusted),
        prefill=Vector(capacity=rate * len(serving), used=0.0, queued=float(columns.queued_tokens[serving].sum())),
        kv=_kv(columns, serving),
        seats=Vector(
            capacity=float(pool.seats_max * len(serving)),
            used=float((columns.open - columns.queued)[serving].sum()),
            queued=float(columns.queued[serving].sum()),
        ),
        waits_s=thinned(np.sort(waits_s[~np.isnan(waits_s)]).tolist(), WAITS_MAX),
        decoding=_mean(columns.decoding[serving]),
        context_tokens=_mean(columns.context_tokens[serving]),
        price_per_hour=price_per_hour,
        attainment=attainment,
    )


def _kv(columns: Columns, serving: Slots) -> Vector:
    """KV tokens; an instance of unknown size counts as the mean of the known ones. Capacity 0: none is known."""
    return Vector(
        capacity=_mean(columns.fixed.kv_total[serving]) * len(serving),
        used=float(np.nansum(columns.kv_held[serving])),
    )


def _mean(values: Floats) -> float:
    """Of the known ones, 0 without any."""
    have = values[~np.isnan(values)]
    return float(have.mean()) if len(have) else 0.0


def _within_size(summary: SiteSummary) -> SiteSummary:
    most = WAITS_MAX
    while _too_big(summary) and most > WAITS_MIN:
        most //= 2
        thinner = tuple(replace(pool, waits_s=thinned(pool.waits_s, most)) for pool in summary.pools)
        summary = replace(summary, pools=thinner)
    while _too_big(summary) and summary.pools:
        least = min(summary.pools, key=lambda pool: pool.ready)
        summary = replace(summary, pools=tuple(pool for pool in summary.pools if pool is not least))
    return summary


def _too_big(summary: SiteSummary) -> bool:
    return len(msgpack.encode(summary)) > SUMMARY_BYTES_MAX
