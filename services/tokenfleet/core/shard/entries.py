"""Entries: what placements tell the owner of a book about credit that was spent."""

from collections.abc import Callable, Iterable
from typing import Protocol

from tokenfleet.core.ledger import Ledger
from tokenfleet.core.shard.envelopes import Envelopes
from tokenfleet.core.shard.records import Holder, LeaseRequest, call_of


class Entries(Protocol):
    """Spent credit that still counts. `at_s` is the owner's clock, which stands still while it hears nothing."""

    def units(self, at_s: float) -> int:
        """The sum of what is spent and counts."""
        ...

    def has_read(self, holder: Holder, envelopes: int) -> bool:
        """Whether all that `holder` spent up to this number of envelopes is in `units`."""
        ...

    def has_placed(self, ticket: str) -> bool:
        """Whether a placement of the ticket's request was heard of."""
        ...

    def heard(self, request: LeaseRequest, at_s: float) -> None:
        """A request that was not heard before, with what it tells of spending."""
        ...

    def recount(self, at_s: float) -> None:
        """A new owner begins: what it read of the past counts as of now."""
        ...


class PoolEntries:
    """A pool's: the ledger of the site, which hears the same envelopes as `envelopes`, at its `instances`."""

    def __init__(self, ledger: Ledger, envelopes: Envelopes, instances: Callable[[], Iterable[str]]) -> None:
        self._ledger, self._envelopes, self._instances = ledger, envelopes, instances

    def units(self, at_s: float) -> int:
        return sum(self._ledger.kv_tokens(name) for name in self._instances())

    def has_read(self, holder: Holder, envelopes: int) -> bool:
        return self._envelopes.has_read(holder, envelopes)

    def has_placed(self, ticket: str) -> bool:
        return self._ledger.heard_of(*call_of(ticket))

    def heard(self, request: LeaseRequest, at_s: float) -> None:
        """Placements tell it."""

    def recount(self, at_s: float) -> None:
        """The ledger goes on."""
