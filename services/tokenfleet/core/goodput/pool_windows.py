"""PoolWindows: what each pool delivered in the last closed windows, as its controller of shares reads it.

Counts are goodput's, by event time, as of when the watermark passed the window. What was offered is the arrivals of a
class times the mean work of those that ended, so that it depends on callers alone; what waits is what was turned away,
and what was placed and has no first token. Instances and the use of KV are those of the sites' last summaries.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from tokenfleet.core.accounts import GoodputPartial
from tokenfleet.core.goodput.labels import is_pool
from tokenfleet.core.goodput.table import GoodputSums, GoodputTable
from tokenfleet.core.policy import Policy
from tokenfleet.core.predict.work import request_work_s, uncached_tokens
from tokenfleet.core.records import OutcomeEvent, PoolSummary, SiteSummary
from tokenfleet.core.slomax.attainment import ClassWindow
from tokenfleet.core.slomax.controller import Window

KEPT_S = 120.0  # of rows; a window is read once, when it closes
WINDOWS_AT_ONCE = 6  # that closed since the last look; older ones tell nothing of now
WORK_GAIN = 0.002  # the mean of about the last five hundred
RATIOS_KEPT = 500  # of a pool, since the last window
RATIOS_MIN = 20
PREDICTED_MIN_S = 0.1  # of shorter first tokens the delay of their report is a great part


class _Told(NamedTuple):
    """What the last summary said of a pool, its revisions added up."""

    ready: int = 0
    queued: float = 0.0
    kv_used: float = 0.0
    kv_capacity: float = 0.0

    def plus(self, pool: PoolSummary) -> "_Told":
        return _Told(
            ready=self.ready + pool.ready,
            queued=self.queued + pool.seats.queued,
            kv_used=self.kv_used + pool.kv.used,
            kv_capacity=self.kv_capacity + pool.kv.capacity,
        )


class _Work:
    """Mean GPU seconds of a request."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._known = 0

    def hear(self, work_s: float) -> None:
        self._known += 1
        self.mean_s += max(1.0 / self._known, WORK_GAIN) * (work_s - self.mean_s)


class PoolWindows:
    """All pools. `width_s` is that of the windows, one of goodput's."""

    def __init__(self, width_s: float) -> None:
        self._width_s = width_s
        self._table = GoodputTable(kept_s=KEPT_S)
        self._next_s: float | None = None
        self._work: defaultdict[tuple[str, str], _Work] = defaultdict(_Work)
        self._ratios: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=RATIOS_KEPT))
        self._told: dict[str, dict[str, _Told]] = {}  # by site

    @property
    def watermark_s(self) -> float | None:
        """Event time up to which windows are complete."""
        return self._table.watermark_s

    def hear(self, partial: GoodputPartial) -> None:
        """Rows as they are published."""
        rows = tuple(row for row in partial.rows if row.width_s == self._width_s)
        self._table.hear(replace(partial, rows=rows))

    def hear_summary(self, summary: SiteSummary) -> None:
        told = dict[str, _Told]()
        for pool in summary.pools:
            told[pool.pool] = told.get(pool.pool, _Told()).plus(pool)
        self._told[summary.site] = told

    def observe(self, events: Iterable[OutcomeEvent], policy: Policy) -> None:
        """Events that were not heard before; those of names that the policy lacks tell nothing."""
        for event in events:
            if event.model not in policy.models or not is_pool(event.pool, policy):
                continue
            if event.kind == "finished" and event.prompt_tokens is not None and event.output_tokens is not None:
                if event.request_class in policy.classes:
                    computed = uncached_tokens(event.prompt_tokens, event.cached_tokens or 0)
                    model = policy.models[event.model]
                    work_s = request_work_s(computed, event.prompt_tokens, event.output_tokens, model)
                    self._work[event.pool, event.request_class].hear(work_s)
            elif event.kind == "first_token" and (event.predicted_ttft_s or 0.0) >= PREDICTED_MIN_S:
                assert event.predicted_ttft_s is not None
                if event.attempt_s > 0.0:
                    self._ratios[event.pool].append(event.attempt_s / event.predicted_ttft_s)

    def closed(self, policy: Policy) -> Iterator[Mapping[str, Window]]:
        """The windows that closed since the last call, in order, each by pool; at first the last one alone."""
        last_s = self._table.closed_start_s(self._width_s)
        if last_s is None:
            return
        if self._next_s is None or last_s - self._next_s > WINDOWS_AT_ONCE * self._width_s:
            self._next_s = last_s
        while self._next_s <= last_s:
            yield self._window(self._next_s, policy)
            self._next_s += self._width_s

    def _window(self, start_s: float, policy: Policy) -> dict[str, Window]:
        told = {pool: its for of_site in self._told.values() for pool, its in of_site.items() if is_pool(pool, policy)}
        return {pool: self._of_pool(pool, its, start_s, policy) for pool, its in sorted(told.items())}

    def _of_pool(self, pool: str, told: _Told, start_s: float, policy: Policy) -> Window:
        sums = self._table.by("request_class", self._width_s, start_s, pool=pool)
        ratios = self._ratios.pop(pool, ())
        nothing = GoodputSums(seconds=self._width_s)
        return Window(
            start_s=start_s,
            width_s=self._width_s,
            classes={
                name: self._of_class(pool, name, sums.get(name, nothing)) for name in policy.slomax.controller.classes
            },
            output_tokens=sum(each.output_tokens for each in sums.values()),
            waste_tokens=sum(each.waste_tokens for each in sums.values()),
            ready=told.ready,
            queued=round(told.queued),
            utilisation=told.kv_used / told.kv_capacity if told.kv_capacity > 0.0 else 0.0,
            residual_ratio=median(ratios) if len(ratios) >= RATIOS_MIN else None,
        )

    def _of_class(self, pool: str, name: str, sums: GoodputSums) -> ClassWindow:
        return ClassWindow(
            met=sums.met,
            missed=sums.missed,
            rejected=sums.rejected,
            waiting=sums.rejected,
            offered_s=sums.offered_arrived * self._work[pool, name].mean_s,
        )
