"""What TokenFleet uses of faust-streaming 0.15.3, whose own annotations are partly unknown to pyright's strict mode."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, Literal, NoReturn

class TP:
    topic: str
    partition: int

class Message:
    topic: str
    partition: int
    offset: int
    timestamp: float
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] | Mapping[str, bytes] | None
    tp: TP

class Event:
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    message: Message
    acked: bool
    def ack(self) -> bool: ...

class Stream:
    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def events(self) -> AsyncIterator[Event]: ...
    def items(self) -> AsyncIterator[tuple[bytes | None, bytes]]: ...
    def noack(self) -> Stream: ...

class Topic:
    topics: list[str]
    def get_topic_name(self) -> str: ...
    async def send(
        self, *, key: bytes | None = None, value: bytes | None = None, headers: Mapping[str, bytes] | None = None
    ) -> Awaitable[object]: ...

class Agent:
    name: str

class Service:
    log: logging.Logger
    started: bool
    crashed: bool
    should_stop: bool
    crash_reason: BaseException | None
    async def start(self) -> None: ...
    async def maybe_start(self) -> bool: ...
    async def stop(self) -> None: ...
    async def crash(self, reason: BaseException) -> None: ...
    async def on_start(self) -> None: ...
    async def on_started(self) -> None: ...
    async def on_stop(self) -> None: ...
    async def on_shutdown(self) -> None: ...
    async def sleep(self, n: timedelta | float) -> None: ...
    def add_future(self, coro: Coroutine[Any, Any, None]) -> asyncio.Future[None]: ...
    def set_shutdown(self) -> None: ...

class App(Service):
    def __init__(
        self,
        id: str,
        *,
        broker: str | list[str] = ...,
        store: str = ...,
        datadir: str = ...,
        tabledir: str = ...,
        key_serializer: Literal["raw"] = ...,
        value_serializer: Literal["raw"] = ...,
        broker_session_timeout: float = ...,
        broker_heartbeat_interval: float = ...,
        broker_request_timeout: float = ...,
        broker_commit_interval: float = ...,
        broker_commit_every: int = ...,
        broker_max_poll_records: int | None = ...,
        broker_max_poll_interval: float = ...,
        consumer_auto_offset_reset: Literal["earliest", "latest"] = ...,
        producer_acks: int = ...,
        stream_wait_empty: bool = ...,
        stream_buffer_maxsize: int = ...,
        topic_allow_declare: bool = ...,
        topic_disable_leader: bool = ...,
        topic_partitions: int = ...,
        topic_replication_factor: int = ...,
        web_enabled: bool = ...,
        autodiscover: bool = ...,
        logging_config: Mapping[str, Any] | None = ...,
    ) -> None: ...
    def topic(
        self,
        *topics: str,
        key_type: type[bytes] = ...,
        value_type: type[bytes] = ...,
        key_serializer: Literal["raw"] = ...,
        value_serializer: Literal["raw"] = ...,
        partitions: int | None = ...,
        internal: bool = ...,
    ) -> Topic: ...
    def agent(
        self, channel: Topic, *, name: str | None = ..., concurrency: Literal[1] = 1
    ) -> Callable[[Callable[[Stream], Coroutine[Any, Any, None]]], Agent]: ...
    def timer(
        self, interval: timedelta | float, on_leader: bool = False, name: str | None = None
    ) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], Callable[[], Coroutine[Any, Any, None]]]: ...
    def finalize(self) -> None: ...
    def main(self) -> NoReturn: ...

class Worker(Service):
    def __init__(
        self,
        app: App,
        *services: Service,
        debug: bool = False,
        quiet: bool = False,
        loglevel: str | int | None = None,
        logfile: str | None = None,
        redirect_stdouts: bool | None = None,
        override_logging: bool = True,
        blocking_timeout: float | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None: ...
    def execute_from_commandline(self) -> NoReturn: ...
    def install_signal_handlers(self) -> None: ...
    def stop_and_shutdown(self) -> None: ...
