"""Kafka reader: read one topic for ever, through broker restarts, and say how far behind it is.

A `Reader` owns its positions. It reads without a record limit, because on the embedded broker a log's end is the
base of its last batch + 1, and only a whole batch carries the position past it.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.errors import IllegalStateError, KafkaError
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.codec import decode
from tokenfleet.adapters.deadletter import DeadLetters
from tokenfleet.adapters.kafka_link import WATCH_EVERY_S, KafkaAwayError, KafkaLink, stop_consumer
from tokenfleet.adapters.kafka_reading import BEGINNING, END, Gate, Record, Start
from tokenfleet.adapters.topics import Topic
from tokenfleet.core.errors import BadRecordError, SetupError

M = TypeVar("M", bound=Struct)

POLL_S = 0.2  # longest sleep without a record
GAP_MAX_S = 1.5  # a process that was away longer has missed live records
REBUILD_AFTER_S = 0.5
STALL_MAX_S = 30.0

logger = logging.getLogger(__name__)


class StalledError(Exception):
    """A reader has records before it, an answering broker, and has not moved for STALL_MAX_S: end the process."""


class LogWentBackError(Exception):
    """The log ends before our position, or another cluster answers: all that was read is void."""


class Reader(ABC, Generic[M]):
    """Reads one topic; subclasses say which partitions, from where, and what to do with the records.

    `lag` counts records (0 while caught up); `last_heard_s` is the monotonic time of the last record, None before any.
    """

    def __init__(
        self,
        link: KafkaLink,
        topic: Topic[M],
        site: str,
        *,
        start: Start,
        on_reset: Callable[[], None] | None,
        letters: DeadLetters,
    ) -> None:
        self.topic, self.site, self.name = topic, site, topic.at(site)
        self.lag = 0
        self.last_heard_s: float | None = None
        self._link, self._start, self._on_reset, self._letters = link, start, on_reset, letters
        self._gate = Gate()
        self._next: dict[int, int] = {}  # partition: offset of the first record not taken in
        self._ends: dict[int, int] = {}  # partition: end of the log as the broker told it last
        self._cluster = ""
        self._ready = asyncio.Event()
        self._started = False
        self._moved_s = self._polled_s = self._looked_s = self._awake_at_s = 0.0

    @property
    def caught_up(self) -> bool:
        """Whether all that the log held when we last fell behind has been taken in."""
        return self._ready.is_set()

    async def until_caught_up(self) -> None:
        """Return when caught up; another task must be in `run`."""
        await self._ready.wait()

    async def run(self) -> None:
        """Read until cancelled.

        Raises SetupError when the topic is missing at start, StalledError, and what the taker of the records raises.
        """
        while True:
            try:
                await self._read()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # else a leak of aiokafka's (see stop_consumer): read on
            except LogWentBackError as error:
                logger.warning("%s: %s; reading it anew", self.name, error)
                self._forget()
            except SetupError:
                if not self._started:
                    raise
                logger.warning("%s: gone; waiting for it", self.name)
            except (KafkaError, OSError, TimeoutError) as error:
                logger.warning("%s: %r; reading on from where we are", self.name, error)
            self._shut()
            await asyncio.sleep(REBUILD_AFTER_S)

    @abstractmethod
    def _consumer(self) -> AIOKafkaConsumer:
        """A consumer, not started."""

    @abstractmethod
    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        """Assign or subscribe a started consumer."""

    async def _settle(self, consumer: AIOKafkaConsumer) -> None:
        """Called before each poll: adopt partitions that a group has given us."""
        del consumer

    @abstractmethod
    async def _take(self, consumer: AIOKafkaConsumer, records: Mapping[int, Sequence[ConsumerRecord]]) -> None:
        """Take in the records of each partition of ours, moving `_next` past what is done."""

    async def _read(self) -> None:
        """One life of a consumer."""
        await self._link.partitions(self.topic, self.site)
        consumer = self._consumer()
        try:
            await consumer.start()
            if self._cluster not in ("", self._link.cluster_id):
                self._forget()
            self._cluster = self._link.cluster_id
            await self._begin(consumer)
            self._started = True
            self._moved_s = self._polled_s = self._awake_at_s = monotonic_s()
            self._looked_s = 0.0
            while True:
                await self._settle(consumer)
                await self._poll(consumer)
                if self._gate.unknown or monotonic_s() - self._looked_s >= WATCH_EVERY_S:
                    await self._look(consumer)
                await self._pass_gate(consumer)
        finally:
            await stop_consumer(consumer)

    async def _poll(self, consumer: AIOKafkaConsumer) -> None:
        batches = await consumer.getmany(timeout_ms=round(POLL_S * 1000))
        now_s = self._polled_s = self._awake()
        if not (records := self._ours({tp.partition: batch for tp, batch in batches.items()})):
            return
        for partition, batch in records.items():
            if batch[0].offset < self._next[partition]:
                raise LogWentBackError(f"partition {partition} is at {batch[0].offset}, was {self._next[partition]}")
        self.last_heard_s = self._moved_s = now_s
        await self._take(consumer, records)

    def _awake(self) -> float:
        """The time. After a pause of this process, or a long taking-in, what comes next is of unknown age.

        Nor is it a stall: nothing could have moved meanwhile.
        """
        now_s = monotonic_s()
        away_s = now_s - self._awake_at_s
        if away_s > GAP_MAX_S:
            self._shut()
            self._moved_s += away_s
        self._awake_at_s = now_s
        return now_s

    def _ours(self, records: Mapping[int, Sequence[ConsumerRecord]]) -> dict[int, Sequence[ConsumerRecord]]:
        """The records that may be taken now."""
        return {partition: batch for partition, batch in records.items() if partition in self._next}

    async def _look(self, consumer: AIOKafkaConsumer) -> None:
        """Compare our positions with the log's ends."""
        self._looked_s = self._awake()
        try:
            ends = await self._link.ends(self.name, self._next)
        except KafkaAwayError:
            self._shut()
            return
        if self._link.cluster_id != self._cluster:
            raise LogWentBackError("another cluster answers")
        self._check_forward(ends)
        self.lag = 0
        for partition, end in ends.items():
            self.lag += max(0, end - await self._position(consumer, partition))
        if self.lag == 0:
            self._moved_s = self._looked_s
        elif self._looked_s - self._moved_s > STALL_MAX_S:
            raise StalledError(f"{self.name}: {self.lag} records behind and not moved for {STALL_MAX_S} s")
        self._gate.aim(ends)

    def _check_forward(self, ends: Mapping[int, int]) -> None:
        """A log's end never falls. It is compared with itself: the embedded broker's lies before our position.

        Raises LogWentBackError.
        """
        for partition, end in ends.items():
            if end < self._ends.get(partition, 0):
                raise LogWentBackError(f"partition {partition} ends at {end}, it was {self._ends[partition]}")
        self._ends |= ends

    async def _pass_gate(self, consumer: AIOKafkaConsumer) -> None:
        if self._gate.all_open and self._ready.is_set():
            return
        for partition in self._next:
            self._gate.reach(partition, await self._position(consumer, partition))
        if self._gate.all_open and self._started:
            self._ready.set()
            self.lag = 0

    async def _position(self, consumer: AIOKafkaConsumer, partition: int) -> int:
        """Past our last record, and past what compaction or transactions left empty behind it."""
        try:
            async with asyncio.timeout(POLL_S):
                return max(self._next[partition], await consumer.position(TopicPartition(self.name, partition)))
        except (IllegalStateError, TimeoutError):  # a group is being rebalanced
            return self._next[partition]

    def _record(self, raw: ConsumerRecord) -> Record[M] | None:
        """The record, or None after a dead letter."""
        try:
            message = decode(self.topic, raw.value, raw.headers)
        except BadRecordError as error:
            self._refuse(raw, str(error))
            return None
        return Record(
            topic=self.topic,
            site=self.site,
            cluster=self._cluster,
            partition=raw.partition,
            offset=raw.offset,
            message=message,
            live=self._gate.is_open(raw.partition),
            read_at_s=self._polled_s,
            appended_wall_s=raw.timestamp / 1000,
        )

    def _refuse(self, raw: ConsumerRecord, reason: str) -> None:
        self._letters.offer(self.name, partition=raw.partition, offset=raw.offset, reason=reason, value=raw.value)

    def _shut(self) -> None:
        self._ready.clear()
        self._gate.shut(self._next)

    def _forget(self) -> None:
        """Nothing that was read counts any more."""
        self._gate.forget(tuple(self._next))
        self._next.clear()
        self._ends.clear()
        self._ready.clear()
        self.lag = 0
        if self._start == END:
            self._start = BEGINNING  # all of the new log came after what we had
        if self._on_reset is not None:
            self._on_reset()

    def _assign(self, consumer: AIOKafkaConsumer, ends: Mapping[int, int]) -> None:
        """Take these partitions; from their ends, so that nothing is fetched in vain until the start is known."""
        consumer.assign([TopicPartition(self.name, p) for p in ends])
        for partition, end in ends.items():
            consumer.seek(TopicPartition(self.name, partition), end)

    def _adopt(self, consumer: AIOKafkaConsumer, offsets: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Read these partitions from these offsets; they are behind until `ends`."""
        for partition, offset in offsets.items():
            consumer.seek(TopicPartition(self.name, partition), offset)
            self._next[partition] = offset
        self._ready.clear()
        self._gate.shut(offsets)
        self._gate.aim(ends)
