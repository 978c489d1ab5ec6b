"""Shards: one book's log, placements and replicas, moved step by step.

Nothing moves by itself. What a replica appends waits in its outbox until it lands, in order, and copies may land later
still; a killed replica's outbox may land after its death. Its placements envelopes wait in a spool that survives it.
"""

from collections import deque

from msgspec import Struct

from tests.builders import ended, placed
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.shard.entries import PoolEntries
from tokenfleet.core.shard.envelopes import Envelopes
from tokenfleet.core.shard.leases import Credit, Leases
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.quota import HOLD_S, SpentCredit
from tokenfleet.core.shard.records import At, Grant, Holder, Lease, LeaseRequest, Record, ShardClaim, call_of
from tokenfleet.core.shard.terms import SILENT_HOLD_S
from tokenfleet.core.shard.waiting import Waiting

BOOK = "small-chat@b"
CLUSTER = "kafka-1"
SECRET = b"site secret"
SILENT_S = 29.0  # less than the hold, by more than clocks differ


class Work(Struct, kw_only=True, eq=False):
    """One request that runs: `name` is its decision."""

    name: str
    ticket: str
    units: int
    holder: Holder
    placed_s: float
    credit: Credit | None
    told: bool = False  # its placement lies on placements
    excused: bool = False  # of a replica that was silent for so long that its rest was given up


class Replica:
    """One process: a holder, and the owner while it believes so (`owns`). `rate` is how fast its clock runs."""

    def __init__(self, world: "World", name: str, *, start: int, rate: float) -> None:
        self.world, self.name, self.start, self.rate = world, name, start, rate
        self.me = Holder(replica=name, start=str(start))
        self.leases = Leases(BOOK, self.me, once=world.quota)
        self.waiting = Waiting(BOOK, self.me)
        self.ledger, self.envelopes_read = Ledger(), Envelopes()
        self.envelopes_read.caught_up()
        self.entries = PoolEntries(self.ledger, self.envelopes_read, lambda: ("i",))
        self.owns = False
        self.owner = self._follows()
        self.outbox: deque[Record] = deque()
        self.at = len(world.log)
        self.placements_at = 0
        self.envelopes = 0
        self.paused = self.cut = False
        self.heard_s = world.now_s  # when a request of it lain in the log last
        self.placed: list[Work] = []

    @property
    def now_s(self) -> float:
        return 1000.0 * self.start + self.world.now_s * self.rate

    def _follows(self) -> Owner:
        """The book as the log so far tells it."""
        owner = Owner(
            BOOK,
            self.me,
            assignment=0,
            secret=SECRET,
            entries=SpentCredit() if self.world.quota else self.entries,
            hold_s=HOLD_S if self.world.quota else SILENT_HOLD_S,
        )
        owner.limit_units = self.world.limit_units
        for offset, record in enumerate(self.world.log):
            owner.read(record, At(cluster=self.world.cluster, offset=offset), now_s=self.now_s, live=False)
        return owner

    # the log

    def land(self, most: int = 1_000, *, copies: bool = False) -> None:
        """Its appends lie in the log; with `copies`, they will do so once more."""
        while self.outbox and most and not self.cut:
            record = self.outbox.popleft()
            self.world.append(record)
            if copies:
                self.world.late.append(record)
            if isinstance(record, LeaseRequest):
                self.heard_s = self.world.now_s
            most -= 1

    def read(self, most: int = 1_000) -> None:
        """Records, then placements, as far as they lie there."""
        while self.at < len(self.world.log) and most and not self.cut:
            record, at = self.world.log[self.at], At(cluster=self.world.cluster, offset=self.at)
            self.owner.read(record, at, now_s=self.now_s, live=True)
            self.leases.read(record, at, now_s=self.now_s)
            self.waiting.read(record, at, now_s=self.now_s)
            self.at += 1
            most -= 1

    def read_placements(self, most: int = 1_000) -> None:
        while self.placements_at < len(self.world.placements) and most and not self.cut:
            envelope = self.world.placements[self.placements_at]
            self.ledger.hear(envelope, partition=0, now_s=self.now_s)
            self.envelopes_read.read(envelope)
            self.placements_at += 1
            most -= 1

    # the owner

    def assigned(self) -> None:
        """A group gives it the partition, whoever had it before: it claims. It has followed the log all along."""
        self.world.assignments += 1
        self.owns = True
        self.owner.assignment = self.world.assignments
        self.outbox.append(self.owner.claim(self.now_s))

    def turn(self) -> None:
        """The owner's turn; `live` when all that lies there was read."""
        if not self.owns:
            return
        if self.owner.claim_due(self.now_s):
            self.outbox.append(self.owner.claim(self.now_s))
        ends = (len(self.world.log), len(self.world.placements))
        live = (self.at, self.placements_at) == ends and not self.cut
        self.outbox.extend(self.owner.turn(self.now_s, live=live))

    # the holder

    def ask(self, wants: int = 4) -> None:
        self.outbox.append(self.leases.request(self.now_s, wants=wants, envelopes=self.envelopes))

    def admit(self) -> Credit | None:
        """Admits one request on a quota's credit."""
        credit = self.leases.spend(1, now_s=self.now_s, ahead=self.world.ahead)
        if credit is not None:
            self.world.admitted_s.append(self.world.now_s)
        return credit

    def refuse(self, credit: Credit) -> None:
        """The request that `admit` just admitted is refused after all."""
        self.leases.refund(credit, now_s=self.now_s)
        self.world.admitted_s.pop()

    def spend(self, units: int = 1) -> Work | None:
        """Places one request on credit; None if there is none."""
        credit = self.leases.spend(units, now_s=self.now_s)
        if credit is None:
            return None
        work = self._place(f"{self.name}-{self.start}-call-{self.envelopes}#0", units, credit)
        work.excused = credit.degraded and self.world.now_s - self.heard_s > SILENT_S
        return work

    def use(self, ticket: str) -> Work | None:
        """Places the ticket's request on its grant; None if that may not be used."""
        grant = self.waiting.use(ticket, self.now_s)
        return None if grant is None else self._place(ticket, grant.units, None)

    def end(self, work: Work) -> None:
        """Its end is told, by whichever replica heard of it."""
        self.world.running.remove(work)
        if work.credit is not None and work in self.placed:
            self.leases.ended(work.credit)
        self._tell("ended", work)

    def queue(self, ticket: str, units: int = 1, *, tenant: str = "t", rank: int = 0) -> None:
        self.outbox.append(
            self.waiting.ask(
                ticket,
                tenant=tenant,
                request_class="chat",
                rank=rank,
                units=units,
                work_s=float(units),
                left_s=60.0,
                now_s=self.now_s,
            )
        )

    def keep(self) -> None:
        self.outbox.extend(self.waiting.turn(self.now_s))

    def _place(self, ticket: str, units: int, credit: Credit | None) -> Work:
        world = self.world
        name = f"d{len(world.sizes)}"
        world.sizes[name] = units
        work = Work(name=name, ticket=ticket, units=units, holder=self.me, placed_s=world.now_s, credit=credit)
        world.running.append(work)
        self.placed.append(work)
        world.used[ticket] = world.used.get(ticket, 0) + 1
        self._tell("placed", work)
        return work

    def _tell(self, kind: str, work: Work) -> None:
        self.envelopes += 1
        request, attempt = call_of(work.ticket)
        told = placed if kind == "placed" else ended
        event = told(work.name, "i", request=request, attempt=attempt, kv_tokens=work.units)
        envelope = PlacementEnvelope(
            site="b", replica=self.name, start=str(self.start), n=self.envelopes, events=(event,)
        )
        self.world.spools[self.name].append((envelope, work))

    def send(self, most: int = 1_000, *, copies: bool = False) -> None:
        """Its spool, in order."""
        spool = self.world.spools[self.name]
        while spool and most and not self.cut:
            envelope, work = spool.popleft()
            self.world.placements.append(envelope)
            if copies:
                self.world.placements.append(envelope)
            work.told = True
            most -= 1


class World:
    """The log, the placements and the replicas; `now_s` is true time."""

    def __init__(
        self,
        names: str = "ab",
        *,
        limit_units: int = 20,
        rates: tuple[float, ...] = (),
        quota: bool = False,
        ahead: int = 0,
    ) -> None:
        self.quota, self.ahead = quota, ahead
        self.now_s = 0.0
        self.limit_units = limit_units
        self.cluster = CLUSTER
        self.log: list[Record] = []
        self.late: list[Record] = []  # copies that may land at any time
        self.placements: list[PlacementEnvelope] = []
        self.spools: dict[str, deque[tuple[PlacementEnvelope, Work]]] = {name: deque() for name in names}
        self.sizes: dict[str, int] = {}
        self.running: list[Work] = []
        self.used: dict[str, int] = {}
        self.claim = -1
        self.standing: set[object] = set()
        self.admitted_s: list[float] = []  # by a quota
        self.assignments = 0
        self.replicas = {
            name: Replica(self, name, start=1, rate=rate)
            for name, rate in zip(names, (*rates, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), strict=False)
        }

    def __getitem__(self, name: str) -> Replica:
        return self.replicas[name]

    def append(self, record: Record) -> None:
        """The record lies in the log, and is good if its epoch's claim is the last before it."""
        if isinstance(record, ShardClaim):
            self.claim = len(self.log)
        elif isinstance(record, Lease | Grant) and record.order.claim == self.claim:
            self.standing.add((record.holder, record.n) if isinstance(record, Lease) else record.grant)
        self.log.append(record)

    def in_hand(self) -> set[object]:
        """All leases and grants that some replica believes it has; each must be in `standing`."""
        replicas = self.replicas.values()
        found: set[object] = {(r.me, held.n) for r in replicas for held in r.leases._held}
        return found | {held.grant.grant for r in replicas for held in r.waiting._tickets.values() if held.grant}

    def kill(self, name: str, *, loses: bool = True) -> None:
        """kill -9 and a new start. Its appends are lost, or in flight."""
        old = self.replicas[name]
        if not loses:
            self.late.extend(old.outbox)
        self.replicas[name] = Replica(self, name, start=old.start + 1, rate=old.rate)

    def move(self, seconds: float = 0.05, *, asks: bool = True, wants: int = 4) -> None:
        """Time passes, and every replica that is neither paused nor cut does all that it has to."""
        self.now_s += seconds
        for replica in self.replicas.values():
            if replica.paused:
                continue
            replica.read_placements()
            replica.read()
            if asks and replica.leases.due(replica.now_s):
                replica.ask(wants)
            replica.keep()
            replica.turn()
            replica.send()
            replica.land()

    def run(self, seconds: float, *, step_s: float = 0.05, asks: bool = True) -> None:
        for _ in range(round(seconds / step_s)):
            self.move(step_s, asks=asks)

    def running_units(self) -> int:
        return sum(work.units for work in self.running)

    def units_at_large(self) -> int:
        """What runs, and what may be spent now or once degraded: all that the book must have counted.

        Left out is what is excused: of a replica that nobody heard for as long as its rest stays counted.
        """
        total = 0
        for work in self.running:
            work.excused |= not work.told and self.now_s - work.placed_s > SILENT_S
            total += 0 if work.excused else work.units
        for replica in self.replicas.values():
            leases, now_s = replica.leases, replica.now_s
            if leases.state(now_s) == "live" or self.now_s - replica.heard_s <= SILENT_S:
                total += leases.rest(now_s)
            for ticket in replica.waiting.granted(now_s):
                held = replica.waiting._tickets[ticket]
                total += held.grant.units if held.grant else 0
        return total
