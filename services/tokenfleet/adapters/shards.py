"""Shards: telemetry of one site folded into capacity messages, by whoever owns the partition.

Workers share the partitions of `telemetry`; the owner of one publishes the shard of the same number. Nothing is
published before the partition has been read to its end, and a new owner starts from the shard's last message, so no
takeover shows an empty or younger table than there is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import Counter, Gauge

from tokenfleet.adapters.claim import Claim
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reading import LAST, Record, ago
from tokenfleet.adapters.topics import CAPACITY, TELEMETRY
from tokenfleet.core.capacity_writer import TelemetryShard
from tokenfleet.core.records import CapacityShard, Telemetry

READ_BACK_S = 15.0  # every agent has spoken several times within; longer silent ones come from the last message
SEED_WAIT_MAX_S = 5.0

ROWS = Gauge("tokenfleet_capacity_rows", "Instances in the shards that this worker owns", ["site"])
ROWS_FOLDED = Counter("tokenfleet_capacity_rows_folded_total", "Heartbeats taken in", ["site"])
PUBLISHED = Counter("tokenfleet_capacity_published_total", "Shard messages acknowledged", ["site"])
NOT_PUBLISHED = Counter("tokenfleet_capacity_not_published_total", "Shard messages that Kafka didn't confirm", ["site"])
CONFLICTS = Counter("tokenfleet_capacity_conflicts_total", "Envelopes naming an instance of another agent", ["site"])

logger = logging.getLogger(__name__)


class SiteShards:
    """This worker's shards of one site. `run` reads telemetry, `publish` writes; both run until cancelled."""

    def __init__(
        self, kafka: Kafka, site: str, *, period_s: float, on_owned: Callable[[frozenset[int]], Awaitable[None]]
    ) -> None:
        """`on_owned` is awaited with the shards owned, whenever they change."""
        self.site = site
        self._kafka = kafka
        self._period_s = period_s
        self._on_owned = on_owned
        self._owned: dict[int, TelemetryShard] = {}
        self._claims: dict[int, Claim] = {}
        self._of_lost_log: dict[int, CapacityShard] = {}
        self._worker = kafka.shared_worker(
            TELEMETRY,
            site,
            self._fold,
            group=f"tokenfleet-capacity-{site}",
            start=ago(READ_BACK_S),
            on_assigned=self._gained,
            on_lost=self._lost,
            on_reset=self._reset,
        )

    async def run(self) -> None:
        await self._worker.run()

    async def publish(self) -> None:
        """Publish each owned shard every period, changed or not, while its partition is read at its end."""
        while True:
            began_s = monotonic_s()
            current = {number: shard for number, shard in self._owned.items() if self._is_current(number, shard)}
            await asyncio.gather(*(self._send(number, shard) for number, shard in current.items()))
            ROWS.labels(self.site).set(sum(map(len, self._owned.values())))
            await asyncio.sleep(max(0.0, self._period_s - (monotonic_s() - began_s)))

    def state(self) -> tuple[bool, str]:
        """Ready while all shards owned are current; owning none is ready too: another worker has them."""
        behind = [number for number in self._owned if not self._worker.is_caught_up(number)]
        owned = ", ".join(map(str, sorted(self._owned))) or "none"
        return not behind, f"owns shards {owned}; {self._worker.lag} records behind"

    def _is_current(self, number: int, shard: TelemetryShard) -> bool:
        live = self._worker.is_caught_up(number)
        shard.advance(monotonic_s(), live=live)
        return live

    async def _fold(self, records: Sequence[Record[Telemetry]]) -> None:
        for record in records:
            if (shard := self._owned.get(record.partition)) is None:
                continue
            applied = shard.apply(record.message, offset=record.offset, now_s=record.read_at_s, live=record.live)
            ROWS_FOLDED.labels(self.site).inc(len(getattr(record.message, "beats", ())))
            if applied.conflicts:
                CONFLICTS.labels(self.site).inc()
                logger.warning(
                    "%s: two agents claim %s; the later heard stays", self.site, ", ".join(applied.conflicts)
                )

    async def _send(self, number: int, shard: TelemetryShard) -> None:
        claim = self._claims[number]
        n = claim.next(self._kafka.cluster_id)
        message = shard.snapshot(monotonic_s(), n=n, epoch=claim.epoch)
        try:
            offset = await self._kafka.send(CAPACITY, self.site, [message], partition=number, key=str(number))
        except KafkaAwayError as error:
            NOT_PUBLISHED.labels(self.site).inc()
            logger.warning("%s: shard %d was not published: %s", self.site, number, error)
            return
        PUBLISHED.labels(self.site).inc()
        claim.written(offset)

    async def _gained(self, numbers: Sequence[int]) -> None:
        seeds = await self._last_messages(numbers)
        for number in numbers:
            shard = TelemetryShard(
                site=self.site, shard=number, cluster=self._kafka.cluster_id, period_s=self._period_s
            )
            if (last := seeds.get(number) or self._of_lost_log.get(number)) is not None:
                shard.seed(last, now_s=monotonic_s())
            self._owned[number] = shard
            self._claims[number] = Claim()
        self._of_lost_log.clear()
        logger.info("%s: owns shards %s", self.site, sorted(self._owned))
        await self._on_owned(frozenset(self._owned))

    async def _lost(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._owned.pop(number, None)
        await self._on_owned(frozenset(self._owned))

    def _reset(self) -> None:
        """The log is another one and begins empty: what was known last is the seed for it."""
        now_s = monotonic_s()
        self._of_lost_log = {number: shard.snapshot(now_s, n=0, epoch=0) for number, shard in self._owned.items()}

    async def _last_messages(self, numbers: Sequence[int]) -> dict[int, CapacityShard]:
        """The last message of each of these shards that the log holds."""
        found: dict[int, CapacityShard] = {}

        def keep(record: Record[CapacityShard]) -> None:
            found[record.partition] = record.message

        reader = self._kafka.follower(CAPACITY, self.site, keep, start=LAST, partitions=numbers)
        await reader.read_to_end(wait_max_s=SEED_WAIT_MAX_S)
        return found
