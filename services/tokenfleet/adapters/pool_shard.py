"""Pool shard: a replica's leases and tickets at its site's books, and the books that it owns, over topic `tickets`.

Every replica follows the whole topic, for what it is answered and so that any of them can own a book at once. Which
one does is the matter of a group, whose members read nothing there that counts: an assignment makes them claim.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct
from prometheus_client import Counter, Gauge

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reading import END, Record, ago
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.topics import TICKETS, partition_of
from tokenfleet.core.shard.entries import Entries
from tokenfleet.core.shard.leases import Leases
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.records import At, Holder
from tokenfleet.core.shard.records import Record as TicketsRecord
from tokenfleet.core.shard.terms import READ_BACK_S, SILENT_HOLD_S
from tokenfleet.core.shard.waiting import Waiting

PERIOD_S: Final = 0.05  # the longest time between two turns; a record makes one at once
SEND_TIMEOUT_S: Final = 1.0  # what was not confirmed is written again by its writer's own rules
OUTBOX_MAX: Final = 10_000  # records that wait for a broker; more are dropped, and written again likewise

OWNED = Gauge("tokenfleet_shard_books_owned", "Books (pools, quotas) that this replica owns", ["site"])
DROPPED = Counter("tokenfleet_shard_records_dropped_total", "Records for `tickets` that Kafka didn't confirm", ["site"])

logger = logging.getLogger(__name__)


class Terms(Struct, frozen=True, kw_only=True):
    """One book: how many units there are (⌊ceiling × capacity⌋, or requests a minute), and what placements tell of it.

    `hold_s` is how long the rest of a silent holder counts. `quota`: nobody waits for it, and what is spent of it
    without an owner does not come back.
    """

    limit_units: Callable[[], int]
    entries: Entries
    hold_s: float = SILENT_HOLD_S
    quota: bool = False


class PoolShards:
    """The books of one site in one replica. `run` until cancelled; `leases` and `waiting` are what decisions use.

    `envelopes` is the number of the replica's last placements envelope, `live` whether placements are read at their
    end. `wants` is how many units of a book to ask for, beside what was lately asked of it.
    """

    def __init__(
        self,
        kafka: Kafka,
        site: str,
        me: Holder,
        books: dict[str, Terms],
        *,
        secret: bytes,
        envelopes: Callable[[], int],
        live: Callable[[], bool],
        wants: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.site, self.me = site, me
        self._kafka, self._envelopes, self._live, self._wants, self._books = kafka, envelopes, live, wants, books
        self.leases = {name: Leases(name, me, once=terms.quota) for name, terms in books.items()}
        self.waiting = {name: Waiting(name, me) for name, terms in books.items() if not terms.quota}
        self._owners = {
            name: Owner(name, me, assignment=0, secret=secret, entries=terms.entries, hold_s=terms.hold_s)
            for name, terms in books.items()
        }
        self._by_partition: dict[int, list[str]] = {}
        self._owned: frozenset[int] = frozenset()
        self._assignments = 0
        self._outboxes: dict[int, _Outbox] = {}
        self._wake = asyncio.Event()
        self._follower = kafka.follower(TICKETS, site, self._read, start=ago(READ_BACK_S))
        self._worker = kafka.shared_worker(
            TICKETS,
            site,
            _ignore,
            group=f"tokenfleet-shard-{site}",
            start=END,
            on_assigned=_ignore,
            on_lost=self._lost,
            on_settled=self._assigned,
        )

    @property
    def owned(self) -> list[str]:
        """The books whose owner this replica is, by the log."""
        return [name for name in self._names(self._owned) if self._owners[name].active]

    def owner(self, book: str) -> Owner:
        """The book as this replica knows it; it speaks only while active."""
        return self._owners[book]

    def append(self, book: str, *records: TicketsRecord) -> None:
        """Write records of a book, in order; called with what `leases` and `waiting` return."""
        self._put(self._partition(book), records)

    async def run(self) -> None:
        """Follow, own what is assigned, ask and answer."""
        count = await self._kafka.partitions(TICKETS, self.site)
        self._by_partition = {p: [name for name in self._books if partition_of(name, count) == p] for p in range(count)}
        self._outboxes = {p: _Outbox() for p in range(count)}
        async with asyncio.TaskGroup() as tasks:
            watched(tasks, self._follower.run(), name=f"follow {self._follower.name}")
            await self._follower.until_caught_up()
            watched(tasks, self._worker.run(), name=f"share {self._worker.name}")
            for partition, outbox in self._outboxes.items():
                watched(tasks, self._send(partition, outbox), name=f"send to {self._follower.name}[{partition}]")
            while True:
                self._turn()
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._wake.wait()
                self._wake.clear()

    def _read(self, record: Record[Any]) -> None:
        at, now_s = At(cluster=record.cluster, offset=record.offset), record.read_at_s
        message: TicketsRecord = record.message
        book: str | None = getattr(message, "book", None)
        for name in self._by_partition.get(record.partition, ()):
            if book is None or book == name:
                self._owners[name].read(message, at, now_s=now_s, live=record.live)
                self.leases[name].read(message, at, now_s=now_s)
                if name in self.waiting:
                    self.waiting[name].read(message, at, now_s=now_s)
        self._wake.set()

    def _turn(self) -> None:
        now_s = monotonic_s()
        live = self._follower.caught_up and self._live()
        for partition in self._owned:
            self._own(partition, now_s, live=live)
        if self._follower.caught_up:  # else an answer could lie in what is still to be read
            for name, leases in self.leases.items():
                wants = max(self._wants(name), 2 * leases.asked)
                if leases.due(now_s) and (wants or not leases.idle):
                    self.append(name, leases.request(now_s, wants=wants, envelopes=self._envelopes()))
            for name, waiting in self.waiting.items():
                self.append(name, *waiting.turn(now_s))
        OWNED.labels(self.site).set(len(self.owned))

    def _own(self, partition: int, now_s: float, *, live: bool) -> None:
        names = self._names((partition,))
        if any(self._owners[name].claim_due(now_s) for name in names):
            self._claim(partition, now_s)
        for name in names:
            owner = self._owners[name]
            owner.limit_units = self._books[name].limit_units()
            self._put(partition, owner.turn(now_s, live=live))

    def _claim(self, partition: int, now_s: float) -> None:
        claims = {self._owners[name].claim(now_s) for name in self._names((partition,))}
        self._put(partition, claims)

    async def _assigned(self, partitions: Sequence[int]) -> None:
        self._assignments += 1
        self._owned = frozenset(partitions)
        for partition in partitions:
            for name in self._names((partition,)):
                self._owners[name].assignment = self._assignments
            self._claim(partition, monotonic_s())
        logger.info("%s: owns %s", self.site, ", ".join(sorted(self._names(partitions))) or "no book")
        self._wake.set()

    async def _lost(self, partitions: Sequence[int]) -> None:
        self._owned -= frozenset(partitions)

    def _names(self, partitions: Iterable[int]) -> list[str]:
        return [name for partition in partitions for name in self._by_partition.get(partition, ())]

    def _partition(self, book: str) -> int:
        return partition_of(book, max(1, len(self._by_partition)))

    def _put(self, partition: int, records: Iterable[TicketsRecord]) -> None:
        if (outbox := self._outboxes.get(partition)) is not None:
            DROPPED.labels(self.site).inc(outbox.put(records))

    async def _send(self, partition: int, outbox: "_Outbox") -> None:
        """One batch at a time, so that records lie in the order in which they were written."""
        while True:
            batch = await outbox.take()
            try:
                await self._kafka.send(TICKETS, self.site, batch, partition=partition, timeout_s=SEND_TIMEOUT_S)
            except KafkaAwayError as error:
                DROPPED.labels(self.site).inc(len(batch))
                logger.warning("%s: %d records for tickets were not confirmed: %s", self.site, len(batch), error)


class _Outbox:
    """What waits to be written to one partition."""

    def __init__(self) -> None:
        self._records: list[TicketsRecord] = []
        self._some = asyncio.Event()

    def put(self, records: Iterable[TicketsRecord]) -> int:
        """How many found no room."""
        self._records.extend(records)
        lost = max(0, len(self._records) - OUTBOX_MAX)
        del self._records[OUTBOX_MAX:]
        if self._records:
            self._some.set()
        return lost

    async def take(self) -> list[TicketsRecord]:
        """All of it, once there is some."""
        await self._some.wait()
        self._some.clear()
        taken, self._records = self._records, []
        return taken


async def _ignore(_: Sequence[Any]) -> None:
    """The follower reads what counts."""
