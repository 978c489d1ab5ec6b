"""Line: the requests of one class that wait for one pool, each tenant's in an order that time does not change."""

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Set
from itertools import count, islice
from typing import NamedTuple

from tokenfleet.core.tokenpilot.held import Call, Waiting


class _Place(NamedTuple):
    rank: float
    number: int
    waiting: Waiting


class Line:
    """By tenant (its entry in the policy), least rank first, of equal ones the first that came."""

    def __init__(self) -> None:
        self._tenants: dict[str, list[_Place]] = {}
        self._places: dict[Call, tuple[str, float, int]] = {}
        self._work_s: dict[str, float] = {}  # by tenant
        self._came: dict[str, OrderedDict[Call, Waiting]] = {}  # by tenant
        self._numbers = count()

    def put(self, waiting: Waiting, rank: float, tenant: str = "") -> None:
        number = next(self._numbers)
        self._places[waiting.call] = tenant, rank, number
        insort(self._tenants.setdefault(tenant, []), _Place(rank, number, waiting))
        self._came.setdefault(tenant, OrderedDict())[waiting.call] = waiting
        self._work_s[tenant] = self._work_s.get(tenant, 0.0) + waiting.work_s

    def take(self, call: Call) -> Waiting | None:
        """The request waits no longer, None if it didn't."""
        place = self._places.pop(call, None)
        if place is None:
            return None
        tenant, rank, number = place
        line = self._tenants[tenant]
        found = line.pop(bisect_left(line, (rank, number)))
        del self._came[tenant][call]
        self._work_s[tenant] -= found.waiting.work_s
        if not line:
            del self._tenants[tenant], self._came[tenant], self._work_s[tenant]
        return found.waiting

    def first(self, most: int) -> list[Waiting]:
        """The first of all tenants."""
        return [place.waiting for place in islice(heapq.merge(*self._tenants.values()), most)]

    @property
    def tenants(self) -> Set[str]:
        """Who waits."""
        return self._tenants.keys()

    def work_s(self, tenant: str) -> float:
        """Σ least work of the tenant's."""
        return self._work_s.get(tenant, 0.0)

    def count(self, tenant: str) -> int:
        """How many of the tenant's wait."""
        return len(self._tenants.get(tenant, ()))

    def by_tenant(self, most: int, *, rank: float | None = None) -> Iterator[tuple[str, list[Waiting]]]:
        """The first of each tenant; those of at least `rank` before the others where it is given."""
        for tenant, line in self._tenants.items():
            at = 0 if rank is None else bisect_left(line, (rank,))
            chosen = line[at : at + most]
            rest = line[: most - len(chosen)][:at]
            yield tenant, [place.waiting for place in (*chosen, *rest)]

    def before(self, call: Call, *, rank: float | None = None) -> int:
        """How many go before the request when tenants take turns: those of its own tenant before it, and as many of
        each other one. `rank` as in `by_tenant`."""
        tenant, own_rank, number = self._places[call]
        line = self._tenants[tenant]
        own = bisect_left(line, (own_rank, number))
        if rank is not None:
            behind = bisect_left(line, (rank,))
            own += -behind if own >= behind else len(line) - behind
        return own + sum(min(len(other), own) for name, other in self._tenants.items() if name != tenant)

    def oldest(self, *, without: Set[str] = frozenset()) -> Waiting | None:
        """Who came first of those that wait, `without` these tenants."""
        firsts = [next(iter(came.values())) for tenant, came in self._came.items() if tenant not in without]
        return min(firsts, key=lambda waiting: waiting.since_s, default=None)

    def __contains__(self, call: Call) -> bool:
        return call in self._places

    def __len__(self) -> int:
        return len(self._places)
