"""Site books: which books a site has, how much each holds, what of it is spent, and what a replica asks for unasked."""

from collections.abc import Iterable

from tokenfleet.core.credit import book_name, limit_of, ready
from tokenfleet.core.shard.entries import Entries, PoolEntries
from tokenfleet.core.shard.quota import HOLD_S, SpentCredit
from tokenfleet.core.shard.records import quota_book
from tokenfleet.core.shard.terms import SILENT_HOLD_S
from tokenfleet.core.site import Site

READ_EVERY_S = 0.1  # how often capacity changes


class SiteBooks:
    """The books of `site` under its policy in force: one a model's pool, one a tenant with a limit a minute.

    A book that the policy does not name holds nothing: another replica may have a newer one.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pools: dict[str, str] = {}  # by book: its model
        self._limits: dict[str, int] = {}
        self._instances: dict[str, tuple[str, ...]] = {}
        self._looked_s = float("-inf")

    def look(self, now_s: float) -> None:
        """Takes in the tables of now, if that is due."""
        if now_s - self._looked_s < READ_EVERY_S:
            return
        site, policy = self._site, self._site.policy
        self._looked_s = now_s
        self._pools = {book_name(model, site.name): model for model in policy.models}
        self._limits = {quota_book(name): terms.requests_per_minute_max for name, terms in policy.tenants.items()}
        for book, model in self._pools.items():
            pool = site.pool(model, now_s)
            self._limits[book] = limit_of(pool, policy)
            self._instances[book] = tuple(pool.columns.labels.names[slot] for slot in ready(pool).nonzero()[0])

    def limit_units(self, book: str) -> int:
        """What the book holds in all."""
        return self._limits.get(book, 0)

    def wanted(self) -> dict[str, int]:
        """The books that a replica asks for although nobody asked it, and for how much."""
        if not self._site.policy.slomax.shard.enabled:
            return {}
        share = self._site.policy.slomax.shard.lease_share
        return {book: units for book in self._pools if (units := int(share * self._limits[book]))}

    def entries(self, book: str) -> tuple[Entries, float]:
        """What tells of credit of the book that was spent, and for how long a silent holder's rest counts."""
        if book.startswith(quota_book("")):
            return SpentCredit(), HOLD_S
        return PoolEntries(self._site.ledger, self._site.envelopes, lambda: self._named(book)), SILENT_HOLD_S

    def _named(self, book: str) -> Iterable[str]:
        return self._instances.get(book, ())
