"""Fair: which tenant of a class goes next?

Start-time fair queueing (Goyal, Vin and Cheng 1996) on predicted GPU seconds: a tenant's start tag is S = max(V, F),
its finish tag after a dispatch F = S + ĉ/weight, and the least start tag goes first. V, the virtual time, is the
greatest start tag of what went out. A tenant is charged when its request goes out and corrected when it ends, so what
was wasted is billed and what wasn't used is given back. Who was idle joins at V: time without demand is no credit.

One `Fair` serves one class of one pool. A ticket keeps `virtual_ns` as of when it joined. To choose, `order` puts what
waits in order; call `dispatched` for each that goes out, and `settled` once when its outcome is known. Tags are whole
virtual nanoseconds, so that sums stay exact however long a pool runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from msgspec import Struct

from tokenfleet.core.policy import Tenant
from tokenfleet.core.slomax.quota import tenant_entry
from tokenfleet.core.slomax.terms import FairPolicy

SECONDS_MAX = 1e6  # more GPU time is a fault, and must not shut a tenant out for good


class Waiting(NamedTuple):
    """One that waits: its tenant, the virtual time when it joined, its place inside its tenant (least first) and its
    predicted GPU seconds."""

    tenant: str
    joined_ns: int
    rank: float
    seconds: float


class Price(Struct, frozen=True, kw_only=True):
    """GPU seconds of a token: of one to prefill, and of one to decode with its share of the iteration it is made in.

    The correction counts what was computed at the prices of the dispatch.
    """

    prefill_s: float
    output_s: float

    def seconds(self, *, uncached_tokens: float, output_tokens: float) -> float:
        """ĉ = uncached/prefill rate + E[output] · TPOT/batch."""
        return uncached_tokens * self.prefill_s + output_tokens * self.output_s


def price(*, prefill_tokens_per_s: float, tpot_s: float, batch: float) -> Price:
    """The prices on an instance that prefills so many tokens a second and decodes `batch` sequences at `tpot_s`."""
    return Price(prefill_s=1.0 / prefill_tokens_per_s, output_s=tpot_s / max(batch, 1.0))


class Fair:
    """Virtual time and the finish tags of the tenants of one class of one pool.

    Tenants are the entries of the policy; all names that it doesn't know share the default tenant's account, so the
    number of accounts is bounded by the policy and no caller can push another's out.
    """

    def __init__(self, terms: FairPolicy, tenants: Mapping[str, Tenant], *, default_tenant: str) -> None:
        self.virtual_ns = 0
        self._finish_ns: dict[str, int] = {}
        self.follow(terms, tenants, default_tenant=default_tenant)

    def follow(self, terms: FairPolicy, tenants: Mapping[str, Tenant], *, default_tenant: str) -> None:
        """Another policy is in force: accounts of tenants that it lacks are closed."""
        self._credit_ns = _ns(terms.credit_max_s, 1.0)
        self._tenants, self._default = dict(tenants), default_tenant
        self._finish_ns = {name: tag for name, tag in self._finish_ns.items() if name in self._tenants}

    def start_of(self, tenant: str, joined_ns: int | None = None) -> int:
        """The start tag of the tenant's next request, in virtual nanoseconds.

        `joined_ns` is the virtual time when the earliest of its waiting requests joined, now by default.
        """
        return self._start_ns(self._entry(tenant), self.virtual_ns if joined_ns is None else joined_ns)

    def order(self, waiting: Sequence[Waiting]) -> Iterator[int]:
        """The places in `waiting` of those that go, in order, each as if all before it went.

        The tenant with the least start tag goes first, by its first in rank; of equal tags the one whose first is first
        in rank. Sorts what it is given: with long queues give the first of each tenant's, as many as can go.
        """
        lines: dict[str, list[int]] = {}
        for place in sorted(range(len(waiting)), key=lambda place: waiting[place].rank, reverse=True):
            lines.setdefault(self._entry(waiting[place].tenant), []).append(place)
        heads = [
            (self._start_ns(entry, min(waiting[place].joined_ns for place in line)), waiting[line[-1]].rank, entry)
            for entry, line in lines.items()
        ]
        heapify(heads)
        while heads:
            start_ns, _, entry = heads[0]
            line = lines[entry]
            place = line.pop()
            yield place
            after_ns = start_ns + self._cost_ns(entry, waiting[place].seconds)
            if line:
                heapreplace(heads, (after_ns, waiting[line[-1]].rank, entry))
            else:
                heappop(heads)

    def dispatched(self, tenant: str, seconds: float, *, joined_ns: int | None = None, waiting: int) -> None:
        """One of the tenant's requests went out, at so many predicted GPU seconds.

        `joined_ns` as in `start_of`; `waiting` requests of the class are left: when none is, nothing was contended and
        all tenants begin anew on one line.
        """
        entry = self._entry(tenant)
        start_ns = self._start_ns(entry, self.virtual_ns if joined_ns is None else joined_ns)
        self._finish_ns[entry] = start_ns + self._cost_ns(entry, seconds)
        self.virtual_ns = max(self.virtual_ns, start_ns)
        if not waiting:
            self.virtual_ns = max(self.virtual_ns, *self._finish_ns.values())

    def settled(self, tenant: str, *, predicted_s: float, actual_s: float) -> None:
        """A request that went out at `predicted_s` has cost `actual_s`: finished, cancelled, timed out or lost.

        Once a request. What became of it unknown, the prediction stands: don't call.
        """
        entry = self._entry(tenant)
        owed_ns = self._cost_ns(entry, actual_s) - self._cost_ns(entry, predicted_s)
        self._finish_ns[entry] = self._finish_ns.get(entry, self.virtual_ns) + owed_ns

    def __len__(self) -> int:
        return len(self._finish_ns)

    def _entry(self, tenant: str) -> str:
        return tenant_entry(tenant, tenants=self._tenants, default_tenant=self._default)

    def _start_ns(self, entry: str, joined_ns: int) -> int:
        return max(joined_ns, self._finish_ns.get(entry, joined_ns), self.virtual_ns - self._credit_ns)

    def _cost_ns(self, entry: str, seconds: float) -> int:
        tenant = self._tenants.get(entry)
        return _ns(seconds, 1.0 if tenant is None else tenant.weight)


def _ns(seconds: float, weight: float) -> int:
    return round(min(seconds, SECONDS_MAX) * 1e9 / weight) if seconds > 0.0 else 0  # what is no number costs nothing
