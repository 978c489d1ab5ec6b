"""Kafka workers: readers with a group, whose finished records are committed or whose partitions are shared."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from aiokafka import AIOKafkaConsumer, ConsumerRecord, TopicPartition
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import KafkaError
from msgspec import Struct

from tokenfleet.adapters.deadletter import DeadLetters
from tokenfleet.adapters.kafka_link import KafkaLink
from tokenfleet.adapters.kafka_reader import Reader
from tokenfleet.adapters.kafka_reading import Record, Start
from tokenfleet.adapters.kafka_starts import newest_records, offsets_for
from tokenfleet.adapters.topics import Topic

M = TypeVar("M", bound=Struct)

SESSION_S = 6.0  # how long a dead member keeps its partitions

Handle = Callable[[Sequence[Record[M]]], Awaitable[None]]

logger = logging.getLogger(__name__)


class _Worker(Reader[M]):
    """Hands whole batches to `handle`, which is done with them when it returns."""

    def __init__(
        self,
        link: KafkaLink,
        topic: Topic[M],
        site: str,
        handle: Handle[M],
        *,
        group: str,
        start: Start,
        on_reset: Callable[[], None] | None,
        letters: DeadLetters,
    ) -> None:
        super().__init__(link, topic, site, start=start, on_reset=on_reset, letters=letters)
        self._handle, self.group = handle, group

    async def _take(self, consumer: AIOKafkaConsumer, records: Mapping[int, Sequence[ConsumerRecord]]) -> None:
        read = [record for batch in records.values() for raw in batch if (record := self._record(raw)) is not None]
        if read:
            await self._handle(read)
        self._next |= {p: batch[-1].offset + 1 for p, batch in records.items() if p in self._next}


class LoneWorker(_Worker[M]):
    """The only reader of its group: takes all partitions without membership, goes on from the commits.

    Nobody waits for a session of its dead predecessor; two at once would both do the work.
    """

    def _consumer(self) -> AIOKafkaConsumer:
        return self._link.consumer(group=self.group, fetch_wait_s=self.topic.fetch_wait_s)

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        ours = tuple(range(await self._link.partitions(self.topic, self.site)))
        ends = await self._link.ends(self.name, ours)
        self._check_forward(ends)
        self._assign(consumer, ends)
        known = self._next or await self._committed(consumer, ours)
        if beyond := await self._beyond(consumer, known, ends):
            logger.warning("%s: group %s: commits of %s lie beyond the log", self.name, self.group, beyond)
            self._forget()
            known = {}
        new = {p: ends[p] for p in ours if p not in known}
        self._adopt(consumer, known | await offsets_for(self._start, self._link, consumer, self.name, new), ends)

    async def _take(self, consumer: AIOKafkaConsumer, records: Mapping[int, Sequence[ConsumerRecord]]) -> None:
        """What can't be committed now is with the next batch: then it may come twice."""
        await super()._take(consumer, records)
        try:
            await consumer.commit({TopicPartition(self.name, p): self._next[p] for p in records})
        except KafkaError as error:
            logger.warning("%s: group %s: not committed: %r", self.name, self.group, error)

    async def _committed(self, consumer: AIOKafkaConsumer, partitions: Sequence[int]) -> dict[int, int]:
        found = {p: await consumer.committed(TopicPartition(self.name, p)) for p in partitions}
        return {p: offset for p, offset in found.items() if offset is not None}

    async def _beyond(
        self, consumer: AIOKafkaConsumer, committed: Mapping[int, int], ends: Mapping[int, int]
    ) -> list[int]:
        """The partitions whose log ends before their commit, so it was made in another log.

        On the embedded broker a commit behind the last batch lies beyond the end that it tells: look at that batch.
        """
        doubtful = {p: ends[p] - 1 for p, offset in committed.items() if offset > ends[p] > 0}
        newest = await newest_records(consumer, self.name, doubtful) if doubtful else {}
        ends = dict(ends) | {p: raw.offset + 1 for p, raw in newest.items()}
        return [p for p, offset in committed.items() if offset > ends[p]]


class SharedWorker(_Worker[M]):
    """One of several that share the partitions by group membership.

    `on_assigned` is awaited for partitions gained, before any of their records; `on_lost` for those that another has
    now, so until the new assignment is known two workers may both think that they own one: fence what is published.
    `on_settled` is awaited after every assignment with all that it gives, kept or gained.
    A kept partition goes on where it is, a gained one begins at `start`: nothing is committed.
    """

    def __init__(
        self,
        link: KafkaLink,
        topic: Topic[M],
        site: str,
        handle: Handle[M],
        *,
        group: str,
        start: Start,
        on_assigned: Callable[[Sequence[int]], Awaitable[None]],
        on_lost: Callable[[Sequence[int]], Awaitable[None]],
        on_settled: Callable[[Sequence[int]], Awaitable[None]] | None,
        on_reset: Callable[[], None] | None,
        letters: DeadLetters,
    ) -> None:
        super().__init__(link, topic, site, handle, group=group, start=start, on_reset=on_reset, letters=letters)
        self._on_assigned, self._on_lost, self._on_settled = on_assigned, on_lost, on_settled
        self._given: tuple[int, ...] | None = None  # a new assignment that is not adopted yet
        self._held: frozenset[int] = frozenset()

    @property
    def partitions(self) -> tuple[int, ...]:
        """The partitions that are ours, as far as we know."""
        return tuple(sorted(self._held))

    def is_caught_up(self, partition: int) -> bool:
        """Whether a partition of ours has been read to the end it had when it was assigned or last fell behind."""
        return partition in self._next and self._gate.is_open(partition)

    def _consumer(self) -> AIOKafkaConsumer:
        return self._link.consumer(group=self.group, session_s=SESSION_S, fetch_wait_s=self.topic.fetch_wait_s)

    async def _begin(self, consumer: AIOKafkaConsumer) -> None:
        self._given = None
        consumer.subscribe([self.name], listener=_Listener(self._assigned))

    def _assigned(self, partitions: Sequence[int]) -> None:
        self._given = tuple(sorted(partitions))

    async def _settle(self, consumer: AIOKafkaConsumer) -> None:
        if self._given is None:
            return
        given, self._given = self._given, None
        ends = await self._link.ends(self.name, given) if given else {}
        self._check_forward(ends)
        await self._give_up([p for p in sorted(self._held) if p not in given or p not in self._next])
        gained = [p for p in given if p not in self._held]
        new = {p: ends[p] for p in gained}
        offsets = await offsets_for(self._start, self._link, consumer, self.name, new)
        self._held = frozenset(given)
        if gained:
            await self._on_assigned(gained)
        if self._on_settled is not None:
            await self._on_settled(given)
        if self._given is None and {tp.partition for tp in consumer.assignment()} == set(given):
            self._adopt(consumer, {p: self._next.get(p, offsets.get(p, 0)) for p in given}, ends)

    def _ours(self, records: Mapping[int, Sequence[ConsumerRecord]]) -> dict[int, Sequence[ConsumerRecord]]:
        """None before a new assignment is adopted: until then a kept partition is fetched from its beginning."""
        return super()._ours(records) if self._given is None else {}

    async def _give_up(self, lost: Sequence[int]) -> None:
        self._gate.forget(lost)
        for partition in lost:
            self._next.pop(partition, None)
        self._held -= frozenset(lost)
        if lost:
            await self._on_lost(lost)


class _Listener(ConsumerRebalanceListener):
    """Notes the assignment; the reader adopts it between two polls, where nothing else moves."""

    def __init__(self, assigned: Callable[[Sequence[int]], None]) -> None:
        self._assigned = assigned

    def on_partitions_revoked(self, revoked: set[TopicPartition]) -> None:
        """A kept partition is revoked too, so this says nothing yet."""

    def on_partitions_assigned(self, assigned: set[TopicPartition]) -> None:
        self._assigned([tp.partition for tp in assigned])
