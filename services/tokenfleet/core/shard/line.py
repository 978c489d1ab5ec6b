"""Line: the tickets of one book that wait, and whose turn it is.

By rank of class, and inside a rank start-time fair queueing over tenants: S = max(V, F_tenant), F = S + work/weight,
least S first. V is the start of the first in line, or of the last served when none waits, so an idle tenant rejoins
there and banks nothing, and an owner that rebuilt its line from tokens goes on where they stood. What came back unused
goes before all.
"""

import math
from bisect import bisect_left, insort

from msgspec import Struct

from tokenfleet.core.shard.records import Holder, Ticket

TENANTS_MAX = 10_000  # finish tags kept; then those of idle tenants are dropped


class Place(Struct, kw_only=True, eq=False):
    """A ticket as its owner has it: when it was last heard, and the number of its holder's message that told so.

    `heard_s` is the process's clock, None if that was while catching up; `heard_live_s` the one that stands still while
    nothing is heard. `holder` is who was heard, `n` the newest number. `came_s` is since when it has stood in line, on
    the process's clock, None if that is not known.
    """

    ticket: Ticket
    holder: Holder
    n: int
    heard_s: float | None
    heard_live_s: float
    arrived: int
    came_s: float | None
    granted: bool = False
    stands: bool = False  # its record was read back
    returned: bool = False

    @property
    def key(self) -> tuple[bool, int, float, int]:
        return not self.returned, self.ticket.rank, self.ticket.virtual_start, self.arrived


class Line:
    """All tickets of one book that have not ended; those with a grant out are not in order, but remembered."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self._order: list[tuple[tuple[bool, int, float, int], str]] = []
        self._finish: dict[tuple[int, str], float] = {}
        self._served: dict[int, float] = {}
        self._arrived = 0

    def __len__(self) -> int:
        return len(self.places)

    def start(self, rank: int, tenant: str, *, came_s: float | None = None) -> float:
        """The virtual start of a ticket of `tenant` that comes now, or came before and was sent away: then it goes
        before all of its tenant's that came after it."""
        start = max(self._now(rank), self._finish.get((rank, tenant), 0.0))
        if came_s is None:
            return start
        later = (
            place.ticket.virtual_start
            for place in self.places.values()
            if (place.ticket.rank, place.ticket.tenant) == (rank, tenant)
            and not place.granted
            and place.came_s is not None
            and place.came_s > came_s
        )
        return min(start, math.nextafter(min(later, default=math.inf), -math.inf))

    def ahead(self, rank: int, virtual_start: float) -> int:
        """How many wait before a ticket that comes now."""
        return bisect_left(self._order, ((True, rank, virtual_start, self._arrived), ""))

    def put(
        self,
        ticket: Ticket,
        *,
        holder: Holder,
        n: int,
        heard_s: float | None,
        heard_live_s: float,
        came_s: float | None = None,
        waits: bool = True,
    ) -> Place:
        """Take in a ticket that was not known."""
        self._arrived += 1
        place = self.places[ticket.ticket] = Place(
            ticket=ticket,
            holder=holder,
            n=n,
            heard_s=heard_s,
            heard_live_s=heard_live_s,
            arrived=self._arrived,
            came_s=came_s,
            granted=not waits,
        )
        tenant, finish = (ticket.rank, ticket.tenant), ticket.virtual_start + ticket.work_s
        self._finish[tenant] = max(finish, self._finish.get(tenant, 0.0))
        if len(self._finish) > TENANTS_MAX:
            self._finish = {key: end for key, end in self._finish.items() if end > self._now(key[0])}
        if waits:
            insort(self._order, (place.key, ticket.ticket))
        return place

    def first(self, most: int) -> list[Place]:
        """Those without a grant, in order."""
        return [self.places[name] for _, name in self._order[:most]]

    def serve(self, place: Place) -> None:
        """The ticket got a grant: it waits no longer, and may come back."""
        self._leave(place)
        place.granted = True
        rank = place.ticket.rank
        self._served[rank] = max(self._served.get(rank, 0.0), place.ticket.virtual_start)

    def give_back(self, place: Place) -> None:
        """Its grant came back unused: to the head."""
        self._leave(place)
        place.granted, place.returned = False, True
        insort(self._order, (place.key, place.ticket.ticket))

    def end(self, ticket: str) -> Place | None:
        """The ticket is no more."""
        place = self.places.pop(ticket, None)
        if place is not None:
            self._leave(place)
        return place

    def _leave(self, place: Place) -> None:
        entry = (place.key, place.ticket.ticket)
        at = bisect_left(self._order, entry)
        if at < len(self._order) and self._order[at] == entry:
            del self._order[at]

    def _now(self, rank: int) -> float:
        """V of a rank."""
        served = self._served.get(rank, 0.0)
        at = bisect_left(self._order, ((True, rank, -math.inf, 0), ""))
        if at == len(self._order) or self._order[at][0][1] != rank:
            return served
        return max(served, self._order[at][0][2])
