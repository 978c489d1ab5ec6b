"""PoolCost: what the ready instances of each pool cost, idle time included.

gpu_seconds = ∫ ready instances dt, cost = gpu_seconds · price / 3600, on the clock of the broker that took the site
summaries. An instance counts as one unit whatever GPUs it spans; the price is that of an instance-hour.
"""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenfleet.core.accounts import GoodputRow
from tokenfleet.core.goodput.rows import RowKey, key_of
from tokenfleet.core.records import SiteSummary

GAP_MAX_S = 10.0  # a summary comes every 0.5 s; what a longer silence cost is unknown and isn't made up
HOUR_S = 3600.0


class _Ready(NamedTuple):
    at_s: float
    instances: Mapping[str, int]


class PoolCost:
    """Cost rows (class and tenant empty) of all pools. `published` are those of an earlier life, to be continued."""

    def __init__(self, widths_s: Iterable[float], *, published: Iterable[GoodputRow] = ()) -> None:
        self._widths_s = tuple(widths_s)
        self._ready: dict[str, _Ready] = {}
        self._rows = {key_of(row): row for row in published if is_cost(row)}
        self._changed: dict[RowKey, list[float]] = {}

    def hear(self, summary: SiteSummary, *, price_per_hour: float, at_s: float) -> None:
        """Count the time since the site's last summary; `at_s` is when the broker took this one (Unix seconds)."""
        last = self._ready.get(summary.site)
        if last is not None and at_s <= last.at_s:
            return
        self._ready[summary.site] = _Ready(at_s, {pool.pool: pool.ready for pool in summary.pools})
        if last is None or at_s - last.at_s > GAP_MAX_S:
            return
        for pool, ready in last.instances.items():
            self._spread(pool, ready, price_per_hour / HOUR_S, from_s=last.at_s, until_s=at_s)

    def changed(self) -> tuple[GoodputRow, ...]:
        """Rows to publish, each under its next version."""
        rows: list[GoodputRow] = []
        for key, (gpu_seconds, cost) in self._changed.items():
            last = self._rows.get(key)
            row = GoodputRow(
                width_s=key.width_s,
                start_s=key.start_s,
                request_class="",
                tenant="",
                pool=key.pool,
                version=1 if last is None else last.version + 1,
                gpu_seconds=gpu_seconds + (0.0 if last is None else last.gpu_seconds),
                cost=cost + (0.0 if last is None else last.cost),
            )
            self._rows[key] = row
            rows.append(row)
        self._changed.clear()
        self._forget()
        return tuple(rows)

    def _spread(self, pool: str, instances: int, price_per_s: float, *, from_s: float, until_s: float) -> None:
        for width_s in self._widths_s:
            start_s = from_s // width_s * width_s
            while start_s < until_s:
                seconds = min(until_s, start_s + width_s) - max(from_s, start_s)
                sums = self._changed.setdefault(RowKey(width_s, start_s, "", "", pool), [0.0, 0.0])
                sums[0] += instances * seconds
                sums[1] += instances * seconds * price_per_s
                start_s += width_s

    def _forget(self) -> None:
        newest_s = max((ready.at_s for ready in self._ready.values()), default=-math.inf)
        past = [key for key in self._rows if key.start_s + key.width_s < newest_s - 2 * GAP_MAX_S]
        for key in past:
            del self._rows[key]


def is_cost(row: GoodputRow) -> bool:
    """True for rows of a pool's cost, which belong to no class or tenant."""
    return not row.request_class and not row.tenant


def cost_per_million(cost: float, goodput_tokens: int) -> float | None:
    """Money for a million goodput tokens; None when there were none."""
    return cost * 1e6 / goodput_tokens if goodput_tokens else None
