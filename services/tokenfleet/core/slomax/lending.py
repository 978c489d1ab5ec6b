"""Lending: may a class hold more of its pool now, given its share, what others hold, and what is kept for them?

A pool has two kinds of credit, and a share is one of both: KV tokens, which are held until a request ends, and GPU
seconds, which pass. A class may always have its share. What it does not use is lent to the others, but for its floor,
and for its whole share while requests of it wait or were turned away lately. Nothing that runs is taken back: what is
lent comes back as it ends.
"""

from collections.abc import Collection, Mapping

from msgspec import Struct

from tokenfleet.core.slomax.terms import ControllerPolicy, Setting

WANTS_S = 10.0  # so long after a request of a class was turned away its share is lent to nobody
WANTING_MAX = 1000


class Holdings(Struct, frozen=True, kw_only=True):
    """One credit of a pool: what its ready instances have, what is held of it, and what of that by class.

    `passes`: what is beyond the capacity waits in engines and is gone in a while; else it must not be.
    """

    of: str
    capacity: float
    held: float
    by_class: Mapping[str, float]
    passes: bool = False


def beyond_share(
    name: str, need: float, *, holds: Holdings, setting: Setting, terms: ControllerPolicy, wanting: Collection[str]
) -> str:
    """Why class `name` may not hold `need` of the credit more now, empty if it may.

    `wanting` are the classes whose whole share is kept for them. The first request of a class that holds nothing is
    within its bounds: what is left to see is whether the pool has room.
    """
    room = setting.ceiling * holds.capacity
    own = holds.by_class.get(name, 0.0)
    if not holds.passes and holds.held + need > room and holds.held > 0.0:
        return f"{holds.held:,.0f} {holds.of} of the pool are held, it is filled to {room:,.0f}"
    if not own:
        return ""
    most = terms.classes[name].ceiling if name in terms.classes else 1.0
    if own + need > most * room:
        return f"{name} has {own:,.0f} {holds.of}, its ceiling is {most * room:,.0f}"
    if own + need <= setting.shares.get(name, 0.0) * room:
        return ""
    kept = sum(
        max(0.0, (setting.shares[other] if other in wanting else each.floor) * room - holds.by_class.get(other, 0.0))
        for other, each in terms.classes.items()
        if other != name
    )
    if holds.held + need + kept > room:
        share = setting.shares.get(name, 0.0) * room
        return f"{name} has {own:,.0f} {holds.of}, its share is {share:,.0f}, and {kept:,.0f} are kept for others"
    return ""


class Wanting:
    """When a request of each class of a pool was last turned away for want of room."""

    def __init__(self) -> None:
        self._at_s: dict[tuple[str, str], float] = {}

    def turned_away(self, model: str, name: str, now_s: float) -> None:
        if len(self._at_s) < WANTING_MAX or (model, name) in self._at_s:
            self._at_s[model, name] = now_s

    def of(self, model: str, now_s: float) -> set[str]:
        """The classes of the model's pool that were turned away within WANTS_S."""
        return {name for (of, name), at_s in self._at_s.items() if of == model and now_s - at_s <= WANTS_S}
