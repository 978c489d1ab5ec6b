"""Purse: what one replica may spend of its site's books, and what waits at their owners for more.

A decision spends here without asking anybody; what must be told to a book's owner goes out by `append`. A book rules
from its first answer on: a replica that no owner has ever answered goes on as if there were no shard.
"""

from collections.abc import Callable

from tokenfleet.core.shard.leases import Credit, Leases, State
from tokenfleet.core.shard.records import At, EndReason, Grant, Holder, Record
from tokenfleet.core.shard.waiting import Waiting

Append = Callable[[str, Record], None]
"""Writes a record of a book to the log."""


class Purse:
    """The leases and tickets of the replica `me`, by book. `enabled` says whether the policy in force wants books."""

    def __init__(self, me: Holder, append: Append, *, enabled: bool = True) -> None:
        self.me, self.append, self.enabled = me, append, enabled
        self.leases: dict[str, Leases] = {}
        self.waiting: dict[str, Waiting] = {}
        self._degraded: dict[str, tuple[str, Credit]] = {}  # by decision; bounded by the rests of leases

    def follow(self, book: str, *, quota: bool = False) -> Leases:
        """The leases of a book, from now on in hand."""
        if (known := self.leases.get(book)) is None:
            known = self.leases[book] = Leases(book, self.me, once=quota)
        return known

    def read(self, record: Record, at: At, book: str, *, now_s: float) -> None:
        """The next record of the book's partition, for each book there."""
        if (leases := self.leases.get(book)) is not None:
            leases.read(record, at, now_s=now_s)
        if (waiting := self.waiting.get(book)) is not None:
            waiting.read(record, at, now_s=now_s)

    def rules(self, book: str) -> bool:
        """Whether requests need the book's credit."""
        return self.enabled and (leases := self.leases.get(book)) is not None and leases.answered

    def rules_quotas(self) -> bool:
        """Whether tenants' requests need credit of their quotas: from the first answer of any owner on."""
        return self.enabled and any(leases.answered for leases in self.leases.values())

    def state(self, book: str, now_s: float) -> State:
        """Whether an owner's word on the book is in force."""
        return leases.state(now_s) if (leases := self.leases.get(book)) is not None else "closed"

    def rest(self, book: str, now_s: float) -> int:
        """Units of the book that may be spent now."""
        return leases.rest(now_s) if (leases := self.leases.get(book)) is not None else 0

    def spend(self, book: str, units: int, *, now_s: float) -> Credit | None:
        """Credit for one request; None if there is none."""
        return self.follow(book).spend(units, now_s=now_s)

    def spend_quota(self, book: str, *, ahead: int, now_s: float) -> Credit | None:
        """Credit for one request of a tenant, at most `ahead` of the owner; None if there is none."""
        return self.follow(book, quota=True).spend(1, now_s=now_s, ahead=ahead)

    def lacks(self, book: str, name: str, units: int) -> None:
        """Somebody waits here until so many units of the book are in hand."""
        self.follow(book).lacks(name, units)

    def refund(self, book: str, credit: Credit, *, now_s: float) -> None:
        """Gives back what was not used; once a credit."""
        self.follow(book).refund(credit, now_s=now_s)

    def placed(self, decision: str, book: str, credit: Credit) -> None:
        """The decision's placement was paid so."""
        if credit.degraded:
            self._degraded[decision] = book, credit

    def sweep(self, runs: Callable[[str], bool]) -> None:
        """What degraded work took is free again when its decision `runs` no more."""
        for decision in [name for name in self._degraded if not runs(name)]:
            book, credit = self._degraded.pop(decision)
            self.leases[book].ended(credit)

    def line(self, book: str) -> Waiting:
        """What waits here for the book; what it says of a request that begins to wait is to be appended."""
        if (known := self.waiting.get(book)) is None:
            known = self.waiting[book] = Waiting(book, self.me)
        return known

    def waits(self, book: str, ticket: str) -> bool:
        """Whether the ticket is in line, as far as is known here."""
        return ticket in waiting if (waiting := self.waiting.get(book)) is not None else False

    def granted(self, book: str, ticket: str, *, now_s: float) -> Grant | None:
        """The ticket's grant, as long as it may be used."""
        return waiting.grant(ticket, now_s) if (waiting := self.waiting.get(book)) is not None else None

    def use(self, book: str, ticket: str, *, now_s: float) -> Grant | None:
        """The ticket's grant, once: its request is placed now."""
        return waiting.use(ticket, now_s) if (waiting := self.waiting.get(book)) is not None else None

    def withdraw(self, book: str, ticket: str, *, now_s: float) -> None:
        """Nobody waits by the ticket any more."""
        waiting = self.waiting.get(book)
        if waiting is not None and (word := waiting.withdraw(ticket, now_s)) is not None:
            self.append(book, word)

    def ended(self, book: str) -> dict[str, EndReason]:
        """Tickets that their owner ended since the last call, and why."""
        return dict(waiting.ended()) if (waiting := self.waiting.get(book)) is not None else {}
