"""Margin: how far off predictions were, and how often a credited prefix was there."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from tokenfleet.core.records import KvState

RESIDUALS_KEPT = 500
RESIDUALS_MIN = 30  # below, the p90 of a sample is its greatest member; the default is better
COVERAGE = 0.9
MARGIN_MAX = 5.0
OFFSETS_KEPT = 64
OFFSETS_MIN = 8  # one stalled request is no offset
HIT_PRIOR_SAMPLES = 50.0
HIT_REMEMBERED = 1000.0


class Margin:
    """Split-conformal p90 of |actual − predicted| / predicted over the last 500 first tokens."""

    def __init__(self, default: float) -> None:
        self._default = default
        self._ratios: deque[float] = deque(maxlen=RESIDUALS_KEPT)

    def observe(self, ratio: float) -> None:
        if ratio >= 0.0:  # also drops NaN
            self._ratios.append(min(ratio, MARGIN_MAX))

    def value(self) -> float:
        """The ⌈(n + 1) · 0.9⌉-th smallest of n: covers the next one with chance ≥ 0.9 if they are exchangeable."""
        n = len(self._ratios)
        if n < RESIDUALS_MIN:
            return self._default
        return sorted(self._ratios)[min(math.ceil((n + 1) * COVERAGE), n) - 1]


class Bias:
    """What first tokens come later than wait + work for: network, tokenizer, the engine's own overhead.

    Median over the last 64 prompts that found no queue. What a queue takes longer than predicted grows with the queue
    and would be wrong for an idle instance; that is the margin's.
    """

    def __init__(self) -> None:
        self._offsets_s: deque[float] = deque(maxlen=OFFSETS_KEPT)

    def observe(self, actual_s: float, *, wait_s: float, work_s: float) -> None:
        """A prompt that found no queue. One that came earlier than its work was predicted says nothing but about the
        work: at most the wait was not there."""
        self._offsets_s.append(max(actual_s - wait_s - work_s, -wait_s))

    def value_s(self) -> float:
        """Seconds; 0 before eight prompts."""
        return median(self._offsets_s) if len(self._offsets_s) >= OFFSETS_MIN else 0.0


class HitChance:
    """Chance that a credited prefix is there, by source of evidence: the share of the credit that engines reported."""

    def __init__(self, priors: Mapping[KvState, float]) -> None:
        self._priors = dict(priors)
        self._hits: dict[KvState, float] = dict.fromkeys(priors, 0.0)
        self._samples: dict[KvState, float] = dict.fromkeys(priors, 0.0)

    def observe(self, source: KvState, *, credited_tokens: int, cached_tokens: int) -> None:
        """One first token. Cached beyond the credit is no evidence about the credit."""
        if credited_tokens <= 0:
            return
        keep = 1.0 - 1.0 / HIT_REMEMBERED
        share = min(max(cached_tokens, 0) / credited_tokens, 1.0)
        self._hits[source] = self._hits[source] * keep + share
        self._samples[source] = self._samples[source] * keep + 1.0

    def value(self, source: KvState) -> float:
        n, prior = self._samples[source], self._priors[source]
        return (self._hits[source] + HIT_PRIOR_SAMPLES * prior) / (n + HIT_PRIOR_SAMPLES)
