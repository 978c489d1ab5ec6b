"""Batch tickets: the part of one replica in the tickets of batch work that wait in PostgreSQL.

A hand-in, use or end is appended to a spool before anybody is answered and brought to its row behind the answer: no
call waits for PostgreSQL. Each second the replica looks which tickets are granted; the owner of a pool grants the next.
While PostgreSQL is away the site takes no tickets in (`Tickets.closed`), and what is spooled waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from prometheus_client import Counter, Gauge

from tokenfleet.adapters.batch_store import BatchStore, PoolTickets, Turn, none_waits
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.postgres import PostgresAwayError, RowsRefusedError
from tokenfleet.adapters.running import watched
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.spool_segment import Spooled
from tokenfleet.core.pool import PoolView
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.grants import Room, next_grants, room_of
from tokenfleet.core.slomax.tickets import HandedIn, Key, TicketEvent
from tokenfleet.core.ticketed import BATCH

LANE: Final = "batch_tickets"
SPOOL_BYTES_MAX: Final = 64 * 1024**2  # a quarter of a million tickets that PostgreSQL has yet to take
SPOOL_SHARE_MAX: Final = 0.9  # of it for tickets; the rest is kept for uses and ends
CHUNK_BYTES: Final = 256 * 1024  # about a thousand tickets in a transaction
LINGER_S: Final = 0.05
RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
LOOK_EVERY_S: Final = 1.0
OFF_LOOK_EVERY_S: Final = 0.1  # whether a policy wants tickets by now: a replica that starts reads it in between
COUNT_EVERY_S: Final = 5.0  # what waits is summed up over all rows
COUNT_SHARE_MAX: Final = 0.02  # of the time is spent on that, unless it would be older than
COUNT_AGE_MAX_S: Final = 60.0

WAITING = Gauge("tokenfleet_batch_tickets_waiting", "Tickets of batch work that wait in PostgreSQL", ["model"])
WAITING_S = Gauge("tokenfleet_batch_gpu_seconds_waiting", "GPU seconds of tickets that can be in time", ["model"])
FIRST_LEFT = Gauge(
    "tokenfleet_batch_first_deadline_seconds", "Time to the first deadline of those that wait", ["model"]
)
RATE = Gauge("tokenfleet_batch_drain_rate", "GPU seconds of batch work that end a second while some waits", ["model"])
OUT = Gauge("tokenfleet_batch_grants_out", "Tickets that are granted and not used yet", ["site"])
GRANTED = Counter("tokenfleet_batch_granted_total", "Grants made by this replica", ["model"])
UNUSED = Counter("tokenfleet_batch_unused_total", "Grants that nobody came for in time", ["model"])
MISSED = Counter("tokenfleet_batch_missed_total", "Tickets that expired, or ended past their deadlines")
FELL_BACK = Counter("tokenfleet_batch_fell_back_total", "Batch requests that found no tickets to wait by", ["why"])
REFUSED = Counter("tokenfleet_batch_refused_rows_total", "Tickets that PostgreSQL refused for what they hold")
SPOOLED = Gauge("tokenfleet_batch_spooled", "Hand-ins, uses and ends on their way to PostgreSQL")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(TicketEvent)

log = logging.getLogger(__name__)


class BatchState(Struct, frozen=True, kw_only=True):
    """One pool's tickets, as people are told: `rate` is None before it is measured, `first_left_s` when none waits;
    `closed` says why none is taken in."""

    model: str
    waiting: int
    waiting_gpu_s: float
    first_left_s: float | None
    rate: float | None
    owned: bool
    closed: str


class BatchTickets:
    """`run` until cancelled. `me` names this life of this replica. `owns` says of a model whether the log makes this
    replica the owner of its pool's book, None where no book is shared: then the first to claim it owns it. `queued`
    is how many interactive requests wait in the owner's line: batch work has no turn before them."""

    def __init__(
        self,
        site: Site,
        store: BatchStore,
        spool: Spool,
        *,
        me: str,
        owns: Callable[[str], bool | None],
        queued: Callable[[str], int],
    ) -> None:
        self._site, self._store, self._spool = site, store, spool
        self._me, self._owns, self._queued = me, owns, queued
        [self._lane] = spool.lanes
        self._wake = asyncio.Event()
        self._wake.set()  # what a former life left is waiting
        self._looked = asyncio.Event()
        self._epochs: dict[str, int] = {}
        self._pools: dict[str, PoolTickets] = {}
        self._count_again_s = float("-inf")
        self._away = "PostgreSQL was not asked yet"
        self._asked = False

    @property
    def asked(self) -> bool:
        """Whether PostgreSQL was asked, if the policy wants tickets; it may have been away. Before that those who come
        in their turn would be refused as if they had none."""
        return self._asked or not self._site.policy.slomax.batch.enabled

    def keep(self, event: TicketEvent) -> bool:
        """Survives the end of this process from now on. False when there is no room for it."""
        share = SPOOL_SHARE_MAX if isinstance(event, HandedIn) else 1.0
        value = _ENCODER.encode(event)
        if self._spool.bytes_long + 2 * len(value) > share * SPOOL_BYTES_MAX:
            self._site.tickets.closed = "spool_full"
            return False
        kept = self._spool.append(Spooled(topic=LANE, site=self._site.name, partition=0, value=value))
        if not kept:
            self._site.tickets.closed = "disk"
        self._wake.set()
        return kept

    def fell_back(self) -> None:
        """A batch request that could have waited by a ticket was answered without."""
        FELL_BACK.labels(self._site.tickets.closed).inc()

    async def until_asked(self) -> None:
        """Returns when PostgreSQL was asked, or no policy wants it."""
        while not self.asked:
            await self._looked.wait()

    async def look(self) -> None:
        """Returns when the grants have been looked at anew."""
        await self._looked.wait()

    async def run(self) -> None:
        """Write, look and grant."""
        async with asyncio.TaskGroup() as tasks:
            watched(tasks, self._write(), name="write batch tickets")
            watched(tasks, self._follow(), name="follow batch tickets")

    def states(self) -> list[BatchState]:
        """What waits, by model."""
        tickets = self._site.tickets
        return [
            BatchState(
                model=model,
                waiting=tickets.backlog(model).tickets,
                waiting_gpu_s=tickets.backlog(model).seconds,
                first_left_s=told.first_left_s,
                rate=tickets.rate(model).per_s,
                owned=model in self._epochs,
                closed=tickets.closed,
            )
            for model, told in sorted(self._pools.items())
        ]

    def state(self) -> tuple[bool, str]:
        """For /health. PostgreSQL away is no fault of this replica: it decides without tickets."""
        said = self._away or f"{sum(each.waiting for each in self.states()):,} tickets wait"
        return True, f"{said}; {self._spool.records:,} records on their way"

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(LINGER_S)
            while self._lane.records:
                spooled, position = self._lane.read(CHUNK_BYTES)
                await self._until_written([_DECODER.decode(each.value) for each in spooled])
                self._lane.sent(position, len(spooled))
                SPOOLED.set(self._spool.records)

    async def _until_written(self, events: Sequence[TicketEvent]) -> None:
        """All but what the server refuses for what it holds; that is halved until it stands alone."""
        retry_s = RETRY_FIRST_S
        while events:
            try:
                MISSED.inc(await self._store.write(events, wall_s=wall_s()))
                return
            except PostgresAwayError as error:
                self._is_away(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            except RowsRefusedError as error:
                if len(events) == 1:
                    log.error("a %s is refused: %s", type(events[0]).__name__, str(error).partition(":")[0])
                    REFUSED.inc()
                    return
                half = len(events) // 2
                await self._until_written(events[:half])
                events = events[half:]

    async def _follow(self) -> None:
        while True:
            wanted = self._site.policy.slomax.batch.enabled
            if wanted:
                try:
                    await self._look()
                except (PostgresAwayError, RowsRefusedError) as error:
                    self._is_away(error)
                else:
                    self._is_back()
                self._asked = True
            else:
                self._site.tickets.closed = "off"
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            await asyncio.sleep(LOOK_EVERY_S if wanted else OFF_LOOK_EVERY_S)

    async def _look(self) -> None:
        granted: list[Key] = await self._store.granted()
        self._site.tickets.heard_granted(granted)
        OUT.labels(self._site.name).set(len(granted))
        if (now_s := monotonic_s()) >= self._count_again_s:
            await self._count(now_s)
            took_s = monotonic_s() - now_s
            self._count_again_s = now_s + max(COUNT_EVERY_S, min(took_s / COUNT_SHARE_MAX, COUNT_AGE_MAX_S))
        for pool in self._site.pools(monotonic_s()):
            await self._own(pool)

    async def _count(self, now_s: float) -> None:
        window_s = self._site.policy.slomax.batch.rate_window_s
        found = await self._store.pools(window_s=window_s)
        served = {pool.model: none_waits() for pool in self._site.pools(now_s)}
        self._pools = served | found
        tickets = self._site.tickets
        tickets.heard_backlogs({model: told.backlog for model, told in self._pools.items()})
        for model, told in self._pools.items():
            rate = tickets.rate(model)
            rate.heard(told.done_s, window_s=window_s, waits=told.backlog.tickets > 0, now_s=now_s)
            WAITING.labels(model).set(told.backlog.tickets)
            WAITING_S.labels(model).set(told.backlog.seconds)
            FIRST_LEFT.labels(model).set(float("nan") if told.first_left_s is None else told.first_left_s)
            RATE.labels(model).set(float("nan") if rate.per_s is None else rate.per_s)

    async def _own(self, pool: PoolView) -> None:
        """One turn at the pool's tickets, if they are this replica's to grant."""
        model, owns = pool.model, self._owns(pool.model)
        if owns is False:
            self._epochs.pop(model, None)
            return
        epoch = self._epochs.get(model)
        if epoch is None:
            epoch = await self._store.claim(model, self._me, by_right=owns is True)
            if epoch is None:
                return
            self._epochs[model] = epoch
            log.info("grants the batch tickets of %s, epoch %d", model, epoch)
        turn = await self._turn(pool, epoch)
        if turn is None:
            log.info("another replica grants the batch tickets of %s", model)
            del self._epochs[model]
            return
        GRANTED.labels(model).inc(turn.granted)
        UNUSED.labels(model).inc(turn.unused)
        MISSED.inc(turn.expired)

    async def _turn(self, pool: PoolView, epoch: int) -> Turn | None:
        policy = self._site.policy
        room = room_of(pool, policy.classes[BATCH], BATCH)
        if self._queued(pool.model):
            room = Room(0, 0.0, 0)
        rate = self._site.tickets.rate(pool.model).per_s or float(room.seats)
        return await self._store.turn(
            pool.model,
            epoch=epoch,
            room=room,
            ahead=round(policy.slomax.batch.ahead_share * room.seats),
            terms=policy.slomax.batch,
            choose=lambda page, left, more: next_grants(page, left, rate=rate, more=more),
        )

    def _is_away(self, error: Exception) -> None:
        if not self._away:
            log.warning("PostgreSQL is away; batch work waits by no new tickets: %s", error)
        self._away = str(error)
        self._site.tickets.closed = "postgres_away"

    def _is_back(self) -> None:
        if self._away:
            log.info("PostgreSQL answers; batch work waits there")
        self._away = ""
        full = self._spool.bytes_long > SPOOL_SHARE_MAX * SPOOL_BYTES_MAX
        self._site.tickets.closed = "spool_full" if full else ""
