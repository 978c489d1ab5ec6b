"""What pools cost, and who bears it."""

import pytest

from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.goodput.cost import PoolCost
from tokenfleet.core.goodput.table import GoodputTable
from tokenfleet.core.records import PoolSummary, SiteSummary, Vector

T0 = 1_800_000_000.0
NONE = Vector(capacity=0.0, used=0.0)


def summary(ready: int, *, n: int = 1) -> SiteSummary:
    pool = PoolSummary(
        pool="m@b", model="m", model_digest="", endpoints=ready, ready=ready, prefill=NONE, kv=NONE, seats=NONE
    )
    return SiteSummary(site="b", cluster="k", epoch=0, n=n, period_s=0.5, age_s=0.0, gateways=(), pools=(pool,))


def hear(cost: PoolCost, *heard: tuple[float, int]) -> None:
    for at_s, ready in heard:
        cost.hear(summary(ready), price_per_hour=3600.0, at_s=T0 + at_s)


def test_ready_time_is_split_at_window_borders() -> None:
    cost = PoolCost((10.0,))
    hear(cost, (8.0, 2), (13.0, 4), (14.0, 4))
    rows = {row.start_s - T0: row for row in cost.changed()}
    assert rows[0.0].gpu_seconds == pytest.approx(2 * 2.0)
    assert rows[10.0].gpu_seconds == pytest.approx(2 * 3.0 + 4 * 1.0)
    assert rows[10.0].cost == pytest.approx(10.0)


def test_a_silence_costs_nothing_known_and_repeats_count_once() -> None:
    cost = PoolCost((60.0,))
    hear(cost, (0.0, 2), (30.0, 2), (31.0, 2), (31.0, 2), (30.5, 2))
    [row] = cost.changed()
    assert row.gpu_seconds == pytest.approx(2.0)


def test_a_restart_adds_to_what_was_published() -> None:
    before = PoolCost((60.0,))
    hear(before, (0.0, 2), (5.0, 2))
    after = PoolCost((60.0,), published=before.changed())
    hear(after, (7.0, 2), (9.0, 2))
    [row] = after.changed()
    assert (row.version, row.gpu_seconds) == (2, pytest.approx(2 * 5.0 + 2 * 2.0))
    assert after.changed() == ()


def row(request_class: str, tenant: str, **sums: float) -> GoodputRow:
    return GoodputRow(
        start_s=T0,
        width_s=10.0,
        request_class=request_class,
        tenant=tenant,
        pool="m@b",
        version=1,
        **sums,  # type: ignore[arg-type]
    )


def test_a_pools_cost_is_borne_by_output_and_waste_is_told_apart() -> None:
    table = GoodputTable()
    rows = (
        row("", "", gpu_seconds=40.0, cost=8.0),
        row("chat", "acme", goodput_tokens=200, output_tokens=300, waste_tokens=100, met=3, missed=1),
        row("batch", "globex", goodput_tokens=100, output_tokens=100, rejected=1),
    )
    table.hear(GoodputPartial(site="b", partition=0, watermark_s=T0 + 20.0, rows=rows))
    by_class = table.by("request_class", 10.0, T0)
    assert by_class["chat"].cost == pytest.approx(6.0)
    assert by_class["chat"].waste_cost == pytest.approx(2.0)
    assert by_class["chat"].cost_per_million_goodput_tokens == pytest.approx(6.0 * 1e6 / 200)
    assert by_class["chat"].attainment_admitted == pytest.approx(0.75)
    assert by_class["batch"].attainment_admitted is None
    assert by_class["batch"].attainment_offered == 0.0
    total = table.total(10.0, T0)
    assert (total.cost, total.gpu_seconds) == (8.0, 40.0)
    assert total.goodput_tokens_per_s == pytest.approx(30.0)


def test_an_idle_pool_costs_under_no_name() -> None:
    table = GoodputTable()
    table.hear(GoodputPartial(site="b", partition=0, watermark_s=T0, rows=(row("", "", gpu_seconds=40.0, cost=8.0),)))
    assert table.by("tenant", 10.0, T0)[""].cost == 8.0
    assert table.total(10.0, T0).cost_per_million_goodput_tokens is None


def test_readers_add_partitions_up_take_the_least_watermark_and_keep_the_greatest_version() -> None:
    table = GoodputTable()
    newer = GoodputRow(start_s=T0, width_s=10.0, request_class="chat", tenant="a", pool="p", version=2, met=5)
    older = GoodputRow(start_s=T0, width_s=10.0, request_class="chat", tenant="a", pool="p", version=1, met=1)
    table.hear(GoodputPartial(site="b", partition=0, watermark_s=T0 + 30.0, rows=(newer,)))
    table.hear(GoodputPartial(site="b", partition=1, watermark_s=T0 + 21.0, rows=(newer,)))
    table.hear(GoodputPartial(site="b", partition=0, watermark_s=T0 + 29.0, rows=(older,)))
    assert table.watermark_s == T0 + 21.0
    assert table.closed_start_s(10.0) == T0 + 10.0
    assert table.total(10.0, T0).met == 10
