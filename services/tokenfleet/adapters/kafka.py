"""Kafka: what a process needs of it: send records, follow a topic, work through one alone or with others.

async with Kafka(settings.kafka, client_id="decide-1") as kafka:
    follower = kafka.follower(CAPACITY, "b", site.heard, start=LAST)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follower.run())
        await follower.until_caught_up()
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from msgspec import Struct

from tokenfleet.adapters.deadletter import DeadLetters
from tokenfleet.adapters.kafka_follower import Follower
from tokenfleet.adapters.kafka_link import KafkaLink
from tokenfleet.adapters.kafka_reading import BEGINNING, END, Record, Start
from tokenfleet.adapters.kafka_workers import Handle, LoneWorker, SharedWorker
from tokenfleet.adapters.topics import DEADLETTER, Topic
from tokenfleet.core.deadletters import DeadLetter

M = TypeVar("M", bound=Struct)


class Kafka(KafkaLink):
    """One process's Kafka: a link, the readers made on it, and the dead letters of all of them."""

    def __init__(self, bootstrap: str, *, client_id: str, wait_max_s: float = 30.0) -> None:
        super().__init__(bootstrap, client_id=client_id, wait_max_s=wait_max_s)
        self.dead_letters = DeadLetters(self._send_letters, by=client_id)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._tasks.append(asyncio.create_task(self.dead_letters.run()))
        return self

    def follower(
        self,
        topic: Topic[M],
        site: str,
        apply: Callable[[Record[M]], None],
        *,
        start: Start = END,
        partitions: Sequence[int] | None = None,
        on_caught_up: Callable[[], None] | None = None,
        on_reset: Callable[[], None] | None = None,
    ) -> Follower[M]:
        """A reader of all (or the given) partitions for a table in memory; `await follower.run()` reads.

        `on_caught_up` is called each time it has read to the end. `on_reset` is called before the log is read anew
        because it went back or another cluster answers: what the table holds of it is void.
        """
        return Follower(
            self,
            topic,
            site,
            apply,
            start=start,
            partitions=partitions,
            on_caught_up=on_caught_up,
            on_reset=on_reset,
            letters=self.dead_letters,
        )

    def lone_worker(
        self,
        topic: Topic[M],
        site: str,
        handle: Handle[M],
        *,
        group: str,
        start: Start = BEGINNING,
        on_reset: Callable[[], None] | None = None,
    ) -> LoneWorker[M]:
        """A worker that is alone in its group; goes on from its commits, at first from `start`.

        `handle` is awaited with a batch of records, all partitions mixed, each partition's in order. When it returns
        they are committed; when it raises they come again.
        """
        return LoneWorker(
            self, topic, site, handle, group=group, start=start, on_reset=on_reset, letters=self.dead_letters
        )

    def shared_worker(
        self,
        topic: Topic[M],
        site: str,
        handle: Handle[M],
        *,
        group: str,
        on_assigned: Callable[[Sequence[int]], Awaitable[None]],
        on_lost: Callable[[Sequence[int]], Awaitable[None]],
        on_settled: Callable[[Sequence[int]], Awaitable[None]] | None = None,
        start: Start = BEGINNING,
        on_reset: Callable[[], None] | None = None,
    ) -> SharedWorker[M]:
        """One of several workers that share a topic's partitions; see SharedWorker."""
        return SharedWorker(
            self,
            topic,
            site,
            handle,
            group=group,
            start=start,
            on_assigned=on_assigned,
            on_lost=on_lost,
            on_settled=on_settled,
            on_reset=on_reset,
            letters=self.dead_letters,
        )

    async def _send_letters(self, letters: list[DeadLetter]) -> None:
        await self.send(DEADLETTER, "", letters, partition=0)
