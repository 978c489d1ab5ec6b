"""SiteFeed: what one agent tells one site: its heartbeats once a period, its instances' blocks within 100 ms.

Nothing is queued. One envelope is in flight, the next one is made when it is done; block changes add up in the watch
until they are taken. What may not have arrived is followed by a snapshot.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from random import Random

from prometheus_client import Counter

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.engines.watch import EngineWatch
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.topics import KVCACHE, TELEMETRY, partition_of
from tokenfleet.core.errors import BadRecordError, SetupError
from tokenfleet.core.records import AgentClaim, KvRecord, Order, TelemetryEnvelope

SEND_TIMEOUT_S = 2.0
PAGES_WAIT_MAX_S = 0.3  # how long an envelope waits for the pages of its period; a later one is in the next
ASK_SPREAD_S = 0.002  # between two pages: parsing one takes 0.6 ms
KV_PERIOD_S = 0.1

ENVELOPES = Counter("tokenfleet_agent_envelopes_total", "Telemetry envelopes, sent or dropped", ["site", "result"])
KV_RECORDS = Counter("tokenfleet_agent_kv_records_total", "KV records sent or dropped", ["site", "result"])

logger = logging.getLogger(__name__)


class SiteFeed:
    """One site's feed; `watches` gives the instances of the site that are watched now. `run` feeds until cancelled."""

    def __init__(
        self,
        kafka: Kafka,
        *,
        agent: str,
        site: str,
        watches: Callable[[], Sequence[EngineWatch]],
        period_s: float,
        kv_snapshot_period_s: float,
        rng: Random,
    ) -> None:
        self._kafka = kafka
        self._agent = agent
        self._site = site
        self._watches = watches
        self._period_s = period_s
        self._kv_snapshot_period_s = kv_snapshot_period_s
        self._rng = rng
        self._claim: tuple[str, int] | None = None  # cluster id and offset: the order of all that follows
        self._n = 0
        self._last_offset = -1
        self._away = False
        self._told_at_s = monotonic_s()
        self._snapshot_at_s: dict[str, float] = {}

    def state(self) -> tuple[bool, str]:
        """For the health page: whether telemetry arrives, and how long ago it last did."""
        silent_s = monotonic_s() - self._told_at_s
        return silent_s < 5 * self._period_s + SEND_TIMEOUT_S, f"telemetry taken {silent_s:.1f} s ago"

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            watched(tasks, self._tell_telemetry(), name=f"telemetry {self._site}")
            watched(tasks, self._tell_blocks(), name=f"kvcache {self._site}")

    async def _tell_telemetry(self) -> None:
        await asyncio.sleep(self._rng.random() * self._period_s)
        next_at_s = monotonic_s()
        while True:
            await self._scrape()
            try:
                await self._send_envelope()
            except (KafkaAwayError, SetupError, BadRecordError) as error:
                self._dropped(error)
            next_at_s = max(next_at_s + self._period_s, monotonic_s())
            await asyncio.sleep(next_at_s - monotonic_s())

    async def _scrape(self) -> None:
        """A new page from every instance, as far as they come in time: the envelope that follows is fresh."""
        watches = self._watches()
        spread_s = min(ASK_SPREAD_S, self._period_s / 2 / max(1, len(watches)))
        for watch in watches:
            watch.ask()
            await asyncio.sleep(spread_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(PAGES_WAIT_MAX_S, self._period_s / 2)):
                for watch in watches:
                    await watch.idle.wait()

    async def _send_envelope(self) -> None:
        cluster, claim = await self._claimed()
        self._n += 1
        now_s = monotonic_s()
        envelope = TelemetryEnvelope(
            agent=self._agent,
            site=self._site,
            order=Order(cluster=cluster, claim=claim, n=self._n),
            period_s=self._period_s,
            beats=tuple(watch.beat(now_s) for watch in self._watches()),
        )
        offset = await self._kafka.send(TELEMETRY, self._site, [envelope], key=self._agent, timeout_s=SEND_TIMEOUT_S)
        if offset <= self._last_offset:
            logger.warning("%s: telemetry went back from %d to %d: another log", self._site, self._last_offset, offset)
            self._claim = None
        self._last_offset = offset
        self._told_at_s = monotonic_s()
        ENVELOPES.labels(self._site, "sent").inc()
        if self._away:
            self._away = False
            logger.info("%s: Kafka takes telemetry again", self._site)

    async def _claimed(self) -> tuple[str, int]:
        if self._claim is None or self._claim[0] != self._kafka.cluster_id:
            cluster = self._kafka.cluster_id
            claim = AgentClaim(agent=self._agent, site=self._site)
            offset = await self._kafka.send(TELEMETRY, self._site, [claim], key=self._agent, timeout_s=SEND_TIMEOUT_S)
            self._claim, self._n, self._last_offset = (cluster, offset), 0, offset
            logger.info("%s: agent %s has claim %d of cluster %s", self._site, self._agent, offset, cluster)
        return self._claim

    def _dropped(self, error: Exception) -> None:
        ENVELOPES.labels(self._site, "dropped").inc()
        if not self._away:
            self._away = True
            logger.warning("%s: telemetry is dropped until Kafka takes it again: %s", self._site, error)

    async def _tell_blocks(self) -> None:
        while True:
            await asyncio.sleep(KV_PERIOD_S)
            watches = [watch for watch in self._watches() if watch.spec.kv_endpoint and watch.boot]
            if self._claim is None or not watches:
                continue
            try:
                partitions = await self._kafka.partitions(KVCACHE, self._site)
            except (KafkaAwayError, SetupError):
                continue  # nothing was taken from the watches; telemetry says that Kafka is away
            by_partition: dict[int, list[EngineWatch]] = {}
            for watch in watches:
                by_partition.setdefault(partition_of(watch.spec.id, partitions), []).append(watch)
            await asyncio.gather(*(self._send_blocks(part, these) for part, these in by_partition.items()))

    async def _send_blocks(self, partition: int, watches: Iterable[EngineWatch]) -> None:
        told = [(watch, records) for watch in watches if (records := self._records(watch))]
        records = [record for _, each in told for record in each]
        if not records:
            return
        try:
            await self._kafka.send(KVCACHE, self._site, records, partition=partition, timeout_s=SEND_TIMEOUT_S)
            KV_RECORDS.labels(self._site, "sent").inc(len(records))
        except (KafkaAwayError, SetupError, BadRecordError):
            KV_RECORDS.labels(self._site, "dropped").inc(len(records))
            for watch, _ in told:
                watch.log.tell_whole()

    def _records(self, watch: EngineWatch) -> Sequence[KvRecord]:
        if self._claim is None:
            return ()
        cluster, claim = self._claim
        now_s = monotonic_s()
        due_s = self._snapshot_at_s.setdefault(watch.spec.id, now_s + self._rng.random() * self._kv_snapshot_period_s)
        if now_s < due_s:
            return watch.log.changes(watch.blocks, boot=watch.boot, cluster=cluster, claim=claim)
        self._snapshot_at_s[watch.spec.id] = now_s + self._kv_snapshot_period_s
        return watch.log.snapshot(watch.blocks, boot=watch.boot, cluster=cluster, claim=claim)
