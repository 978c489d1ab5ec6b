"""What TokenFleet uses of aiokafka 0.14, which ships no types that pyright's strict mode can use."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from aiokafka.producer.message_accumulator import BatchBuilder

class TopicPartition(NamedTuple):
    topic: str
    partition: int

class OffsetAndTimestamp(NamedTuple):
    offset: int
    timestamp: int | None

class RecordMetadata(NamedTuple):
    topic: str
    partition: int
    topic_partition: TopicPartition
    offset: int
    timestamp: int | None
    timestamp_type: int
    log_start_offset: int | None

class ConsumerRecord:
    topic: str
    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes]]

class AIOKafkaProducer:
    def __init__(
        self,
        *,
        bootstrap_servers: str | list[str],
        client_id: str | None = None,
        acks: int | str = ...,
        enable_idempotence: bool = False,
        max_batch_size: int = 16384,
        max_request_size: int = 1048576,
        request_timeout_ms: int = 40000,
        retry_backoff_ms: int = 100,
        linger_ms: int = 0,
    ) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def create_batch(self) -> BatchBuilder: ...
    async def send_batch(
        self, batch: BatchBuilder, topic: str, *, partition: int
    ) -> asyncio.Future[RecordMetadata]: ...

class _Client:
    async def close(self) -> None: ...

class AIOKafkaConsumer:
    _client: _Client
    def __init__(
        self,
        *topics: str,
        bootstrap_servers: str | list[str],
        client_id: str = ...,
        group_id: str | None = None,
        fetch_max_wait_ms: int = 500,
        max_partition_fetch_bytes: int = ...,
        request_timeout_ms: int = 40000,
        retry_backoff_ms: int = 100,
        auto_offset_reset: str = "latest",
        enable_auto_commit: bool = True,
        session_timeout_ms: int = 10000,
        heartbeat_interval_ms: int = 3000,
        rebalance_timeout_ms: int | None = None,
        max_poll_interval_ms: int = 300000,
        partition_assignment_strategy: Sequence[type] = ...,
    ) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def assign(self, partitions: Iterable[TopicPartition]) -> None: ...
    def assignment(self) -> set[TopicPartition]: ...
    def subscribe(
        self, topics: Sequence[str] = ..., pattern: str | None = None, listener: object | None = None
    ) -> None: ...
    def seek(self, partition: TopicPartition, offset: int) -> None: ...
    async def position(self, partition: TopicPartition) -> int: ...
    async def getmany(
        self, *partitions: TopicPartition, timeout_ms: int = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]: ...
    async def commit(self, offsets: Mapping[TopicPartition, int] | None = None) -> None: ...
    async def committed(self, partition: TopicPartition) -> int | None: ...
    async def beginning_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...
    async def end_offsets(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]: ...
    async def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]: ...
