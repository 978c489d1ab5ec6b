"""Sender: brings what is spooled to Kafka, in order, in batches, until it is there.

`put` is all that the decision path does: encode and append to the spool. A lane waits a little for company, so
that a batch carries many records; it sends again for ever, so Kafka may hold a record twice, never not at all.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from tokenfleet.adapters.codec import encode
from tokenfleet.adapters.spool import Lane, Spool
from tokenfleet.adapters.spool_segment import Spooled
from tokenfleet.adapters.topics import TOPICS, Topic, partition_of
from tokenfleet.core.errors import BadRecordError, SetupError

M = TypeVar("M", bound=Struct)

CHUNK_BYTES = 512 * 1024  # one partition's share of it fits in a batch
LINGER_S = {"placements": 0.01, "outcomes": 0.05, "decisions": 0.05}
RETRY_FIRST_S = 0.1
RETRY_MAX_S = 2.0

logger = logging.getLogger(__name__)

_BY_NAME: dict[str, Topic[Any]] = {topic.name: topic for topic in TOPICS}


class Destination(Protocol):
    """What the sender needs of Kafka."""

    async def partitions(self, topic: Topic[Any], site: str) -> int: ...

    async def send_values(
        self, topic: Topic[Any], site: str, values: Sequence[bytes], *, partition: int | None = None
    ) -> int: ...


class Sender:
    """Sends the spool's lanes, each on its own, so that evidence never delays placements."""

    def __init__(self, spool: Spool, kafka: Destination) -> None:
        self.sent = 0
        self._spool, self._kafka = spool, kafka
        self._wakes = {lane.name: asyncio.Event() for lane in spool.lanes}
        for wake in self._wakes.values():
            wake.set()  # what a former start left is waiting

    def put(self, topic: Topic[M], site: str, message: M, *, partition: int = -1, key: str = "") -> bool:
        """Spool a message for a partition, or for the partition of `key`. False when it is lost at once.

        Raises BadRecordError when it can't be encoded.
        """
        if partition < 0 and not key:
            raise BadRecordError(f"{topic.name}: name a partition or a key")
        value = encode(topic, message)
        kept = self._spool.append(Spooled(topic=topic.name, site=site, partition=partition, key=key, value=value))
        self._wakes[topic.name].set()
        return kept

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for lane in self._spool.lanes:
                tasks.create_task(self._send_lane(lane))

    async def until_drained(self) -> None:
        """Return when nothing waits; another task must be in `run`."""
        while self._spool.records:
            await asyncio.sleep(min(LINGER_S.values()))

    async def _send_lane(self, lane: Lane) -> None:
        linger_s = LINGER_S.get(lane.name, max(LINGER_S.values()))
        while True:
            await self._wakes[lane.name].wait()
            self._wakes[lane.name].clear()
            await asyncio.sleep(linger_s)
            while lane.records:
                spooled, position = lane.read(CHUNK_BYTES)
                await self._until_sent(spooled)
                lane.sent(position, len(spooled))
                self.sent += len(spooled)

    async def _until_sent(self, spooled: Sequence[Spooled]) -> None:
        """Send a chunk, each partition's records in their order; those that failed are sent again."""
        waiting = list(spooled)
        retry_s = RETRY_FIRST_S
        while waiting:
            waiting = await self._unsent(waiting)
            if waiting:
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def _unsent(self, spooled: Sequence[Spooled]) -> list[Spooled]:
        try:
            groups = await self._by_partition(spooled)
        except (OSError, SetupError) as error:
            logger.warning("sender: %d records wait: %s", len(spooled), error)
            return list(spooled)
        results = await asyncio.gather(*(self._send(target, group) for target, group in groups.items()))
        return [record for failed in results for record in failed]

    async def _by_partition(self, spooled: Sequence[Spooled]) -> dict[tuple[str, str, int], list[Spooled]]:
        groups: dict[tuple[str, str, int], list[Spooled]] = {}
        for record in spooled:
            partition = record.partition
            if partition < 0:
                count = await self._kafka.partitions(_BY_NAME[record.topic], record.site)
                partition = partition_of(record.key, count)
            groups.setdefault((record.topic, record.site, partition), []).append(record)
        return groups

    async def _send(self, target: tuple[str, str, int], group: list[Spooled]) -> list[Spooled]:
        """The records that could not be sent: none or all."""
        name, site, partition = target
        try:
            await self._kafka.send_values(_BY_NAME[name], site, [record.value for record in group], partition=partition)
        except (OSError, SetupError) as error:
            logger.warning("sender: %d records of %s wait: %s", len(group), name, error)
            return group
        return []
