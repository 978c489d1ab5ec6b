"""Reserve: how much of a pool stays free for interactive work, since nothing that runs can be preempted?

What can't be taken back drains by itself: in T_drain, the q90 of the times that running non-interactive work still
needs, as much must be free as interactive requests may bring meanwhile, the q99 of what they brought in so long a time.
The reserve is that in shares of the pool, within the policy's bounds. This is the rule where engines tell no iteration
counts; where they do, pacing's forecasts gate more finely.

One `Reserve` a pool. Call `arrived` for each interactive request. Before non-interactive work goes out ask `now` for
the reserve and `may_start` whether the work may.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct

from tokenfleet.core.policy import Policy
from tokenfleet.core.slomax.terms import ReservePolicy

HISTORY_S = 600  # arrivals of the last ten minutes, by the second
HISTORY_MIN_S = 60  # below, arrivals say little: the least share is kept
LOOKED_EVERY_S = 0.5
DRAIN_MAX_S = 300.0  # no q99 of half the history
DRAIN_QUANTILE, ARRIVALS_QUANTILE = 0.9, 0.99


class Reserved(Struct, frozen=True, kw_only=True):
    """What is kept free: `share` of the pool, for `need_s` GPU seconds that may arrive within `drain_s`."""

    share: float
    drain_s: float
    need_s: float


class Reserve:
    """The interactive arrivals of one pool, in predicted GPU seconds by the second."""

    def __init__(self, terms: ReservePolicy) -> None:
        self.terms = terms
        self._seconds = np.zeros(HISTORY_S)
        self._first: int | None = None
        self._last = 0
        self._reserved: Reserved | None = None
        self._looked_s = 0.0

    def arrived(self, seconds: float, now_s: float) -> None:
        """An interactive request of so many predicted GPU seconds came; times never go back."""
        if not seconds > 0.0:
            return
        self._advance(now_s)
        self._seconds[self._last % HISTORY_S] += seconds

    def lately(self, running_left_s: Callable[[], Sequence[float]], *, instances: int, now_s: float) -> Reserved:
        """The reserve of now, or of up to LOOKED_EVERY_S ago: what runs is gone through for it."""
        if self._reserved is None or now_s - self._looked_s >= LOOKED_EVERY_S:
            self._reserved = self.now(running_left_s(), instances=instances, now_s=now_s)
            self._looked_s = now_s
        return self._reserved

    def now(self, running_left_s: Sequence[float], *, instances: int, now_s: float) -> Reserved:
        """The reserve while non-interactive work with these remaining times runs on the pool's ready instances.

        A remaining time is the predicted one at a cautious output length (q90) less the request's age, at least 0.
        """
        drain_s = min(_quantile(np.sort(np.asarray(running_left_s, dtype=np.float64)), DRAIN_QUANTILE), DRAIN_MAX_S)
        need_s = self._need_s(max(round(drain_s), 1), now_s) if drain_s > 0.0 else 0.0
        room_s = max(instances, 1) * max(drain_s, 1.0)
        share = min(max(need_s / room_s, self.terms.share_min), self.terms.share_max)
        return Reserved(share=share, drain_s=drain_s, need_s=need_s)

    def _need_s(self, window_s: int, now_s: float) -> float:
        """The q99 of what came in any `window_s` whole seconds of the history."""
        self._advance(now_s)
        known_s = 0 if self._first is None else min(self._last - self._first, HISTORY_S - 1)
        if known_s < HISTORY_MIN_S:
            return 0.0
        by_second = self._seconds[np.arange(self._last - known_s, self._last) % HISTORY_S]
        sums_s = np.concatenate(([0.0], np.cumsum(by_second)))
        window_s = min(window_s, known_s)
        return _quantile(np.sort(sums_s[window_s:] - sums_s[:-window_s]), ARRIVALS_QUANTILE)

    def _advance(self, now_s: float) -> None:
        """Empties the seconds that nothing came in since the last."""
        second = int(now_s)
        if self._first is None:
            self._first = self._last = second
        for passed in range(max(self._last + 1, second - HISTORY_S + 1), second + 1):
            self._seconds[passed % HISTORY_S] = 0.0
        self._last = max(self._last, second)


def may_start(
    *, free_share: float, needs_share: float, ends_in_s: float, reserved: Reserved, terms: ReservePolicy
) -> bool:
    """Whether non-interactive work that takes `needs_share` of the pool may start while `free_share` of it is free:
    the reserve stays whole, or the work is predicted to end soon enough to borrow from it."""
    left = free_share - needs_share
    return left >= reserved.share or (left >= 0.0 and ends_in_s <= terms.borrow_max_s)


def _quantile(ascending: np.ndarray, q: float) -> float:
    """The least that a share q of them does not exceed; 0 of none."""
    return float(ascending[min(int(np.ceil(q * len(ascending))), len(ascending)) - 1]) if len(ascending) else 0.0


class Reserves:
    """The reserve of each pool of a site, by model; they follow the policy in force."""

    def __init__(self, policy: Policy) -> None:
        self._terms = policy.slomax.reserve
        self._reserves: dict[str, Reserve] = {}

    def of(self, model: str) -> Reserve:
        found = self._reserves.get(model)
        if found is None:
            found = self._reserves[model] = Reserve(self._terms)
        return found

    def follow(self, policy: Policy) -> None:
        """Another policy is in force; pools of models that it lacks are forgotten."""
        self._terms = policy.slomax.reserve
        self._reserves = {model: each for model, each in self._reserves.items() if model in policy.models}
        for each in self._reserves.values():
            each.terms = self._terms
