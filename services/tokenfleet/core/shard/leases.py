"""Leases: what one replica may spend of a pool's capacity, or of a tenant's quota, without asking anybody.

A lease answers a numbered request, and its time runs from when that was sent. While no owner is heard, a local replica
admits within the unspent rest of its last lease, which the owner counts as long as it knows of the holder; that work is
marked degraded.
"""

from typing import Literal

from msgspec import Struct

from tokenfleet.core.shard.fence import Fence
from tokenfleet.core.shard.records import At, Holder, Lease, LeaseRequest, Record
from tokenfleet.core.shard.terms import AHEAD_AGAIN_S, EARLY_S, LEASE_TTL_S, RENEW_EVERY_S

State = Literal["live", "degraded", "closed"]


class Credit(Struct, frozen=True, kw_only=True):
    """What one request took. `parts` are (lease, units); none for degraded work.

    `request` is the number of the last request before, `at_s` when it was taken.
    """

    units: int
    at_s: float
    request: int
    parts: tuple[tuple[int, int], ...] = ()
    degraded: bool = False


class Held(Struct, kw_only=True, eq=False):
    """A lease in hand: it answers request `n`, `rest` units of it are unspent, it is good before `until_s`."""

    n: int
    rest: int
    until_s: float


class Leases:
    """One holder's leases of one book. `remote`: the replica of another site, closed without an owner.

    `once`: degraded work is never given back (a quota's requests), else it is when it ends (`ended`).
    """

    def __init__(self, book: str, me: Holder, *, remote: bool = False, once: bool = False) -> None:
        self.book, self.me = book, me
        self.spent = 0
        self.degraded_units = 0  # of unfinished degraded work
        self.answered = False  # once an owner has answered us, be it that there is nothing
        self.asked = 0  # units that spends asked for since the last request: what the next one may want, and more
        self._short: set[str] = set()  # who was short of credit since the last request
        self._remote, self._once = remote, once
        self._fence = Fence()
        self._held: list[Held] = []  # oldest first
        self._n = 0
        self._sent_s = float("-inf")
        self._refused = False  # since the last request
        self._wanted = 0  # by the last request
        self._ahead = self._ahead_told = 0  # units spent ahead that no lease has answered, and those the owner heard of
        self._empty_s = float("-inf")  # when an owner had nothing for us

    def state(self, now_s: float) -> State:
        """`live` with an owner's newest word in force, `degraded` after it, `closed` if nothing may be spent then."""
        if self._held and now_s < self._held[-1].until_s:
            return "live"
        return "degraded" if self._held and not self._remote else "closed"

    def rest(self, now_s: float) -> int:
        """Units that may be spent now."""
        if (state := self.state(now_s)) == "live":
            return sum(lease.rest for lease in self._held if now_s < lease.until_s)
        return max(0, self._held[-1].rest - self.degraded_units) if state == "degraded" else 0

    @property
    def idle(self) -> bool:
        """Whether nothing is in hand and nothing was asked for: nobody needs to hear from us."""
        return not self.asked and not any(lease.rest for lease in self._held)

    def due(self, now_s: float) -> bool:
        """Whether to ask now: each second, and as soon as credit was short and the last request is answered."""
        answered = bool(self._held) and self._held[-1].n == self._n
        return now_s - self._sent_s >= RENEW_EVERY_S or (self._refused and answered)

    def request(self, now_s: float, *, wants: int, envelopes: int) -> LeaseRequest:
        """The next request, to be appended. Of what is in hand the newest lease is kept, the others are over.

        All that was spent before must lie in placements envelopes up to number `envelopes`. A lease that ran out is
        kept too until a new one is in hand: degraded work lives on its rest.
        """
        self._n += 1
        self._sent_s, self._refused, self.asked = now_s, False, 0
        self._short.clear()
        self._wanted, self._ahead_told = wants, self._ahead
        self._held = self._held[-1:]
        kept = self._held[0] if self._held else None
        return LeaseRequest(
            book=self.book,
            holder=self.me,
            n=self._n,
            wants=wants,
            keeps=kept.n if kept else 0,
            rest=kept.rest if kept else 0,
            envelopes=envelopes,
            spent=self.spent,
        )

    def read(self, record: Record, at: At, *, now_s: float) -> None:
        """The next record of the book's partition: only what stands there, answers the last request and comes in time
        is a lease."""
        if self._fence.cluster not in ("", at.cluster):
            self._held.clear()
        if not self._fence.read(record, at) or not isinstance(record, Lease):
            return
        if (record.book, record.holder, record.n) != (self.book, self.me, self._n):
            return
        until_s = self._sent_s + LEASE_TTL_S - EARLY_S
        if now_s >= until_s or (self._held and self._held[-1].n == record.n):
            return
        self._held = [lease for lease in self._held if now_s < lease.until_s]
        self._held.append(Held(n=record.n, rest=record.units, until_s=until_s))
        self.answered = True
        if record.units:
            self._ahead -= self._ahead_told
            self._ahead_told = 0
        elif self._wanted:
            self._empty_s = now_s

    def spend(self, units: int, *, now_s: float, ahead: int = 0) -> Credit | None:
        """Take credit for one request; None when there is too little.

        A quota's holder that has nothing in hand may be `ahead` of its owner by so many units, until that answers; and
        by none for a minute after it was told that there are none.
        """
        self.asked += units
        if self.rest(now_s) < units:
            self._refused = True
            if self._ahead + units > ahead or now_s - self._empty_s <= AHEAD_AGAIN_S:
                return None
            self._ahead += units
            self.spent += units
            return Credit(units=units, at_s=now_s, request=self._n)
        self.spent += units
        if self.state(now_s) == "degraded":
            if self._once:
                self._held[-1].rest -= units
            else:
                self.degraded_units += units
            return Credit(units=units, at_s=now_s, request=self._n, degraded=True)
        parts, left = list[tuple[int, int]](), units
        for lease in self._held:  # what is over first goes first
            if now_s < lease.until_s and (taken := min(left, lease.rest)):
                lease.rest -= taken
                left -= taken
                parts.append((lease.n, taken))
        return Credit(units=units, at_s=now_s, request=self._n, parts=tuple(parts))

    def lacks(self, name: str, units: int) -> None:
        """Somebody waits until so many units are in hand; counted once between two requests however often told."""
        self._refused = True
        if name not in self._short:
            self._short.add(name)
            self.asked += units

    def refund(self, credit: Credit, *, now_s: float) -> None:
        """Give back what was not used; once a credit, and with a placement never.

        A rest that the owner was told meanwhile stays as it was told: the sum that is told next gives it back there.
        """
        if now_s - credit.at_s <= LEASE_TTL_S:
            self.spent -= credit.units
        if credit.degraded and not self._once:
            self.degraded_units -= credit.units
        elif credit.request == self._n:
            parts = {self._held[-1].n: credit.units} if credit.degraded and self._held else dict(credit.parts)
            for lease in self._held:
                lease.rest += parts.get(lease.n, 0)

    def ended(self, credit: Credit) -> None:
        """The request that took it has ended; tells something of degraded work only."""
        if credit.degraded and not self._once:
            self.degraded_units -= credit.units
