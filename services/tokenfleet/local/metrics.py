"""Metrics: what the processes count, read from their /metrics pages and kept over their restarts."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from tokenfleet.local.http_get import NoAnswerError, get
from tokenfleet.local.layout import HOST

SAMPLE = re.compile(rb"^(tokenfleet_\w+)(?:\{(.*)\})? (\S+)", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels in order."""


class FleetMetrics:
    """The newest page of each process, and the sums of its counters over all its lives seen so far.

    `ports` are the status ports by process name.
    """

    def __init__(self, ports: Mapping[str, int]) -> None:
        self._ports = dict(ports)
        self._pages: dict[str, dict[Series, float]] = {}
        self._before: dict[str, dict[Series, float]] = {name: {} for name in ports}

    async def refresh(self) -> None:
        """Read all pages; a process that does not answer keeps its last one."""
        await asyncio.gather(*(self._read(name, port) for name, port in self._ports.items()))

    def gauge(self, name: str, process: str) -> float | None:
        """The value of a metric without labels; None if the process has not told it."""
        return self._pages.get(process, {}).get((name, ()))

    def state(self, name: str, process: str) -> str | None:
        """The present one of a metric's states; None if the process has not told it."""
        for (metric, labels), value in self._pages.get(process, {}).items():
            if metric == name and value == 1.0:
                return dict(labels)[name]
        return None

    def counted(self, name: str, process: str, **labels: str) -> dict[tuple[tuple[str, str], ...], float]:
        """A counter's (or bucket's) series that have these labels, summed over the process's lives."""
        lives = (self._before.get(process, {}), self._pages.get(process, {}))
        sums: dict[tuple[tuple[str, str], ...], float] = {}
        for series in (series for life in lives for series in life.items()):
            (metric, has), value = series
            if metric == name and labels.items() <= dict(has).items():
                sums[has] = sums.get(has, 0.0) + value
        return sums

    def histogram(self, name: str, processes: Iterable[str]) -> dict[float, float]:
        """Cumulative counts by upper bound over all these processes."""
        buckets: dict[float, float] = {}
        for process in processes:
            for labels, count in self.counted(f"{name}_bucket", process).items():
                bound = float(dict(labels)["le"])
                buckets[bound] = buckets.get(bound, 0.0) + count
        return buckets

    async def _read(self, name: str, port: int) -> None:
        try:
            status, body = await get(HOST, port, "/metrics")
        except NoAnswerError:
            return
        if status == 200:
            self.take(name, body)

    def take(self, process: str, page: bytes) -> None:
        """A new page. A counter that fell is another life's: what the last one had counted is kept."""
        new, last = dict(parse(page)), self._pages.get(process, {})
        if any(value < last.get(series, value) for series, value in new.items() if is_counter(series)):
            before = self._before.setdefault(process, {})
            for series, value in last.items():
                if is_counter(series):
                    before[series] = before.get(series, 0.0) + value
        self._pages[process] = new


def parse(page: bytes) -> Iterable[tuple[Series, float]]:
    """The samples of TokenFleet's own metrics on a Prometheus text page."""
    for name, labels, value in SAMPLE.findall(page):
        yield (name.decode(), tuple(sorted(LABEL.findall(labels.decode())))), float(value)


def is_counter(series: Series) -> bool:
    """Counters and histograms only grow within one life."""
    return series[0].endswith(("_total", "_bucket", "_count", "_sum"))


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of what a histogram saw lies, linear within a bucket; None for an empty one.

    What lies above the last finite bound is told as that bound.
    """
    bounds = sorted(buckets)
    if not bounds or not (total := buckets[bounds[-1]]):
        return None
    wanted = share * total
    if wanted <= buckets[bounds[0]]:
        return bounds[0] * wanted / buckets[bounds[0]]
    for low, high in pairwise(bounds):
        if buckets[low] < wanted <= buckets[high]:
            if high == float("inf"):
                return low
            return low + (high - low) * (wanted - buckets[low]) / (buckets[high] - buckets[low])
    return None
