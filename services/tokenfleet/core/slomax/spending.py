"""Spending: GPU seconds of a pool that were given out to each class lately, by all replicas of its site.

By the policy's coefficients, as of the placements that were heard of: an exponential sum over SPENT_WINDOW_S, so that a
class that takes a share of an instance steadily has SPENT_WINDOW_S times that share.
"""

import math
from collections.abc import Mapping

from tokenfleet.core.policy import Policy
from tokenfleet.core.predict.work import request_work_s
from tokenfleet.core.records import Entry

SPENT_WINDOW_S = 10.0
LIKELY_OUTPUT = 0.4  # of the cautious estimate (q90) that a placement tells: q50 / q90 before any are learned


class Spending:
    """All pools of a site."""

    def __init__(self) -> None:
        self._spent: dict[str, dict[str, float]] = {}
        self._as_of_s: dict[str, float] = {}

    def placed(self, entry: Entry, policy: Policy, now_s: float) -> None:
        """A placement is heard of; one of names that the policy lacks counts nothing."""
        if (model := policy.models.get(entry.model)) is None or entry.request_class not in policy.classes:
            return
        told = entry.placed
        prompt_tokens = entry.uncached_tokens if told is None else told.hit_tokens + told.uncached_tokens
        output_tokens = LIKELY_OUTPUT * max(0, entry.kv_tokens - prompt_tokens)
        spent = self._decayed(entry.model, now_s)
        work_s = request_work_s(entry.uncached_tokens, prompt_tokens, output_tokens, model)
        spent[entry.request_class] = spent.get(entry.request_class, 0.0) + work_s

    def of(self, model: str, now_s: float) -> Mapping[str, float]:
        """By class, as of now."""
        return self._decayed(model, now_s)

    def _decayed(self, model: str, now_s: float) -> dict[str, float]:
        passed_s = now_s - self._as_of_s.get(model, now_s)
        if passed_s >= 0.0:
            self._as_of_s[model] = now_s
            kept = math.exp(-passed_s / SPENT_WINDOW_S)
            self._spent[model] = {name: seconds * kept for name, seconds in self._spent.get(model, {}).items()}
        return self._spent[model]
