"""Waits: how long is a place in the line of one class likely to take?

Read off those who went from it lately: the seconds that each waited over the places that it had before it. Nothing is
modelled, so what other classes take meanwhile is in it.
"""

from collections import deque

KEPT = 100


class Waits:
    """The last that went."""

    def __init__(self) -> None:
        self._seconds_a_place: deque[float] = deque(maxlen=KEPT)

    def went(self, *, position: int, waited_s: float) -> None:
        """One that had joined as number `position` went after so long."""
        self._seconds_a_place.append(waited_s / position)

    def expected_s(self, position: int) -> tuple[float, float] | None:
        """What number `position` is likely to wait (q50, q90); None before any went."""
        if not self._seconds_a_place:
            return None
        ordered = sorted(self._seconds_a_place)
        q50, q90 = (ordered[int(share * len(ordered))] for share in (0.5, 0.9))
        return position * q50, position * q90
