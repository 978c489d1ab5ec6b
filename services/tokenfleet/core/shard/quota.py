"""Quota: N requests a minute of a tenant, exact at any number of replicas.

The owner of the book "tenant" lends credit of requests by the same leases; what is spent counts for a minute from when
the owner heard of it, which is after it was spent, and the rest of a holder that says nothing counts as spent for a
minute after its ttl. So no minute has more than N and what replicas spend ahead: one that holds nothing, as every idle
one, may admit a second's worth of N (at least 1) before it is answered, and none for a minute after it was answered
that there is nothing. That is the declared overshoot, a replica. What a replica refuses after all it takes off the sum
that it tells.
"""

from collections import OrderedDict, deque

from tokenfleet.core.shard.records import Holder, LeaseRequest

WINDOW_S = 60.0
HOLDERS_MAX = 10_000
HOLD_S = WINDOW_S + 1.0  # a holder's clock may be a little slower


def ahead_of(limit: int) -> int:
    """Requests that a replica may admit ahead of the owner of a quota of `limit` a minute."""
    return max(1, limit // 60)


class SpentCredit:
    """The entries of a quota's book: requests that were admitted in the last minute, as their holders tell."""

    def __init__(self) -> None:
        self._told: OrderedDict[Holder, int] = OrderedDict()  # the net sum of each holder's life
        self._spent: deque[tuple[float, Holder, int]] = deque()
        self._sum = 0

    def units(self, at_s: float) -> int:
        """Requests that count at `at_s`."""
        while self._spent and at_s - self._spent[0][0] > HOLD_S:
            self._sum -= self._spent.popleft()[2]
        return self._sum

    def has_read(self, holder: Holder, envelopes: int) -> bool:
        """Requests tell the spending themselves."""
        return True

    def has_placed(self, ticket: str) -> bool:
        """Nobody waits for a quota."""
        return False

    def heard(self, request: LeaseRequest, at_s: float) -> None:
        """Count what was spent since the holder's last request, or take back what it refused."""
        self.units(at_s)
        # Whose earlier requests lie before the part of the log that is kept spent that longer than a minute ago.
        before = 0 if request.n == 1 else request.spent
        more = request.spent - self._told.get(request.holder, before)
        self._told[request.holder] = request.spent
        self._told.move_to_end(request.holder)
        if len(self._told) > HOLDERS_MAX:
            self._told.popitem(last=False)
        if more > 0:
            self._spent.append((at_s, request.holder, more))
            self._sum += more
        elif more < 0:
            self._take_back(request.holder, -more)

    def recount(self, at_s: float) -> None:
        """When the past's requests were spent is not known: they count for a minute from now."""
        self._spent = deque((at_s, holder, spent) for _, holder, spent in self._spent)

    def _take_back(self, holder: Holder, units: int) -> None:
        """The holder's oldest go first: what stays counts longer than it need, never shorter."""
        kept = list[tuple[float, Holder, int]]()
        for heard_s, of, spent in self._spent:
            taken = min(units, spent) if of == holder else 0
            units -= taken
            self._sum -= taken
            if spent > taken:
                kept.append((heard_s, of, spent - taken))
        self._spent = deque(kept)
