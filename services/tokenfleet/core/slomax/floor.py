"""Floor: which class has been passed over for so long that it goes before its betters?

Classes go by rank, so a saturated one would starve those below it. A class that waits is owed a share of all GPU
seconds given out meanwhile; once its oldest request has waited long, it goes first until it has had what it is owed.
So it either gets its share or waits no longer than a bound.

One `Floor` a pool. Before each round `order` says in which order the classes are asked and which of them are `owed`:
gates and prices of pacing don't hold for those, or the best class would keep the pool too busy for ever; bounds on
backlog and KV do. Call `dispatched` for each request that goes out.
"""

from collections.abc import Collection, Mapping, Sequence

from tokenfleet.core.slomax.terms import FairPolicy


class Floor:
    """What each waiting class of one pool is owed, in GPU seconds; below 0 it had more than its share."""

    def __init__(self, terms: FairPolicy) -> None:
        self.terms = terms
        self._owed_s: dict[str, float] = {}

    def owed(self, name: str, waited_s: float) -> bool:
        """Whether the class, whose oldest request has waited so long, goes first."""
        return waited_s >= self.terms.starved_after_s and self._owed_s.get(name, 0.0) > 0.0

    def order(self, by_rank: Sequence[str], waited_s: Mapping[str, float]) -> list[str]:
        """The classes that wait, in the order in which they are asked: those owed first, longest wait first, then by
        rank. `waited_s` is the age of the oldest request of each that waits."""
        first = sorted((name for name in waited_s if self.owed(name, waited_s[name])), key=lambda n: (-waited_s[n], n))
        return first + [name for name in by_rank if name in waited_s and name not in first]

    def dispatched(self, name: str, seconds: float, *, waiting: Collection[str]) -> None:
        """A request of the class went out, at so many predicted GPU seconds; `waiting` are the classes that wait now.

        What a class got beyond its share is held against it for no longer than its share takes to make up for one such
        request, and no more than `credit_max_s` of arrears is made up for.
        """
        if not seconds > 0.0:
            return
        owed_s = self._owed_s.get(name, 0.0)
        share_s = self.terms.floor_share * seconds
        self._owed_s = {
            each: min(self._owed_s.get(each, 0.0) + share_s, self.terms.credit_max_s) for each in {*waiting} - {name}
        }
        if name in waiting:
            self._owed_s[name] = max(owed_s - seconds, -seconds)
