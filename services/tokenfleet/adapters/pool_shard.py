"""Pool shard: a replica's leases and tickets at its site's books, and the books that it owns, over topic `tickets`.

Every replica follows the whole topic, for what it is answered and so that any of them can own a book at once. Which
one does is the matter of a group, whose members read nothing there that counts: an assignment makes them claim.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from msgspec import Struct
from prometheus_client import Counter, Enum, Gauge

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_link import KafkaAwayError
from tokenfleet.adapters.kafka_reading import END, Record, ago
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.topics import TICKETS, partition_of
from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.shard.entries import Entries
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.purse import Purse
from tokenfleet.core.shard.records import At, Holder, ShardClaim
from tokenfleet.core.shard.records import Record as TicketsRecord
from tokenfleet.core.shard.terms import READ_BACK_S

PERIOD_S: Final = 0.04  # how long a turn waits for a record after GAP_S
GAP_S: Final = 0.01  # between two turns: what is read meanwhile is answered together
SEND_TIMEOUT_S: Final = 1.0  # what was not confirmed is written again by its writer's own rules
SWEEP_EVERY_S: Final = 1.0
OUTBOX_MAX: Final = 10_000  # records that wait for a broker; more are dropped, and written again likewise

OWNED = Gauge("tokenfleet_shard_books_owned", "Books (pools, quotas) that this replica owns", ["site"])
REST = Gauge("tokenfleet_shard_lease_units", "Units of a pool's book that this replica may spend", ["book"])
STATE = Enum(
    "tokenfleet_shard_state", "Whether an owner's word is in force", ["book"], states=["live", "degraded", "closed"]
)
IN_LINE = Gauge("tokenfleet_shard_line_tickets", "Requests in line at a pool's book that this replica owns", ["book"])
COUNTED = Gauge(
    "tokenfleet_shard_counted_units", "Units that count against a pool's book that this replica owns", ["book"]
)
DROPPED = Counter("tokenfleet_shard_records_dropped_total", "Records for `tickets` that Kafka didn't confirm", ["site"])

logger = logging.getLogger(__name__)


class BookState(Struct, frozen=True, kw_only=True):
    """A replica's part of a book: what it may spend and how many requests wait here; of one that it owns, what counts
    of its limit and how many tickets of all replicas are in line."""

    book: str
    state: str
    rest_units: int
    waiting: int
    owned: bool
    limit_units: int
    counted_units: int
    in_line: int

    def words(self) -> str:
        """The same in words."""
        said = f"{self.book}: {self.rest_units:,} units, {self.state}, {self.waiting} wait"
        if not self.owned:
            return said
        return f"{said}; owned: {self.counted_units:,} of {self.limit_units:,} units count, {self.in_line} in line"


class Books(Protocol):
    """What a site's books are; see core.site_books."""

    def look(self, now_s: float) -> None:
        """Takes in the tables of now."""
        ...

    def limit_units(self, book: str) -> int:
        """What the book holds in all."""
        ...

    def wanted(self) -> dict[str, int]:
        """The books that a replica asks for although nobody asked it, and for how much."""
        ...

    def entries(self, book: str) -> tuple[Entries, float]:
        """What tells of credit of the book that was spent, and for how long a silent holder's rest counts."""
        ...


class PoolShards:
    """The books of one site in one replica: its `purse`, which decisions spend, and the books that it owns.

    `run` until cancelled. `envelopes` is the number of the replica's last placements envelope, `live` whether
    placements are read at their end, `runs` whether a decision's placement still counts.
    """

    def __init__(
        self,
        kafka: Kafka,
        site: str,
        me: Holder,
        books: Books,
        *,
        secret: bytes,
        envelopes: Callable[[], int],
        live: Callable[[], bool],
        runs: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self.site, self.me = site, me
        self.purse = Purse(me, lambda book, record: self._put(self._partition(book), (record,)))
        self._kafka, self._books, self._secret = kafka, books, secret
        self._envelopes, self._live, self._runs = envelopes, live, runs
        self._owners: dict[str, Owner] = {}  # of all books that the log names
        self._last_claims: dict[int, tuple[ShardClaim, At]] = {}
        self._partitions = 1
        self._owned: frozenset[int] = frozenset()
        self._assignments = 0
        self._outboxes: dict[int, _Outbox] = {}
        self._swept_s = 0.0
        self.told: list[BookState] = []  # `states` of a second ago, for other threads
        self._wake = asyncio.Event()
        self.answered = asyncio.Event()  # an owner has answered for each book that is wanted
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

    def owner(self, book: str) -> Owner | None:
        """The book as this replica knows it, None before the log names it; it speaks only while active."""
        return self._owners.get(book)

    async def run(self) -> None:
        """Follow, own what is assigned, ask and answer."""
        self._partitions = await self._kafka.partitions(TICKETS, self.site)
        self._outboxes = {partition: _Outbox() for partition in range(self._partitions)}
        async with asyncio.TaskGroup() as tasks:
            watched(tasks, self._follower.run(), name=f"follow {self._follower.name}")
            await self._follower.until_caught_up()
            watched(tasks, self._worker.run(), name=f"share {self._worker.name}")
            for partition, outbox in self._outboxes.items():
                watched(tasks, self._send(partition, outbox), name=f"send to {self._follower.name}[{partition}]")
            while True:
                self._turn()
                await asyncio.sleep(GAP_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(PERIOD_S):
                        await self._wake.wait()
                self._wake.clear()

    def _read(self, record: Record[Any]) -> None:
        at, now_s = At(cluster=record.cluster, offset=record.offset), record.read_at_s
        message: TicketsRecord = record.message
        if isinstance(message, ShardClaim):
            self._last_claims[record.partition] = message, at
            names = self._names((record.partition,))
        else:
            names = [message.book]
            self._known(message.book, record.partition, now_s)
        for name in names:
            self._owners[name].read(message, at, now_s=now_s, live=record.live)
            self.purse.read(message, at, name, now_s=now_s)
        self._wake.set()

    def _known(self, book: str, partition: int, now_s: float) -> Owner:
        """The owner of a book: from its first record on we are ready to be it, under the last claim before."""
        if (owner := self._owners.get(book)) is None:
            entries, hold_s = self._books.entries(book)
            owner = self._owners[book] = Owner(
                book, self.me, assignment=self._assignments, secret=self._secret, entries=entries, hold_s=hold_s
            )
            if (last := self._last_claims.get(partition)) is not None:
                owner.read(*last, now_s=now_s, live=False)
            owner.claim(now_s)  # what was claimed for the others is on its way for it too
        return owner

    def _turn(self) -> None:
        now_s = monotonic_s()
        live = self._follower.caught_up and self._live()
        self._books.look(now_s)
        for partition in self._owned:
            self._own(partition, now_s, live=live)
        if self._follower.caught_up:  # else an answer could lie in what is still to be read
            self._ask(now_s)
            for name, waiting in self.purse.waiting.items():
                self._put(self._partition(name), waiting.turn(now_s))
        if now_s - self._swept_s >= SWEEP_EVERY_S:
            self._swept_s = now_s
            self.purse.sweep(self._runs)
            self._show()

    def _ask(self, now_s: float) -> None:
        wanted = self._books.wanted()
        for name in wanted:
            self.purse.follow(name)
        for name, leases in self.purse.leases.items():
            wants = max(wanted.get(name, 0), 2 * leases.asked)
            if leases.due(now_s) and (wants or not leases.idle):
                request = leases.request(now_s, wants=wants, envelopes=self._envelopes())
                self._put(self._partition(name), (request,))
        if all(self.purse.leases[name].answered for name in wanted):
            self.answered.set()

    def _own(self, partition: int, now_s: float, *, live: bool) -> None:
        names = self._names((partition,))
        if any(self._owners[name].claim_due(now_s) for name in names):
            self._claim(partition, now_s)
        for name in names:
            owner = self._owners[name]
            owner.limit_units = self._books.limit_units(name)
            self._put(partition, owner.turn(now_s, live=live))

    def _claim(self, partition: int, now_s: float) -> None:
        for name in self._names((partition,)):
            self._owners[name].claim(now_s)
        self._put(partition, (ShardClaim(owner=self.me, assignment=self._assignments),))

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
        """The books that lie there, of those that the log names."""
        wanted = frozenset(partitions)
        return [name for name in self._owners if self._partition(name) in wanted]

    def _partition(self, book: str) -> int:
        return partition_of(book, self._partitions)

    def states(self) -> list[BookState]:
        """This replica's part of each pool's book."""
        now_s, found = monotonic_s(), list[BookState]()
        for name in self._books.wanted():
            owner = self._owners.get(name)
            owned = owner is not None and owner.active
            told = BookState(
                book=name,
                state=self.purse.state(name, now_s),
                rest_units=self.purse.rest(name, now_s),
                waiting=len(self.purse.waiting.get(name, ())),
                owned=owned,
                limit_units=owner.limit_units if owner is not None and owned else 0,
                counted_units=owner.total_units() if owner is not None and owned else 0,
                in_line=len(owner.line) if owner is not None and owned else 0,
            )
            found.append(told)
        return found

    def _show(self) -> None:
        OWNED.labels(self.site).set(len(self.owned))
        self.told = self.states()
        for each in self.told:
            REST.labels(each.book).set(each.rest_units)
            STATE.labels(each.book).state(each.state)
            IN_LINE.labels(each.book).set(each.in_line)
            COUNTED.labels(each.book).set(each.counted_units)

    def _put(self, partition: int, records: Iterable[TicketsRecord]) -> None:
        if (outbox := self._outboxes.get(partition)) is not None:
            DROPPED.labels(self.site).inc(outbox.put(records))

    async def _send(self, partition: int, outbox: "_Outbox") -> None:
        """One batch at a time, so that records lie in the order in which they were written."""
        while True:
            batch = await outbox.take()
            try:
                await self._kafka.send(TICKETS, self.site, batch, partition=partition, timeout_s=SEND_TIMEOUT_S)
            except (KafkaAwayError, BadRecordError) as error:
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
