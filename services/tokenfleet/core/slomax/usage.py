"""Usage: which tenants flood a pool, so that what they send beyond their share only fills what others leave?

A tenant's share is its weight among those that use the pool. Its use is the GPU seconds given out to it lately, an
exponential mean. Who uses a multiple of its share floods the pool, until it uses no more than its share and little of
it waits. While it floods, its share is all that it gets as others do: for what is beyond, others go first in every
class, and it goes only where filling work may. So a flood costs those who send as ever what a batch of that size would
cost them, and a pool that nobody else wants is all its own.

One `Usage` a pool. Call `spent` for each request that goes out and `corrected` when it has ended.
"""

import math
from collections.abc import Callable

from tokenfleet.core.slomax.terms import FairPolicy

LOOKED_EVERY_S = 0.25
SMALL = 0.01  # who used less of the pool than this counts for nothing in the shares of the others


class Usage:
    """GPU seconds that the tenants (entries of the policy) of one pool used lately."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}
        self._as_of_s = 0.0
        self._looked_s = -math.inf
        self._flooding: frozenset[str] = frozenset()
        self._over: frozenset[str] = frozenset()

    def spent(self, tenant: str, seconds: float, terms: FairPolicy, now_s: float) -> None:
        """A request of so many predicted GPU seconds went out."""
        self._decay(terms, now_s)
        self._used_s[tenant] = self._used_s.get(tenant, 0.0) + (seconds if seconds > 0.0 else 0.0)  # not NaN
        if tenant in self._flooding:
            self._looked_s = -math.inf

    def corrected(self, tenant: str, *, predicted_s: float, actual_s: float) -> None:
        """A request that went out at `predicted_s` has cost `actual_s`."""
        if tenant in self._used_s:
            left_s = self._used_s[tenant] + actual_s - predicted_s
            self._used_s[tenant] = left_s if left_s > 0.0 else 0.0

    def over(
        self, weight: Callable[[str], float], waiting_s: Callable[[str], float], terms: FairPolicy, now_s: float
    ) -> frozenset[str]:
        """The flooding tenants that have had their share. `weight` is that of an entry of the policy, `waiting_s` the
        GPU seconds of its that wait."""
        if now_s - self._looked_s < LOOKED_EVERY_S:
            return self._over
        self._looked_s = now_s
        self._decay(terms, now_s)
        total_s = sum(self._used_s.values())
        active = {name: weight(name) for name, used_s in self._used_s.items() if used_s > SMALL * total_s}
        whole = sum(active.values())
        shares = {name: its / whole for name, its in active.items()}
        use = {name: self._used_s[name] / total_s for name in shares}
        begun = {
            name
            for name, share in shares.items()
            if use[name] > _bound(share, terms.flood_factor) and (use[name] - share) * total_s > terms.flood_min_s
        }
        self._over = frozenset(name for name in begun | self._flooding if use.get(name, 0.0) > shares.get(name, 0.0))
        going_on = {name for name in self._flooding if waiting_s(name) > terms.flood_min_s}
        self._flooding = frozenset(begun | self._over | going_on)
        return self._over

    def _decay(self, terms: FairPolicy, now_s: float) -> None:
        passed_s = now_s - self._as_of_s
        if passed_s <= 0.0:
            return
        kept = math.exp(-passed_s / terms.usage_window_s)
        self._as_of_s = now_s
        self._used_s = {name: left_s for name, used_s in self._used_s.items() if (left_s := used_s * kept) > 1e-6}


def _bound(share: float, factor: float) -> float:
    """The part of the use at which a tenant floods: a multiple of its share, but at most half of the rest more."""
    return min(factor * share, (1.0 + share) / 2)
