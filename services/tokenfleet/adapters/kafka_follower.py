"""Kafka follower: keep a table in memory current with a topic."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.deadletter import DeadLetters
from tokenfleet.adapters.kafka_link import KafkaAwayError, KafkaLink
from tokenfleet.adapters.kafka_reader import Reader
from tokenfleet.adapters.kafka_reading import Record, Start
from tokenfleet.adapters.kafka_starts import offsets_for
from tokenfleet.adapters.topics import Topic
from tokenfleet.core.errors import BadRecordError

M = TypeVar("M", bound=Struct)

logger = logging.getLogger(__name__)

BREATH_S = 0.01  # longest time that a catching-up reader keeps the loop for itself


class Follower(Reader[M]):
    """Reads partitions without a group and hands every record to `apply`, for tables in memory.

    `apply` may raise BadRecordError: the record becomes a dead letter and the partition goes on. So does one that makes
    it raise anything else, which is a fault of ours: the log has its traceback.
    """

    def __init__(
        self,
        link: KafkaLink,
        topic: Topic[M],
        site: str,
        apply: Callable[[Record[M]], None],
        *,
        start: Start,
        partitions: Sequence[int] | None,
        on_caught_up: Callable[[], None] | None,
        on_reset: Callable[[], None] | None,
        letters: DeadLetters,
    ) -> None:
        super().__init__(link, topic, site, start=start, on_reset=on_reset, letters=letters)
        self._apply, self._partitions, self._on_caught_up = apply, partitions, on_caught_up

    async def read_to_end(self, *, wait_max_s: float | None = None) -> None:
        """Run until caught up, and no longer. Raises what `run` raises, KafkaAwayError after `wait_max_s`."""
        reading = asyncio.create_task(self.run())
        caught_up = asyncio.create_task(self.until_caught_up())
        try:
            await asyncio.wait({reading, caught_up}, return_when=asyncio.FIRST_COMPLETED, timeout=wait_max_s)
            if reading.done():
                reading.result()
            if not caught_up.done():
                raise KafkaAwayError(f"{self.name}: could not be read to its end in {wait_max_s} s")
        finally:
            reading.cancel()
            caught_up.cancel()
            await asyncio.gather(reading, caught_up, return_exceptions=True)

    def _consumer(self) -> AIOKafkaConsumer:
        return self._link.consumer(fetch_wait_s=self.topic.fetch_wait_s)

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        count = await self._link.partitions(self.topic, self.site)
        ours = tuple(range(count)) if self._partitions is None else self._partitions
        # Before the first fetch: on a fetching consumer the question waits behind the long poll.
        ends = await self._link.ends(self.name, ours)
        self._check_forward(ends)
        self._assign(consumer, ends)
        new = [p for p in ours if p not in self._next]
        offsets = await offsets_for(self._start, self._link, consumer, self.name, {p: ends[p] for p in new})
        self._adopt(consumer, self._next | offsets, ends)

    async def _take(self, consumer: AIOKafkaConsumer, records: Mapping[int, Sequence[ConsumerRecord]]) -> None:
        began_s = monotonic_s()
        for partition, batch in records.items():
            for raw in batch:
                if (record := self._record(raw)) is not None:
                    self._try(record, raw)
                self._next[partition] = raw.offset + 1
                if monotonic_s() - began_s > BREATH_S:
                    await asyncio.sleep(0)
                    began_s = monotonic_s()

    def _try(self, record: Record[M], raw: ConsumerRecord) -> None:
        try:
            self._apply(record)
        except BadRecordError as error:
            self._refuse(raw, str(error))
        except Exception as error:  # ending here would only meet the same record again, at every start
            logger.exception("%s[%d]@%d can't be taken in", self.name, raw.partition, raw.offset)
            self._refuse(raw, f"can't be taken in: {type(error).__name__}")

    async def _pass_gate(self, consumer: AIOKafkaConsumer) -> None:
        was_ready = self._ready.is_set()
        await super()._pass_gate(consumer)
        if self._on_caught_up is not None and self._ready.is_set() and not was_ready:
            self._on_caught_up()
