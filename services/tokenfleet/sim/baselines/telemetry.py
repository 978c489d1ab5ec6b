"""Telemetry: the gauges of an engine's metrics page as a gateway without accounts of its own sees them, late."""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.records import CapacityShard, Heartbeat
from tokenfleet.sim.router import Record


class Gauges(Struct, frozen=True, kw_only=True):
    """Requests running and waiting, and the share of KV blocks in use, 0..1. Zeros before the first scrape."""

    running: float = 0.0
    waiting: float = 0.0
    kv_use: float = 0.0


class Telemetry:
    """The newest gauges of each instance."""

    def __init__(self, instances: Sequence[str]) -> None:
        self.seen = dict.fromkeys(instances, Gauges())
        self._newest: dict[tuple[str, int], tuple[int, int]] = {}

    def hear(self, record: Record) -> None:
        """Take a shard's rows if it is newer than the last of the same shard; other records tell nothing."""
        if not isinstance(record, CapacityShard):
            return
        shard, order = (record.site, record.shard), (record.epoch, record.n)
        if order <= self._newest.get(shard, (-2, 0)):
            return
        self._newest[shard] = order
        for row in record.rows:
            if row.beat.instance in self.seen:
                self.seen[row.beat.instance] = gauges(row.beat)


def gauges(beat: Heartbeat) -> Gauges:
    """What of a heartbeat an engine's metrics page shows; what it doesn't know counts as zero, as scrapers do."""
    total = beat.kv_total_blocks or 0
    return Gauges(
        running=beat.running or 0.0,
        waiting=beat.waiting or 0.0,
        kv_use=(beat.kv_used_blocks or 0.0) / total if total else 0.0,
    )
