"""Attainment: how far is each class of a pool from its target, and is that known well enough to act on?

Outcomes are gathered over the last windows until they say enough, then they move a smoothed value once and are done.
"""

import math
from collections import deque
from collections.abc import Mapping

from msgspec import Struct

from tokenfleet.core.slomax.terms import ControllerPolicy

GATHERED_WINDOWS = 6  # outcomes of a minute; older ones tell of another load
Z = 1.96  # 95 %
EXACT = 1e-9  # .98 − 1 is not quite −.02
ERROR_SUM_MAX = 1.0  # of target − attainment; a step's worth with the default gain is 1.5


class ClassWindow(Struct, frozen=True, kw_only=True):
    """Logical requests of one class that ended in a window, as goodput counts them, and those that wait at its end.

    `offered_s` is the predicted GPU seconds of what arrived, `waiting_s` of what waits.
    """

    met: int = 0
    missed: int = 0
    rejected: int = 0
    waiting: int = 0
    offered_s: float = 0.0
    waiting_s: float = 0.0


class Attainment:
    """Smoothed attainment of each class over what was offered, and of the whole pool over what was admitted."""

    def __init__(self) -> None:
        self._classes: dict[str, _Smoothed] = {}
        self._admitted = _Smoothed()
        self._target = 0.0
        self._sums: dict[str, float] = {}

    def hear(self, classes: Mapping[str, ClassWindow], terms: ControllerPolicy) -> None:
        """One more closed window."""
        admitted, met, target = 0, 0, 0.0
        for name, window in classes.items():
            if (share := terms.classes.get(name)) is None:
                continue
            smoothed = self._classes.setdefault(name, _Smoothed())
            ended = window.met + window.missed
            if smoothed.add(window.met, ended + window.rejected, terms):
                self._add_error(name, terms)
            admitted, met, target = admitted + ended, met + window.met, target + share.target * ended
        if admitted:
            self._target = target / admitted
        self._admitted.add(met, admitted, terms)

    def begin_anew(self) -> None:
        """The setting has changed: what was gathered tells of the one before, and is not acted on again."""
        for smoothed in (*self._classes.values(), self._admitted):
            smoothed.begin_anew()

    def of(self, name: str) -> float:
        """The smoothed attainment, 1 before any is known."""
        smoothed = self._classes.get(name)
        return 1.0 if smoothed is None or smoothed.value is None else smoothed.value

    def error(self, name: str, terms: ControllerPolicy) -> float:
        """e = target − attainment, 0 within the dead band and without news since the last change."""
        smoothed = self._classes.get(name)
        if smoothed is None or not smoothed.fresh or smoothed.value is None:
            return 0.0
        error = terms.classes[name].target - smoothed.value
        return error if abs(error) > terms.dead_band + EXACT else 0.0

    def error_sum(self, name: str) -> float:
        """Σe since the error last vanished or changed its sign: what is over pushes no further."""
        return self._sums.get(name, 0.0)

    def shortfall(self, terms: ControllerPolicy) -> float | None:
        """How far admitted work is under its classes' targets, weighted by their numbers; None without news."""
        return (
            self._target - self._admitted.value if self._admitted.fresh and self._admitted.value is not None else None
        )

    def _add_error(self, name: str, terms: ControllerPolicy) -> None:
        error, before = self.error(name, terms), self._sums.get(name, 0.0)
        total = before + error if error * before >= 0.0 and error else error
        self._sums[name] = min(max(total, -ERROR_SUM_MAX), ERROR_SUM_MAX)


class _Smoothed:
    """A share of outcomes, smoothed over batches of enough of them. `fresh`: there is news since the last change."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.fresh = False
        self._gathered: deque[tuple[int, int]] = deque(maxlen=GATHERED_WINDOWS)

    def add(self, met: int, of: int, terms: ControllerPolicy) -> bool:
        """Whether the value has moved."""
        self._gathered.append((met, of))
        met, of = sum(m for m, _ in self._gathered), sum(n for _, n in self._gathered)
        if not enough(met, of, terms):
            return False
        self._gathered.clear()
        share = met / of
        self.value = share if self.value is None else self.value + terms.smoothing * (share - self.value)
        self.fresh = True
        return True

    def begin_anew(self) -> None:
        self._gathered.clear()
        self.fresh = False


def enough(met: int, of: int, terms: ControllerPolicy) -> bool:
    """Whether so many outcomes say enough: by their number, or by the half-width of Wilson's interval."""
    return of >= terms.outcomes_min or (of > 0 and half_width(met, of) <= terms.half_width_max)


def half_width(met: int, of: int) -> float:
    """Half the width of the 95 % interval of a share (Wilson 1927)."""
    p = met / of
    return Z / (1.0 + Z * Z / of) * math.sqrt(p * (1.0 - p) / of + Z * Z / (4.0 * of * of))
