"""Due: the time to first token that most requests of a model keep, and the order in which held ones go because of it.

Least work first leaves the long prompts to the end, and they make the tail. So a request gains on shorter ones as it
nears the time that DUE_SHARE of all keep; one that can't keep it any more gains nothing by going early, and makes way.
That time is what the fleet achieved of late, so it follows the load and the model.
"""

import math
from bisect import bisect_left, insort
from collections import deque

from tokenfleet.core.policy import LateBindingPolicy

DUE_SHARE = 0.95
HEARD_MAX = 2000  # of the last 500 alone the quantile swings so much that it costs what it gains


class Due:
    """The DUE_SHARE quantile, by nearest rank, of the last HEARD_MAX times to first token; 0 before the first."""

    def __init__(self) -> None:
        self._last_s: deque[float] = deque()
        self._sorted_s: list[float] = []

    def heard(self, ttft_s: float) -> None:
        if len(self._last_s) == HEARD_MAX:
            del self._sorted_s[bisect_left(self._sorted_s, self._last_s.popleft())]
        self._last_s.append(ttft_s)
        insort(self._sorted_s, ttft_s)

    @property
    def due_s(self) -> float:
        return self._sorted_s[math.ceil(DUE_SHARE * len(self._sorted_s)) - 1] if self._sorted_s else 0.0


def rank(work_s: float, age_s: float, due_s: float, terms: LateBindingPolicy) -> float:
    """The place in the order, the least first, of `work_s` that waits since `age_s`: work less ageing, divided by
    1 + weight · exp(−slack / (share · due)) while there is slack until `due_s`."""
    aged_s = work_s - terms.age_gain * age_s
    slack_s = due_s - age_s - work_s
    if slack_s < 0.0 or due_s <= 0.0:
        return aged_s
    return aged_s / (1.0 + terms.due_weight * math.exp(-slack_s / (terms.due_near_share * due_s)))
