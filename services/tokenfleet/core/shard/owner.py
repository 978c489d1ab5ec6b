"""Owner: who lends the credit of one book and grants its tickets, by the log alone.

It reads the book's partition in order and says what to append. Until it reads its own claim it only learns, and again
from when it reads another's; between the two it is active. What it has written counts at once, and is nothing to
anybody before it is read back: holders take from the log what stands there.
"""

from collections import OrderedDict
from collections.abc import Hashable

from msgspec.structs import replace

from tokenfleet.core.live_clock import LiveClock
from tokenfleet.core.records import Order
from tokenfleet.core.shard.book import Book
from tokenfleet.core.shard.entries import Entries
from tokenfleet.core.shard.fence import Fence
from tokenfleet.core.shard.line import Line, Place
from tokenfleet.core.shard.records import (
    Answer,
    At,
    EndReason,
    Grant,
    GrantUnused,
    Holder,
    Keepalive,
    Lease,
    LeaseRequest,
    Record,
    ShardClaim,
    Ticket,
    TicketAsk,
    TicketEnded,
    TicketsWithdrawn,
    TokenShown,
)
from tokenfleet.core.shard.terms import HEARD_WITHIN_S, RECLAIM_AFTER_S, SILENT_HOLD_S, UNHEARD_MAX_S, WRITE_AGAIN_S
from tokenfleet.core.shard.token import Token, TokenRefused, ticket_with, verify
from tokenfleet.core.shard.writer import Writer

TICKETS_MAX = 100_000
REMEMBERED_MAX = 200_000  # ended tickets and grants that are over: late copies of their records say nothing
SWEEP_EVERY_S = 1.0
LOOKED_AT_MAX = 256  # tickets in a turn


class Owner:
    """One book. Tell it the limit, every record, and every turn; append what a turn returns, in order.

    `limit_units` is ⌊ceiling × capacity⌋. A ticket larger than it ends, except while it is 0.
    """

    def __init__(
        self, book: str, me: Holder, *, assignment: int, secret: bytes, entries: Entries, hold_s: float = SILENT_HOLD_S
    ) -> None:
        self.book, self.me, self.assignment = book, me, assignment
        self.limit_units = 0
        self.line = Line()
        self.refused_tokens = 0
        self._secret = secret
        self._counts = Book(entries, hold_s=hold_s)
        self._fence = Fence()
        self._clock = LiveClock()
        self._writer = Writer()
        self._asked: dict[Holder, LeaseRequest] = {}
        self._numbers: OrderedDict[Holder, int] = OrderedDict()  # the newest message about tickets
        self._over: OrderedDict[Hashable, EndReason] = OrderedDict()
        self._ending: set[str] = set()  # tickets that we ended, and whose end is not read back
        self._swept_s = self._claimed_s = 0.0
        self._was_active = False

    @property
    def active(self) -> bool:
        """Whether our claim is the last that we read."""
        return self._writer.epoch is not None

    def claim(self, now_s: float) -> ShardClaim:
        """What to append when the partition is assigned, kept or not; one for all books of the partition."""
        self._claimed_s = now_s
        return ShardClaim(owner=self.me, assignment=self.assignment)

    def claim_due(self, now_s: float) -> bool:
        """Whether to claim again while the partition is ours: the claim was lost, or a deposed owner's came late.

        Of two who both believe that it is theirs one learns better within a session.
        """
        return not self.active and now_s - self._claimed_s > (RECLAIM_AFTER_S if self._was_active else WRITE_AGAIN_S)

    def total_units(self) -> int:
        """What the book counts now."""
        return self._counts.total(self._clock.live_s)

    def read(self, record: Record, at: At, *, now_s: float, live: bool) -> None:
        """The next record of the partition; `live` unless it is of unknown age (read while catching up)."""
        self._clock.advance(now_s, live=live)
        if at.cluster != self._fence.cluster:
            self._deposed()
        stands = self._fence.read(record, at)
        if isinstance(record, ShardClaim):
            self._claimed(record, at, now_s)
        elif stands and record.book == self.book:
            self._take(record, now_s if live else None, now_s)

    def turn(self, now_s: float, *, live: bool) -> tuple[Answer, ...]:
        """What to append now; nothing while the partition or the placements are not read at their ends."""
        self._clock.advance(now_s, live=live)
        if not self.active or not live:
            return ()
        self._settle(now_s)
        free = max(0, self.limit_units - self.total_units())
        self._lend(self._grant(free, now_s), now_s)
        return self._writer.take(now_s)

    def _claimed(self, claim: ShardClaim, at: At, now_s: float) -> None:
        if claim.owner != self.me or (not self.active and claim.assignment != self.assignment):
            self._deposed()
            self._claimed_s = now_s
            return
        self._was_active = True
        self._writer.begin(at.cluster, at.offset, now_s)
        at_s = self._clock.live_s
        self._counts.recount(at_s)
        for place in self.line.places.values():
            place.heard_live_s = at_s

    def _deposed(self) -> None:
        """What was written and is void was never lent, granted or ended."""
        self._asked.clear()
        for answer in self._writer.end():
            if isinstance(answer, Lease):
                self._counts.forget(answer.holder, answer.n)
            elif isinstance(answer, Grant):
                row = self._counts.grants.get(answer.ticket)
                if row is not None and row.grant == answer.grant and not row.stands:
                    self._take_back(answer.ticket)
            elif isinstance(answer, Ticket):
                place = self.line.places.get(answer.ticket)
                if place is not None and not place.stands:
                    self.line.end(answer.ticket)
        for ticket in self._ending:
            self._over.pop(ticket, None)
        self._ending.clear()

    def _take(self, record: Record, heard_s: float | None, now_s: float) -> None:
        if isinstance(record, Answer):
            self._writer.read_back(record)
        match record:
            case LeaseRequest():
                if self._counts.hear(record, self._clock.live_s) and self.active:
                    self._asked[record.holder] = record
            case Lease():
                self._counts.lease(record.holder, record.n, record.units, self._clock.live_s)
            case Ticket():
                if record.ticket not in self._over:
                    if record.ticket not in self.line.places:
                        self._put(record, record.holder, record.n, heard_s)
                    self.line.places[record.ticket].stands = True
            case Grant():
                self._granted(record)
            case TicketEnded():
                if record.why != "unknown":
                    self._ending.discard(record.ticket)
                    self._remember(record.ticket, record.why)
                    self.line.end(record.ticket)
            case GrantUnused():
                row = self._counts.grants.get(record.ticket)
                if row is not None and (row.grant, row.holder) == (record.grant, record.holder):
                    self._remember(record.grant, "used")
                    self._take_back(record.ticket)
                self._tell_lost(record.ticket, record.holder, now_s)
            case TicketsWithdrawn():
                self._withdrawn(record, now_s)
            case Keepalive():
                if self._is_new(record.holder, record.n):
                    for ticket in record.tickets:
                        place = self.line.places.get(ticket)
                        if place is not None and place.holder == record.holder:
                            self._hear(place, record.n, heard_s)
                        self._tell_lost(ticket, record.holder, now_s)
            case TicketAsk():
                if self._is_new(record.holder, record.n):
                    self._ask(record, heard_s, now_s)
            case TokenShown():
                if self._is_new(record.holder, record.n):
                    self._shown(record, heard_s, now_s)
            case ShardClaim():
                pass

    def _ask(self, ask: TicketAsk, heard_s: float | None, now_s: float) -> None:
        epoch = self._writer.epoch
        if self._known(ask.ticket, ask.holder, ask.n, heard_s, now_s) or epoch is None:
            return
        came_s = now_s - ask.stood_s
        token = Token(
            book=self.book,
            ticket=ask.ticket,
            tenant=ask.tenant,
            request_class=ask.request_class,
            rank=ask.rank,
            units=ask.units,
            work_s=ask.work_s,
            virtual_start=self.line.start(ask.rank, ask.tenant, came_s=came_s if ask.stood_s else None),
            deadline_s=now_s + ask.left_s,
            cluster=epoch.cluster,
            claim=epoch.claim,
        )
        self._open(token, ask.holder, ask.n, heard_s, now_s, came_s=came_s)

    def _shown(self, shown: TokenShown, heard_s: float | None, now_s: float) -> None:
        """A token of a former epoch rebuilds its ticket; one of a later epoch is not for us to judge."""
        epoch = self._writer.epoch or Order(cluster=self._fence.cluster, claim=self._fence.claim, n=0)
        token = verify(shown.token, self._secret, epoch=epoch, now_s=now_s)
        if isinstance(token, TokenRefused) or token.book != self.book or token.standing(epoch) == "later":
            self.refused_tokens += 1
        elif not self._known(token.ticket, shown.holder, shown.n, heard_s, now_s) and self.active:
            deadline_s = now_s + shown.left_s
            renewed = replace(token, deadline_s=deadline_s, cluster=epoch.cluster, claim=epoch.claim)
            self._open(renewed, shown.holder, shown.n, heard_s, now_s)

    def _known(self, ticket: str, holder: Holder, n: int, heard_s: float | None, now_s: float) -> bool:
        """Answer for a ticket that is not new: its end, its same grant, or its place."""
        place = self.line.places.get(ticket)
        row = self._counts.grants.get(ticket)
        why = self._over.get(ticket) or ("used" if self._counts.has_placed(ticket) else None)
        if place is not None:
            place.holder = holder
            self._hear(place, n, heard_s)
        if why is None and place is None and row is None:
            return False
        if (epoch := self._writer.epoch) is None:
            return True
        if row is not None and why != "used":
            cites = n if row.holder == holder else row.cites
            self._writer.write(
                Grant(
                    book=self.book,
                    order=epoch,
                    grant=row.grant,
                    ticket=ticket,
                    holder=row.holder,
                    cites=cites,
                    units=row.units,
                ),
                now_s,
            )
        elif why is not None:
            self._end(ticket, why, holder, now_s)
        elif place is not None:
            self._writer.write(replace(place.ticket, holder=holder, n=n), now_s)
        return True

    def _open(
        self, token: Token, holder: Holder, n: int, heard_s: float | None, now_s: float, *, came_s: float | None = None
    ) -> None:
        if len(self.line) >= TICKETS_MAX:
            self._end(token.ticket, "line_full", holder, now_s)
            return
        ahead = self.line.ahead(token.rank, token.virtual_start)
        ticket = ticket_with(token, self._secret, order=self._writer.next(), holder=holder, n=n, ahead=ahead)
        self._put(ticket, holder, n, heard_s, came_s=came_s)
        self._writer.post(ticket, now_s)

    def _put(
        self, ticket: Ticket, holder: Holder, n: int, heard_s: float | None, *, came_s: float | None = None
    ) -> None:
        waits, live_s = ticket.ticket not in self._counts.grants, self._clock.live_s
        self.line.put(ticket, holder=holder, n=n, heard_s=heard_s, heard_live_s=live_s, came_s=came_s, waits=waits)

    def _hear(self, place: Place, n: int, heard_s: float | None) -> None:
        place.n, place.heard_s, place.heard_live_s = n, heard_s, self._clock.live_s

    def _granted(self, grant: Grant) -> None:
        """One that stands. A copy of one that is over, or not the ticket's, counts nothing."""
        row = self._counts.grants.get(grant.ticket)
        if grant.grant in self._over or (row is not None and row.grant != grant.grant):
            return
        self._counts.grant(grant, self._clock.live_s, stands=True)
        if (place := self.line.places.get(grant.ticket)) is not None:
            self.line.serve(place)

    def _take_back(self, ticket: str) -> None:
        self._counts.grants.pop(ticket, None)
        if (place := self.line.places.get(ticket)) is not None:
            self.line.give_back(place)

    def _withdrawn(self, record: TicketsWithdrawn, now_s: float) -> None:
        for ticket in record.tickets:
            row, place = self._counts.grants.get(ticket), self.line.places.get(ticket)
            if row is not None and row.holder == record.holder:
                self._remember(row.grant, "withdrawn")
                self._take_back(ticket)  # it may wait through another gateway by now
            if place is not None and place.holder == record.holder:
                self._end(ticket, "withdrawn", record.holder, now_s)

    def _settle(self, now_s: float) -> None:
        """What placements and silence tell: grants that were used, tickets that nobody waits for."""
        for ticket, row in list(self._counts.grants.items()):
            if self._counts.has_placed(ticket):
                self._remember(row.grant, "used")
                self._end(ticket, "used", row.holder, now_s)
        self._counts.settle(self._clock.live_s)
        if now_s - self._swept_s < SWEEP_EVERY_S:
            return
        self._swept_s = now_s
        for ticket, place in list(self.line.places.items()):
            given_up = place.granted and ticket not in self._counts.grants
            if given_up or self._clock.live_s - place.heard_live_s > UNHEARD_MAX_S:
                self._end(ticket, "unheard", place.holder, now_s)

    def _grant(self, free: int, now_s: float) -> int:
        """Grants to the first in line that are heard, while they fit; the first that doesn't fit is waited for.

        What is left of `free` for leases: nothing while a ticket waits that is heard.
        """
        for place in self.line.first(LOOKED_AT_MAX):
            ticket = place.ticket
            if place.heard_s is None or now_s - place.heard_s > HEARD_WITHIN_S:
                continue
            if 0 < self.limit_units < ticket.units:
                self._end(ticket.ticket, "too_large", place.holder, now_s)
                continue
            if ticket.units > free:
                return 0
            free -= ticket.units
            order = self._writer.next()
            grant = Grant(
                book=self.book,
                order=order,
                grant=order,
                ticket=ticket.ticket,
                holder=place.holder,
                cites=place.n,
                units=ticket.units,
            )
            self._counts.grant(grant, self._clock.live_s, stands=False)
            self.line.serve(place)
            self._writer.post(grant, now_s)
        return free

    def _lend(self, free: int, now_s: float) -> None:
        """Answers to the lease requests: what is free in equal parts, also when that is nothing."""
        asked, self._asked = self._asked, {}
        at_s = self._clock.live_s
        for request in asked.values():
            part = max(free // max(1, len(asked), self._counts.holders(at_s)), min(free, 1))
            units = min(request.wants, part)
            free -= units
            self._counts.lease(request.holder, request.n, units, at_s)
            lease = Lease(book=self.book, order=self._writer.next(), holder=request.holder, n=request.n, units=units)
            self._writer.post(lease, now_s)

    def _end(self, ticket: str, why: EndReason, holder: Holder, now_s: float) -> None:
        """The ticket is no more. A grant that is out stays counted until word comes."""
        self.line.end(ticket)
        if self.active and ticket not in self._over:
            self._ending.add(ticket)
        self._remember(ticket, why)
        self._tell(ticket, why, holder, now_s)

    def _tell(self, ticket: str, why: EndReason, holder: Holder, now_s: float) -> None:
        if (order := self._writer.epoch) is not None:
            ended = TicketEnded(book=self.book, order=order, holder=holder, ticket=ticket, why=why)
            self._writer.write(ended, now_s)

    def _tell_lost(self, ticket: str, holder: Holder, now_s: float) -> None:
        """To who believes that a ticket waits: that it ended, or that it is not known here and its token is wanted."""
        if ticket in self._over:
            self._tell(ticket, self._over[ticket], holder, now_s)
        elif ticket not in self.line.places and ticket not in self._counts.grants:
            self._tell(ticket, "unknown", holder, now_s)

    def _is_new(self, holder: Holder, n: int) -> bool:
        if n <= self._numbers.get(holder, 0):
            return False
        self._numbers[holder] = n
        self._numbers.move_to_end(holder)
        if len(self._numbers) > REMEMBERED_MAX:
            self._numbers.popitem(last=False)
        return True

    def _remember(self, what: Hashable, why: EndReason) -> None:
        self._over[what] = why
        if len(self._over) > REMEMBERED_MAX:
            self._over.popitem(last=False)
