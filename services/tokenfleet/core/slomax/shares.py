"""Shares: how a pool is shared out between classes, and how much of it is filled at all."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from tokenfleet.core.slomax.terms import ClassShare, Setting

BISECTIONS = 60  # of a range of 2: to 2e-18
MOVED_MIN = 0.002  # a share that moves by less stays


Kind = Literal["step", "revert", "static"]


class ShareRevision(Struct, frozen=True, kw_only=True):
    """A change of one pool's setting, for those who enforce it and for the audit.

    `number` counts the pool's revisions from 1, `at_s` is the event time up to which outcomes were seen. `kind`: a
    `step` follows the outcomes, a `revert` takes back the step before, `static` is the policy's own setting.
    """

    pool: str
    number: int
    at_s: float
    kind: Kind
    old: Setting
    new: Setting
    why: str


def projected(
    wanted: Mapping[str, float], classes: Mapping[str, ClassShare], *lower: Mapping[str, float]
) -> dict[str, float]:
    """The shares nearest to those wanted that add up to 1 within floors and ceilings.

    All are moved by the same amount, as far as their bounds let them (the Euclidean projection). Of the sets of `lower`
    bounds the first is kept to that leaves any choice.
    """
    floors = {name: each.floor for name, each in classes.items()}
    for bounds in lower:
        raised = {n: max(each.floor, min(bounds.get(n, 0.0), each.ceiling)) for n, each in classes.items()}
        if sum(raised.values()) <= 1.0:
            floors = raised
            break

    def moved(by: float) -> dict[str, float]:
        return {name: min(max(wanted[name] + by, floors[name]), each.ceiling) for name, each in classes.items()}

    low, high = -1.0 - max(wanted.values(), default=0.0), 1.0 - min(wanted.values(), default=0.0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if sum(moved(middle).values()) < 1.0:
            low = middle
        else:
            high = middle
    return {name: round(share, 9) for name, share in moved(high).items()}


def one_moved(old: Mapping[str, float], wanted: Mapping[str, float], slots: int, *, hold: float) -> dict[str, float]:
    """The old shares with one of `slots` from who has most too many to who lacks most, if it is more than half of one.

    By `hold` more, so that what was moved is not moved back for as little.
    """
    lacks = {name: (wanted[name] - old[name]) * slots for name in old}
    to, giver = max(lacks, key=lacks.__getitem__), min(lacks, key=lacks.__getitem__)
    if lacks[to] - lacks[giver] < 1.0 + 2.0 * hold:
        return dict(old)
    return {n: round((share * slots + (n == to) - (n == giver)) / slots, 9) for n, share in old.items()}


def directions(old: Mapping[str, float], new: Mapping[str, float]) -> dict[str, int]:
    """1 for each share that rose, −1 for each that fell, without those that hardly moved."""
    moves = {name: new[name] - old.get(name, 0.0) for name in new}
    return {name: 1 if move > 0.0 else -1 for name, move in moves.items() if abs(move) >= MOVED_MIN}
