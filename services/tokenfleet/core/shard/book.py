"""Book: what the owner counts against a pool's capacity, or a tenant's quota.

Σ rests of leases + Σ spent credit (entries) + Σ grants out. There is no other reservation, hold or floor. Credit comes
back by word, not by silence: by the envelopes that a holder named, by an entry, by `unused`. Only what is of a holder
that says nothing is given up, `hold_s` after it was last counted live; if it lives and works on without an owner, the
entries and the engines' own counts tell.
"""

from collections import OrderedDict
from collections.abc import Iterator

from msgspec import Struct

from tokenfleet.core.records import Order
from tokenfleet.core.shard.entries import Entries
from tokenfleet.core.shard.records import Grant, Holder, LeaseRequest
from tokenfleet.core.shard.terms import GRANT_TTL_S, LEASE_TTL_S, SILENT_HOLD_S

HOLDERS_MAX = 10_000  # last numbers remembered; a late copy of a forgotten holder's request is answered in vain


class LeaseRow(Struct, kw_only=True, eq=False):
    """One lease as counted: `units` is the most that its holder may still spend of it.

    `counted_s` is when it was last counted live. `free_at` is set once it is settled: its rest is free when that
    envelope is read. `told` is a smaller rest, good once its envelope is read.
    """

    holder: Holder
    n: int
    units: int
    counted_s: float
    free_at: int | None = None
    told: tuple[int, int] | None = None


class GrantRow(Struct, kw_only=True, eq=False):
    """One grant that is out: neither an entry of its ticket nor `unused` was heard. `stands`: it was read back."""

    grant: Order
    ticket: str
    holder: Holder
    cites: int
    units: int
    counted_s: float
    stands: bool


class Book:
    """Leases and grants of one book. Times are the owner's clock, which stands still while it hears nothing."""

    def __init__(self, entries: Entries, *, hold_s: float = SILENT_HOLD_S) -> None:
        self._entries, self._hold_s = entries, hold_s
        self._leases: dict[tuple[Holder, int], LeaseRow] = {}
        self._numbers: OrderedDict[Holder, int] = OrderedDict()
        self._asked_s: dict[Holder, float] = {}  # when each last asked for units
        self.grants: dict[str, GrantRow] = {}  # by ticket: one has at most one grant out

    def total(self, at_s: float) -> int:
        """Units that count now."""
        leases = sum(row.units for row in self._leases.values())
        return leases + sum(row.units for row in self.grants.values()) + self._entries.units(at_s)

    def hear(self, request: LeaseRequest, at_s: float) -> bool:
        """Settle what the request settles. False for one heard before, or overtaken by a later one: it says nothing."""
        holder = request.holder
        if request.n <= self._numbers.get(holder, 0):
            return False
        self._numbers[holder] = request.n
        self._numbers.move_to_end(holder)
        if len(self._numbers) > HOLDERS_MAX:
            self._numbers.popitem(last=False)
        self._entries.heard(request, at_s)
        if request.wants:
            self._asked_s[holder] = at_s
        for row in self._of(holder):
            if row.n >= request.n or row.free_at is not None:
                continue
            if row.n == request.keeps:
                row.told, row.counted_s = (request.rest, request.envelopes), at_s
            else:
                row.free_at = request.envelopes
        self.settle(at_s)
        return True

    def lease(self, holder: Holder, n: int, units: int, at_s: float) -> None:
        """Count a lease from when its record is written, and anew when it is read back.

        A holder that asked again before it was there to read has not taken it and never will: nothing to count.
        """
        if (row := self._leases.get((holder, n))) is not None:
            row.counted_s = at_s
        elif units and n >= self._numbers.get(holder, 0):
            self._leases[holder, n] = LeaseRow(holder=holder, n=n, units=units, counted_s=at_s)

    def forget(self, holder: Holder, n: int) -> None:
        """The lease was never there to read."""
        self._leases.pop((holder, n), None)

    def grant(self, record: Grant, at_s: float, *, stands: bool) -> None:
        """Count a grant, likewise; one record more of the same grant counts nothing more."""
        self.grants[record.ticket] = GrantRow(
            grant=record.grant,
            ticket=record.ticket,
            holder=record.holder,
            cites=record.cites,
            units=record.units,
            counted_s=at_s,
            stands=stands,
        )

    def settle(self, at_s: float) -> None:
        """Free what word or `hold_s` of silence has freed."""
        for key, row in list(self._leases.items()):
            by_word = row.free_at is not None and self._entries.has_read(row.holder, row.free_at)
            if by_word or at_s - row.counted_s > LEASE_TTL_S + self._hold_s:
                del self._leases[key]
            elif row.told is not None and self._entries.has_read(row.holder, row.told[1]):
                row.units, row.told = min(row.units, row.told[0]), None
        for ticket, row in list(self.grants.items()):
            if at_s - row.counted_s > GRANT_TTL_S + self._hold_s or self._entries.has_placed(ticket):
                del self.grants[ticket]

    def recount(self, at_s: float) -> None:
        """A new owner begins: every lease and grant of the log counts as just issued."""
        for row in (*self._leases.values(), *self.grants.values()):
            row.counted_s = at_s
        self._entries.recount(at_s)

    def has_placed(self, ticket: str) -> bool:
        """Whether a placement of the ticket's request was heard of."""
        return self._entries.has_placed(ticket)

    def holders(self, at_s: float) -> int:
        """How many holders have a lease that may be spent, or asked for one within its ttl."""
        self._asked_s = {holder: asked_s for holder, asked_s in self._asked_s.items() if at_s - asked_s <= LEASE_TTL_S}
        return len(
            {row.holder for row in self._leases.values() if at_s - row.counted_s <= LEASE_TTL_S} | set(self._asked_s)
        )

    def _of(self, holder: Holder) -> Iterator[LeaseRow]:
        return (row for row in self._leases.values() if row.holder == holder)
