"""Lengths: a histogram of token counts in logarithmic buckets that forgets slowly."""

import math

BUCKETS_PER_OCTAVE = 8  # a quantile is right within 2^(1/16) − 1 = 4.4 %
BUCKETS_MAX = 8 * 32  # up to 2^32 tokens
REMEMBERED_SAMPLES = 2000  # a sample weighs 1/e after so many more; the sum of weights never exceeds it


class Lengths:
    """Decayed counts by length. Each new sample weighs 1, all before it lose 1/REMEMBERED_SAMPLES."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self._unit = 1.0  # what a new sample weighs: growing it is cheaper than shrinking all others
        self._sum = 0.0

    @property
    def samples(self) -> float:
        """Effective number of samples, ≤ REMEMBERED_SAMPLES."""
        return self._sum / self._unit

    def add(self, tokens: int) -> None:
        if self._sum:
            self._unit /= 1.0 - 1.0 / REMEMBERED_SAMPLES
        bucket = _bucket(tokens)
        self._weights[bucket] = self._weights.get(bucket, 0.0) + self._unit
        self._sum += self._unit
        if self._unit > 1e100:
            self._scale(1.0 / self._unit)

    def quantile(self, q: float) -> float:
        """The length, in tokens, that a share q of the samples does not exceed; 0 without samples."""
        left = q * self._sum
        for bucket in sorted(self._weights):
            left -= self._weights[bucket]
            if left <= 0.0:
                return _middle(bucket)
        return _middle(max(self._weights)) if self._weights else 0.0

    def _scale(self, factor: float) -> None:
        self._weights = {bucket: weight * factor for bucket, weight in self._weights.items()}
        self._unit *= factor
        self._sum *= factor


def _bucket(tokens: int) -> int:
    return min(round(math.log2(max(tokens, 1)) * BUCKETS_PER_OCTAVE), BUCKETS_MAX)


def _middle(bucket: int) -> float:
    return 2.0 ** (bucket / BUCKETS_PER_OCTAVE)
