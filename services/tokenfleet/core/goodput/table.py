"""GoodputTable: the partial sums of all partitions, added up; what readers of the `goodput` topic hold."""

import math
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, structs

from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.goodput.cost import cost_per_million, is_cost
from tokenfleet.core.goodput.judge import NO_SLO
from tokenfleet.core.goodput.rows import RowKey, key_of

KEPT_S = 3600.0  # of event time behind the newest row

Label = Literal["request_class", "tenant", "pool"]


class GoodputSums(Struct, frozen=True, kw_only=True):
    """Sums over `seconds` of event time, and the figures made of them. A rate of nothing is None, never 0 or NaN."""

    seconds: float
    goodput_tokens: int = 0
    output_tokens: int = 0
    waste_tokens: int = 0
    prefill_waste_tokens: int = 0
    unknown_tokens_requests: int = 0
    met: int = 0
    missed: int = 0
    rejected: int = 0
    excluded: int = 0
    met_arrived: int = 0
    offered_arrived: int = 0
    late_dropped: int = 0
    gpu_seconds: float = 0.0
    cost: float = 0.0

    @property
    def goodput_tokens_per_s(self) -> float:
        return self.goodput_tokens / self.seconds

    @property
    def attainment_admitted(self) -> float | None:
        """Share of admitted requests that met their service level."""
        return _share(self.met, self.met + self.missed)

    @property
    def attainment_offered(self) -> float | None:
        """The same with rejects counted as missed, so that shedding can't fake success."""
        return _share(self.met, self.met + self.missed + self.rejected)

    @property
    def attainment_arrived(self) -> float | None:
        """By arrival: requests still running count as not (yet) met, against survivor bias."""
        return _share(self.met_arrived, self.offered_arrived)

    @property
    def cost_per_million_goodput_tokens(self) -> float | None:
        return cost_per_million(self.cost, self.goodput_tokens)

    @property
    def waste_cost(self) -> float:
        """The part of the cost that the wasted share of all output bears."""
        return self.cost * self.waste_tokens / self.output_tokens if self.output_tokens else 0.0


SUMMED = tuple(name for name in GoodputSums.__struct_fields__ if name != "seconds")


class GoodputTable:
    """Rows by (cluster, site, partition) and key, the greatest version of each; late partials can't undo newer ones."""

    def __init__(self, *, kept_s: float = KEPT_S) -> None:
        """Rows that began more than `kept_s` before the newest are forgotten."""
        self._kept_s = kept_s
        self._rows: dict[tuple[str, str, int], dict[RowKey, GoodputRow]] = {}
        self._watermarks_s: dict[tuple[str, str, int], float] = {}
        self._cluster = ""
        self._newest_s = -math.inf
        self._forgot_s = -math.inf

    def hear(self, partial: GoodputPartial) -> None:
        source = (partial.cluster, partial.site, partial.partition)
        self._cluster = partial.cluster
        self._watermarks_s[source] = max(self._watermarks_s.get(source, -math.inf), partial.watermark_s)
        rows = self._rows.setdefault(source, {})
        for row in partial.rows:
            known = rows.get(key_of(row))
            if known is None or known.version < row.version:
                rows[key_of(row)] = row
                self._newest_s = max(self._newest_s, row.start_s)
        self._forget()

    @property
    def watermark_s(self) -> float | None:
        """Event time that all partitions of the present cluster have completed; None before any was heard."""
        return min((at_s for source, at_s in self._watermarks_s.items() if source[0] == self._cluster), default=None)

    def closed_start_s(self, width_s: float) -> float | None:
        """Start of the newest window that the watermark has passed."""
        watermark_s = self.watermark_s
        return None if watermark_s is None else (watermark_s // width_s - 1) * width_s

    def published(self, *, cluster: str, site: str, partition: int) -> tuple[GoodputRow, ...]:
        """The newest version of each row that one worker published for one partition."""
        return tuple(self._rows.get((cluster, site, partition), {}).values())

    def watermark_of(self, *, cluster: str, site: str, partition: int) -> float | None:
        """The greatest watermark that one worker published for one partition; None if it published nothing."""
        return self._watermarks_s.get((cluster, site, partition))

    def total(self, width_s: float, start_s: float, *, windows: int = 1) -> GoodputSums:
        """Sums over `windows` windows from `start_s`. Tokens without an agreed level are no goodput here."""
        rows = self._within(width_s, start_s, windows)
        return _added(map(_without_unagreed, rows), width_s * windows)

    def by(
        self, label: Label, width_s: float, start_s: float, *, windows: int = 1, pool: str = ""
    ) -> dict[str, GoodputSums]:
        """The same per class, tenant or pool, of one `pool` if it is named. A pool's cost is shared out over its rows
        by output tokens.

        What a pool without output cost stands under the empty label.
        """
        grouped: dict[str, list[GoodputRow]] = {}
        rows = self._within(width_s, start_s, windows)
        for row in shared_out([row for row in rows if not pool or row.pool == pool]):
            grouped.setdefault(getattr(row, label), []).append(row)
        return {name: _added(rows, width_s * windows) for name, rows in sorted(grouped.items())}

    def _within(self, width_s: float, start_s: float, windows: int) -> list[GoodputRow]:
        end_s = start_s + windows * width_s
        return [
            row
            for rows in self._rows.values()
            for row in rows.values()
            if row.width_s == width_s and start_s <= row.start_s < end_s
        ]

    def _forget(self) -> None:
        """Amortised: looks at all rows once a tenth of that time."""
        if self._newest_s < self._forgot_s + self._kept_s / 10:
            return
        self._forgot_s = self._newest_s
        for rows in self._rows.values():
            for key in [key for key in rows if key.start_s + key.width_s < self._newest_s - self._kept_s]:
                del rows[key]


def shared_out(rows: list[GoodputRow]) -> list[GoodputRow]:
    """The same sums with each pool's cost spread over the pool's rows by their output tokens."""
    output: dict[str, int] = {}
    for row in rows:
        output[row.pool] = output.get(row.pool, 0) + row.output_tokens
    bearing = [row for row in rows if is_cost(row)]
    gpu_seconds = _sum_by_pool(bearing, "gpu_seconds")
    cost = _sum_by_pool(bearing, "cost")
    spread: list[GoodputRow] = []
    for row in rows:
        if is_cost(row):
            if not output[row.pool]:
                spread.append(row)
            continue
        share = row.output_tokens / output[row.pool] if output[row.pool] else 0.0
        bears = {"gpu_seconds": share * gpu_seconds.get(row.pool, 0.0), "cost": share * cost.get(row.pool, 0.0)}
        spread.append(structs.replace(row, **bears))
    return spread


def _without_unagreed(row: GoodputRow) -> GoodputRow:
    return structs.replace(row, goodput_tokens=0) if row.request_class == NO_SLO else row


def _sum_by_pool(rows: Iterable[GoodputRow], column: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.pool] = sums.get(row.pool, 0.0) + getattr(row, column)
    return sums


def _added(rows: Iterable[GoodputRow], seconds: float) -> GoodputSums:
    sums = dict.fromkeys(SUMMED, 0)
    for row in rows:
        for column in SUMMED:
            sums[column] += getattr(row, column)
    return GoodputSums(seconds=seconds, **sums)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
