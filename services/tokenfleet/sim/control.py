"""Control: how a controlled number behaved: how often it turned round, and when it was where it belongs."""

from collections.abc import Callable, Sequence
from itertools import pairwise

from msgspec import Struct

MINUTE_S = 60.0
Series = Sequence[tuple[float, float]]  # (seconds, value from then on)


class Control(Struct, frozen=True, kw_only=True):
    """One controller over a run: `reversals` in all, and in the `worst_minute`. `settled_s` has for each change of the
    demand the seconds until the number was within its band for good, that is until the next change; None: never."""

    what: str
    changes: int
    reversals: int
    worst_minute: int
    settled_s: tuple[float | None, ...]


def control_of(
    what: str, series: Series, *, changes_s: Sequence[float], until_s: float, off: Callable[[float, float], bool]
) -> Control:
    """`off(seconds, value)`: the number is out of its band."""
    turned = turns(series)
    changes_s = [at_s for at_s in changes_s if at_s < until_s]
    ends_s = [*changes_s, until_s][1:]
    return Control(
        what=what,
        changes=sum(before != after for (_, before), (_, after) in pairwise(series)),
        reversals=len(turned),
        worst_minute=max((sum(at_s <= other < at_s + MINUTE_S for other in turned) for at_s in turned), default=0),
        settled_s=tuple(
            settled_s(series, from_s=from_s, until_s=end_s, off=off)
            for from_s, end_s in zip(changes_s, ends_s, strict=True)
        ),
    )


def turns(series: Series) -> list[float]:
    """When it rose after it had fallen, or fell after it had risen."""
    moves = [(at_s, after - before) for (_, before), (at_s, after) in pairwise(series) if after != before]
    return [at_s for (_, before), (at_s, after) in pairwise(moves) if before * after < 0.0]


def settled_s(series: Series, *, from_s: float, until_s: float, off: Callable[[float, float], bool]) -> float | None:
    """Seconds from `from_s` until it is off no more before `until_s`; None: it is off at the end."""
    last_s = from_s
    held = [*series, (until_s, series[-1][1])] if series else []
    for (at_s, value), (next_s, _) in pairwise(held):
        begin_s, end_s = max(at_s, from_s), min(next_s, until_s)
        if begin_s < end_s and off(begin_s, value):
            if end_s >= until_s:
                return None
            last_s = end_s
    return last_s - from_s
