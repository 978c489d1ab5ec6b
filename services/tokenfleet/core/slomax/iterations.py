"""Iterations: how many steps each engine of a pool took lately, from the counters in its heartbeats."""

from collections import deque
from typing import NamedTuple

import numpy as np

from tokenfleet.core.columns import Floats, Labels

KEPT_MAX = 64  # samples of one instance; at four scrapes a second 16 s


class _Sample(NamedTuple):
    at_s: float
    steps: float


class Iterations:
    """The last counts of each instance, on this process's clock."""

    def __init__(self) -> None:
        self._boots: dict[str, str] = {}
        self._samples: dict[str, deque[_Sample]] = {}

    def heard(self, instance: str, *, boot: str, count: float | None, at_s: float | None) -> None:
        """A counter read at `at_s`. Unknown, older than the newest, or fallen: it says nothing; another boot begins
        anew."""
        if count is None or at_s is None:
            return
        samples = self._samples.get(instance)
        if samples is None or self._boots.get(instance) != boot or (samples and count < samples[-1].steps):
            samples = self._samples[instance] = deque(maxlen=KEPT_MAX)
            self._boots[instance] = boot
        if not samples or at_s > samples[-1].at_s:
            samples.append(_Sample(at_s, count))

    def forget(self, instance: str) -> None:
        """The instance is gone."""
        self._samples.pop(instance, None)
        self._boots.pop(instance, None)

    def recent(self, labels: Labels, window_s: float) -> tuple[Floats, Floats]:
        """Seconds and iterations of the last window of each, by slot; NaN where no two counts are known.

        The window ends with the newest count and begins with the youngest one that is at least so old, or the oldest.
        """
        spent = np.full((2, len(labels.names)), np.nan)
        for slot, name in enumerate(labels.names):
            samples = self._samples.get(name, ())
            if len(samples) < 2:
                continue
            last = first = samples[-1]
            for sample in reversed(samples):
                first = sample
                if last.at_s - sample.at_s >= window_s:
                    break
            spent[0, slot], spent[1, slot] = last.at_s - first.at_s, last.steps - first.steps
        return spent[0], spent[1]
