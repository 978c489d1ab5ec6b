"""Allowance: how much of the guarded class's time per output token a reserving class may cost, held on its target."""

from collections import deque

from tokenfleet.core.policy import PacingPolicy

VIRTUAL_SUCCESSES = 5  # so that a few requests in an idle minute decide nothing


class Allowance:
    """One pool's controlled number, a share of the guarded time per output token."""

    def __init__(self, terms: PacingPolicy) -> None:
        self.share = terms.allowance_start
        self._due_s: float | None = None
        self._settled: deque[tuple[float, bool]] = deque()

    def settled(self, *, met: bool, now_s: float) -> None:
        """A request of the guarded class ended."""
        self._settled.append((now_s, met))

    def advance(self, terms: PacingPolicy, now_s: float) -> None:
        """Corrects the share once a period: down quickly when the guarded class misses, up slowly when it doesn't."""
        if self._due_s is None:
            self._due_s = now_s + terms.allowance_period_s
        if now_s < self._due_s:
            return
        self._due_s = now_s + terms.allowance_period_s
        while self._settled and self._settled[0][0] < now_s - terms.allowance_window_s:
            self._settled.popleft()
        met = sum(met for _, met in self._settled) + VIRTUAL_SUCCESSES
        attainment = met / (len(self._settled) + VIRTUAL_SUCCESSES)
        if attainment < terms.attainment_low:
            self.share = max(terms.allowance_min, self.share * terms.allowance_cut)
        elif attainment > terms.attainment_high:
            self.share = min(terms.allowance_max, self.share + terms.allowance_step)
