"""Summary: what one site tells the others about its pools.

Absolute headroom, never averages: a site of 2 instances at the mean use of one of 200 must not attract as much. Only
finite numbers leave: what an instance doesn't know is left out or taken as its pool's mean, and an idle site is a
valid site with all its headroom.
"""

from collections.abc import Mapping, Sequence

from msgspec import msgpack
from msgspec.structs import replace

from tokenfleet.core.policy import Policy
from tokenfleet.core.predict.rate import prefill_tokens_per_s
from tokenfleet.core.records import PoolSummary, SiteSummary, Vector
from tokenfleet.core.tokenpilot.known import known
from tokenfleet.core.view import InstanceView, PoolView

SUMMARY_BYTES_MAX = 8 * 1024  # the topic is read by every decide replica of every site
WAITS_MAX = 64
WAITS_MIN = 4  # fewer lose the shape that replay needs; then whole pools are left out instead
GATEWAYS_MAX = 16


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
        _summary(revision, pool, price_per_hour=price_per_hour, attainment=known((attainment or {}).get(pool.pool)))
        for pool in pools
        for revision in _by_revision(pool)
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


def thinned(waits_s: Sequence[float], most: int) -> tuple[float, ...]:
    """At most `most` of the waits, least first: the least itself and the others evenly spaced by rank."""
    if len(waits_s) <= most:
        return tuple(waits_s)
    last = len(waits_s) - 1
    return tuple(waits_s[round(i * last / (most - 1))] for i in range(most)) if most > 1 else tuple(waits_s[:1])


def _by_revision(pool: PoolView) -> list[tuple[str, list[InstanceView]]]:
    """Instances by model digest, in the order of the digests; one empty group for an empty pool."""
    groups: dict[str, list[InstanceView]] = {}
    for instance in pool.instances:
        groups.setdefault(instance.model_digest, []).append(instance)
    return sorted(groups.items()) or [("", [])]


def _summary(
    revision: tuple[str, list[InstanceView]], pool: PoolView, *, price_per_hour: float, attainment: float | None
) -> PoolSummary:
    digest, instances = revision
    ready = [i for i in instances if i.availability == "ready"]
    trusted = [i for i in ready if not i.suspect]
    serving = trusted or ready  # all suspect: they are still all there is, and `ready` = 0 tells it
    waits_s = sorted(wait_s for i in serving if (wait_s := known(i.backlog_s)) is not None)
    rate = prefill_tokens_per_s(pool.coefficients, budget_tokens=pool.budget_tokens)
    return PoolSummary(
        pool=pool.pool,
        model=pool.model,
        model_digest=digest,
        engine=serving[0].engine if serving else "vllm",
        context_max_tokens=max((i.context_max_tokens for i in serving), default=0),
        endpoints=len(instances),
        ready=len(trusted),
        warming=sum(i.availability == "starting" for i in instances),
        draining=sum(i.availability == "draining" for i in instances),
        suspect=len(ready) - len(trusted),
        prefill=Vector(capacity=rate * len(serving), used=0.0, queued=float(sum(i.queued_tokens for i in serving))),
        kv=_kv(serving),
        seats=Vector(
            capacity=float(pool.seats_max * len(serving)),
            used=sum(i.decoding + (known(i.foreign) or 0.0) for i in serving),
            queued=float(sum(i.queued for i in serving)),
        ),
        waits_s=thinned(waits_s, WAITS_MAX),
        decoding=_mean([float(i.decoding) for i in serving]),
        context_tokens=_mean([tokens for i in serving if (tokens := known(i.context_tokens)) is not None]),
        price_per_hour=price_per_hour,
        attainment=attainment,
    )


def _kv(serving: Sequence[InstanceView]) -> Vector:
    """KV tokens; an instance of unknown size counts as the mean of the known ones. Capacity 0: none is known."""
    known_total = [total for i in serving if (total := known(i.kv_total_tokens))]
    return Vector(
        capacity=_mean(known_total) * len(serving), used=sum((known(i.kv_held_tokens) or 0.0) for i in serving)
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


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
