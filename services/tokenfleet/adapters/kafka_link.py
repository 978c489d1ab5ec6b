"""Kafka link: one process's connection to the brokers: which cluster, which topics, where logs begin and end; sending.

Readers build on it (`kafka_follower`, `kafka_workers`); `kafka` is what processes use. aiokafka is imported by
modules named kafka_* alone, and by `aiokafka_mended`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaConnectionError, KafkaError
from aiokafka.producer.message_accumulator import BatchBuilder
from msgspec import Struct

from tokenfleet.adapters.aiokafka_mended import mend
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.codec import Header, encode, headers_of
from tokenfleet.adapters.topics import RECORD_BYTES_MAX, Topic, partition_of
from tokenfleet.core.errors import BadRecordError, SetupError

M = TypeVar("M", bound=Struct)
T = TypeVar("T")

SEND_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 3.0  # for the end of a log; a broker that needs longer counts as away
WATCH_EVERY_S = 2.0  # how often cluster id and ends are compared: another log is noticed this fast
REQUEST_TIMEOUT_S = 5.0  # ends requests on a connection whose other side is gone without a word
BATCH_BYTES_MAX = RECORD_BYTES_MAX + 4096  # room for one largest record with its key and headers
PRODUCE_TIMEOUT_S = SEND_TIMEOUT_S + 0.5  # then a batch is given up: what nobody waits for is not to be written later
STOP_MAX_S = 5.0
CREATED_WITHIN_S = 0.5  # a topic is seen a moment before all its partitions are made

mend()

logger = logging.getLogger(__name__)


class KafkaAwayError(ConnectionError):
    """The brokers did not answer in time, or refused; the record may or may not have been written."""


class KafkaLink:
    """One process's connection. Use as an async context manager; entering waits for the brokers.

    Raises SetupError on entry when no broker answers for `wait_max_s`.
    """

    def __init__(self, bootstrap: str, *, client_id: str, wait_max_s: float = 30.0) -> None:
        self.bootstrap = bootstrap
        self.client_id = client_id
        self.cluster_id = ""
        self.connected = False
        self._wait_max_s = wait_max_s
        self._sure = True  # that the brokers who answer now have our topics
        self._making_sure = asyncio.Lock()
        self._counts: dict[str, int] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._producer = AIOKafkaProducer(
            bootstrap_servers=self.bootstrap,
            client_id=self.client_id,
            acks="all",
            enable_idempotence=False,  # records are idempotent by themselves, and the embedded broker lacks it
            max_batch_size=BATCH_BYTES_MAX,
            max_request_size=2 * BATCH_BYTES_MAX,
            request_timeout_ms=_ms(PRODUCE_TIMEOUT_S),
        )
        self._admin = AIOKafkaAdminClient(
            bootstrap_servers=self.bootstrap, client_id=self.client_id, request_timeout_ms=_ms(REQUEST_TIMEOUT_S)
        )
        self._asker = self.consumer()  # never fetches, so its questions wait behind nothing
        try:
            await self._connect()
        except BaseException:
            await self._disconnect()
            raise
        self._tasks = [asyncio.create_task(self._watch())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._disconnect()

    async def send(
        self,
        topic: Topic[M],
        site: str,
        messages: Sequence[M],
        *,
        partition: int | None = None,
        key: str = "",
        timeout_s: float = SEND_TIMEOUT_S,
        traceparent: str = "",
    ) -> int:
        """Write messages to one partition and return the offset of the first; acknowledged by all in-sync replicas.

        They go in one batch when they fit (BATCH_BYTES_MAX), else in several. Without `partition` it is the one of
        `key`; compacted topics need a key.
        Raises BadRecordError for what can't be encoded, SetupError for a missing topic or partition, KafkaAwayError
        when the brokers did not confirm within `timeout_s`: then it may still be written later.
        """
        values = [encode(topic, message) for message in messages]
        return await self.send_values(
            topic, site, values, partition=partition, key=key, timeout_s=timeout_s, traceparent=traceparent
        )

    async def send_values(
        self,
        topic: Topic[Any],
        site: str,
        values: Sequence[bytes],
        *,
        partition: int | None = None,
        key: str = "",
        timeout_s: float = SEND_TIMEOUT_S,
        traceparent: str = "",
    ) -> int:
        """`send` for values that are encoded already (the spool's)."""
        if topic.compacted and not key:
            raise BadRecordError(f"{topic.name}: a compacted topic needs a key")
        try:
            async with asyncio.timeout(timeout_s):
                await self._make_sure(topic.at(site))
                count = await self.partitions(topic, site)
                number = partition_of(key, count) if partition is None else partition
                if not 0 <= number < count:
                    raise SetupError(f"topic {topic.at(site)} has {count} partitions, so no partition {number}")
                first = -1
                for batch in self._batches(values, key.encode() or None, list(headers_of(topic, traceparent))):
                    sent = await self._producer.send_batch(batch, topic.at(site), partition=number)
                    offset = (await sent).offset
                    first = offset if first < 0 else first
                return first
        except (KafkaError, OSError, TimeoutError) as error:
            self._sure = False
            raise KafkaAwayError(f"{topic.at(site)}: not confirmed within {timeout_s} s: {error!r}") from error

    async def partitions(self, topic: Topic[Any], site: str) -> int:
        """How many partitions a topic has on the brokers.

        Raises SetupError, with the remedy, when it does not exist; KafkaAwayError.
        """
        name = topic.at(site)
        if name not in self._counts:
            await self._list_topics()
        if name not in self._counts:
            raise SetupError(f"topic {name} does not exist; create it with `tokenfleet topics apply`")
        return self._counts[name]

    async def ends(self, name: str, partitions: Iterable[int]) -> dict[int, int]:
        """The end of each partition's log. The embedded broker tells the last batch's base + 1.

        Raises KafkaAwayError.
        """
        found = await self._ask(self._asker.end_offsets([TopicPartition(name, p) for p in partitions]))
        return {tp.partition: offset for tp, offset in found.items()}

    async def begins(self, name: str, partitions: Iterable[int]) -> dict[int, int]:
        """The first offset that each partition still keeps. Raises KafkaAwayError."""
        found = await self._ask(self._asker.beginning_offsets([TopicPartition(name, p) for p in partitions]))
        return {tp.partition: offset for tp, offset in found.items()}

    async def offsets_at(self, name: str, times_ms: Mapping[int, int]) -> dict[int, int | None]:
        """The first offset of each partition at or after a broker time; None when all records are older.

        Raises KafkaAwayError.
        """
        asked = {TopicPartition(name, p): ms for p, ms in times_ms.items()}
        found = await self._ask(self._asker.offsets_for_times(asked))
        # The embedded broker answers offset 0 with timestamp -1 where Kafka answers nothing.
        return {tp.partition: at.offset if at and at.timestamp != -1 else None for tp, at in found.items()}

    def consumer(self, *, group: str = "", session_s: float = 6.0, fetch_wait_s: float = 0.1) -> AIOKafkaConsumer:
        """A consumer that commits only when told to, not yet started; its other requests wait behind its fetches."""
        return AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            client_id=self.client_id,
            group_id=group or None,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            fetch_max_wait_ms=_ms(fetch_wait_s),
            max_partition_fetch_bytes=BATCH_BYTES_MAX,
            request_timeout_ms=_ms(REQUEST_TIMEOUT_S),
            session_timeout_ms=_ms(session_s),
            heartbeat_interval_ms=_ms(session_s / 3),
        )

    async def _connect(self) -> None:
        began_s = monotonic_s()
        for start in (self._admin.start, self._producer.start, self._asker.start):
            await self._until_started(start, give_up_s=began_s + self._wait_max_s)
        await self._until_started(self._learn_cluster_id, give_up_s=began_s + self._wait_max_s)
        await self._until_started(self._list_topics, give_up_s=began_s + self._wait_max_s)

    async def _until_started(self, start: Callable[[], Awaitable[object]], *, give_up_s: float) -> None:
        while True:
            try:
                await start()
                return
            except (KafkaError, OSError) as error:
                if monotonic_s() > give_up_s:
                    raise SetupError(no_broker(self.bootstrap, error)) from error
                await asyncio.sleep(0.2)

    async def _disconnect(self) -> None:
        for stop in (self._producer.stop, self._admin.close):
            try:
                async with asyncio.timeout(STOP_MAX_S):
                    await stop()
            except (KafkaError, OSError, TimeoutError, AttributeError) as error:  # AttributeError: never started
                logger.info("kafka: stopping: %r", error)
        await stop_consumer(self._asker)

    async def _watch(self) -> None:
        """Keep `cluster_id` and `connected` current."""
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                cluster_id = await self._ask_cluster_id()
            except KafkaAwayError:
                self.connected = self._sure = False
                continue
            self._note_cluster(cluster_id)
            self.connected = True

    def _note_cluster(self, cluster_id: str) -> None:
        if cluster_id != self.cluster_id:
            logger.warning("kafka: another cluster answers: %s after %s", cluster_id, self.cluster_id)
            self.cluster_id, self._sure = cluster_id, False
            self._counts.clear()  # its topics may have another shape

    async def _make_sure(self, name: str) -> None:
        """After a doubt, write nothing before the topic is seen again. Raises KafkaAwayError while it is not.

        The embedded broker takes records of topics that it does not have yet; their creation then breaks the topic.
        """
        async with self._making_sure:
            if self._sure:
                return
            before = self.cluster_id
            self._note_cluster(await self._ask_cluster_id())
            await self._list_topics()
            if name not in self._counts:
                raise KafkaAwayError(f"{name} is not there again yet")
            if self.cluster_id != before:
                await asyncio.sleep(CREATED_WITHIN_S)
            self._sure = True

    async def _learn_cluster_id(self) -> None:
        self.cluster_id = await self._ask_cluster_id()

    async def _ask_cluster_id(self) -> str:
        found = await self._ask(self._admin.describe_cluster())
        self.connected = True
        return str(found["cluster_id"])

    async def _list_topics(self) -> None:
        """All topics at once: asking for one by name creates it where the brokers permit that."""
        found = await self._ask(self._admin.describe_topics())
        self._counts = {str(topic["topic"]): len(topic["partitions"]) for topic in found if not topic["error_code"]}

    async def _ask(self, question: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await question
        except (KafkaError, OSError, TimeoutError) as error:
            raise KafkaAwayError(f"kafka at {self.bootstrap} did not answer: {error!r}") from error

    def _batches(self, values: Sequence[bytes], key: bytes | None, headers: list[Header]) -> Iterable[BatchBuilder]:
        batch = self._producer.create_batch()
        for value in values:
            # A batch takes its first record whatever its size; `encode` has bounded it.
            if batch.append(timestamp=None, key=key, value=value, headers=headers) is None:
                yield batch
                batch = self._producer.create_batch()
                batch.append(timestamp=None, key=key, value=value, headers=headers)
        if batch.record_count():
            yield batch


async def stop_consumer(consumer: AIOKafkaConsumer) -> None:
    """Stop a consumer, whatever state it is in, and never end the caller by it."""
    try:
        async with asyncio.timeout(STOP_MAX_S):
            await consumer.stop()
    except asyncio.CancelledError:
        # aiokafka cancels its own fetch task and awaits it unguarded (fetcher.py, close): not our cancellation.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        await consumer._client.close()  # pyright: ignore[reportPrivateUsage]  # what stop() did not get to
    except (KafkaError, OSError, TimeoutError) as error:
        logger.info("kafka: stopping a consumer: %r", error)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def no_broker(bootstrap: str, error: Exception) -> str:
    """Why nothing came of asking the broker, and what helps."""
    if isinstance(error, KafkaConnectionError):  # its own words list sockets
        return f"no Kafka broker answers at {bootstrap}; start it, or give the address of one that runs"
    return f"the Kafka broker at {bootstrap} did not do what was asked: {error}"
