"""One site's face to the others: absolute headroom, finite numbers, bounded size."""

import math
from typing import Any

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.rate import prefill_tokens_per_s
from tokenfleet.core.records import PoolSummary, SiteSummary
from tokenfleet.core.summary import SUMMARY_BYTES_MAX, WAITS_MAX, summarise, thinned


def told(*pools: PoolView, **facts: Any) -> SiteSummary:
    known: dict[str, Any] = {"cluster": "k", "epoch": 0, "n": 1, "period_s": 0.5, "gateways": ("g-1",)}
    return summarise("b", pools, POLICY, **(known | facts))


def only(summary: SiteSummary) -> PoolSummary:
    (found,) = summary.pools
    return found


def floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in floats(each)]
    if isinstance(value, list):
        return [number for each in value for number in floats(each)]
    return [value] if isinstance(value, float) else []


def test_headroom_is_absolute_so_a_small_site_at_the_same_mean_attracts_less() -> None:
    small = only(told(pool(*[instance(f"b-{i}", kv_held_tokens=500_000.0) for i in range(2)])))
    large = only(told(pool(*[instance(f"b-{i:03}", kv_held_tokens=500_000.0) for i in range(200)])))
    assert large.kv.capacity - large.kv.used == pytest.approx(100 * (small.kv.capacity - small.kv.used))
    assert large.prefill.capacity == pytest.approx(100 * small.prefill.capacity)
    assert large.seats.capacity == pytest.approx(100 * small.seats.capacity)


def test_prefill_is_the_learned_rate_of_the_serving_instances() -> None:
    view = pool(instance("b-0", queued=2, queued_tokens=9000), instance("b-1", availability="out"))
    summary = only(told(view))
    rate = prefill_tokens_per_s(view.coefficients, budget_tokens=view.budget_tokens)
    assert summary.prefill.capacity == pytest.approx(rate)
    assert summary.prefill.queued == 9000
    assert (summary.endpoints, summary.ready) == (2, 1)


def test_no_endpoints_is_a_state_and_not_zero_load() -> None:
    summary = only(told(pool()))
    assert (summary.endpoints, summary.ready, summary.prefill.capacity, summary.waits_s) == (0, 0, 0.0, ())


def test_each_state_of_an_instance_is_counted_once() -> None:
    summary = only(
        told(
            pool(
                instance("b-0"),
                instance("b-1", suspect=True),
                instance("b-2", availability="starting"),
                instance("b-3", availability="draining"),
                instance("b-4", availability="quarantined"),
            )
        )
    )
    assert (summary.endpoints, summary.ready, summary.suspect, summary.warming, summary.draining) == (5, 1, 1, 1, 1)


def test_all_suspect_instances_still_carry_capacity() -> None:
    summary = only(told(pool(instance("b-0", suspect=True, backlog_s=2.0))))
    assert (summary.ready, summary.suspect, summary.waits_s) == (0, 1, (2.0,))
    assert summary.prefill.capacity > 0


def test_revisions_are_told_apart() -> None:
    view = pool(instance("b-0"), instance("b-1", model_digest="large-chat@2026-03"), instance("b-2"))
    assert [(p.model_digest, p.ready) for p in told(view).pools] == [
        ("large-chat@2026-03", 1),
        ("large-chat@2026-09", 2),
    ]


def test_an_idle_or_unreadable_site_is_a_valid_observation_without_nan() -> None:
    odd = [
        instance("b-0", backlog_s=math.nan, context_tokens=math.inf, kv_held_tokens=-1.0, foreign=math.nan),
        instance("b-1", kv_total_tokens=None, backlog_s=0.5, age_s=None),
    ]
    summary = told(replace(pool(*odd), age_s=math.nan), attainment={"large-chat@b": math.nan})
    assert summary.age_s is None
    assert only(summary).waits_s == (0.5,)
    assert only(summary).attainment is None
    assert only(summary).kv.capacity == 2_000_000  # the unknown one counts as the mean of the known
    assert all(math.isfinite(number) for number in floats(msgpack.decode(msgpack.encode(summary))))


def test_thinning_keeps_the_least_the_greatest_and_the_shape() -> None:
    waits_s = [i / 100 for i in range(1000)]
    few = thinned(waits_s, WAITS_MAX)
    assert len(few) == WAITS_MAX
    assert (few[0], few[-1]) == (0.0, 9.99)
    assert sum(few) / len(few) == pytest.approx(sum(waits_s) / len(waits_s), rel=0.02)


@pytest.mark.parametrize(("models", "instances"), [(1, 1000), (12, 200), (60, 8)])
def test_a_summary_never_exceeds_its_size(models: int, instances: int) -> None:
    members = tuple(instance(f"i-{i:04}", backlog_s=i * 0.01) for i in range(instances))
    pools = [
        replace(pool(*members[: instances - m]), pool=f"model-{m:02}-{'x' * 40}@b") for m in range(min(models, 60))
    ]
    summary = told(*[p for p in pools if p.instances])
    assert len(msgpack.encode(summary)) <= SUMMARY_BYTES_MAX
    assert max(p.ready for p in summary.pools) == instances  # the largest pools stay
    assert min(summary.pools[0].waits_s) == 0.0
