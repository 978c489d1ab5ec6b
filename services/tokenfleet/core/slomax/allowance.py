"""Allowance: how much of the guarded class's time per output token a reserving class may cost, held on its target.

What a move does shows in what ends a period later, so a period's outcomes are judged once. The number turns round at
most once in a while, and each time it goes on in smaller steps, as Rprop does (Riedmiller and Braun 1993): so it comes
to rest where it belongs, and moves on from there when it is needed elsewhere.
"""

import math
from collections import deque

from tokenfleet.core.policy import PacingPolicy

VIRTUAL_SUCCESSES = 5  # so that a few requests in an idle minute decide nothing
TURNED, KEPT_ON = 0.5, 1.2  # what a move is of the one before, the other way and the same way; Rprop's own
LEAST = 1 / 4  # of a full step, after turns to and fro


class Allowance:
    """One pool's controlled number, a share of the guarded time per output token."""

    def __init__(self, terms: PacingPolicy) -> None:
        self.share = terms.allowance_start
        self._due_s: float | None = None
        self._settled: deque[tuple[float, bool]] = deque()
        self._rising: bool | None = None  # the way of the last move
        self._turned_s = -math.inf
        self._part = 1.0  # of a full step

    def settled(self, *, met: bool, now_s: float) -> None:
        """A request of the guarded class ended."""
        self._settled.append((now_s, met))

    def advance(self, terms: PacingPolicy, now_s: float) -> None:
        """Corrects the share once a period: down by a part where the guarded class misses, up by a step where it
        doesn't, and the other way than before only when it has not just turned round."""
        if self._due_s is None:
            self._due_s = now_s + terms.allowance_period_s
        if now_s < self._due_s:
            return
        self._due_s = now_s + terms.allowance_period_s
        while self._settled and self._settled[0][0] < now_s - terms.allowance_window_s:
            self._settled.popleft()
        met = sum(met for _, met in self._settled) + VIRTUAL_SUCCESSES
        attainment = met / (len(self._settled) + VIRTUAL_SUCCESSES)
        if attainment < terms.attainment_low and self.share > terms.allowance_min:
            if self._may_move(terms, now_s, rising=False):
                self.share = max(terms.allowance_min, self.share * (1.0 - (1.0 - terms.allowance_cut) * self._part))
        elif (
            attainment > terms.attainment_high
            and self.share < terms.allowance_max
            and self._may_move(terms, now_s, rising=True)
        ):
            self.share = min(terms.allowance_max, self.share + terms.allowance_step * self._part)

    def _may_move(self, terms: PacingPolicy, now_s: float, *, rising: bool) -> bool:
        """Whether it may go that way now; if so, `_part` is that of this move."""
        if rising == self._rising:
            self._part = min(1.0, self._part * KEPT_ON)
        elif self._rising is not None:
            if now_s - self._turned_s < terms.allowance_turn_s:
                return False
            self._part, self._turned_s = max(LEAST, self._part * TURNED), now_s
        self._rising = rising
        return True
