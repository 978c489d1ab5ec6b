"""EventTime: when things happened, on the brokers' clock, as a function of the log alone.

Two clocks are never subtracted but through the broker: a gateway's offset is the least (broker append − event) of the
recent events on the clock that it names, a replica's the least (broker append − sent) of its envelopes, for events on
no named clock. So neither a wrong clock nor delays of single reports move events. Because nothing here depends on
when or from where a log is read (beyond OFFSET_WINDOW_S of warm-up), a replay gives every event the same time.
"""

import math
from collections import deque
from collections.abc import Iterable

from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent

OFFSET_WINDOW_S = 300.0  # a queue at the reporter shorter than this doesn't misdate its events
OFFSET_MAX_S = 0.5  # a reporter whose clock is further off is dated by the broker
REPORTERS_MAX = 4096  # of one partition; the one silent longest goes


class LogClock:
    """Event times of one partition of one outcomes topic, read in the order of the log.

    `head_s` is the greatest event time so far, −inf before any. An event is late when it lies more than the lateness
    behind the head *of its own log*: another partition's progress or this process's clock can't make it so.
    """

    def __init__(self) -> None:
        self.head_s = -math.inf
        self.misdated = 0  # events dated by the broker because their reporter's clock is off
        self._offsets: dict[tuple[str, str], _LeastRecent] = {}  # by replica, and the clock named or ""

    def date(self, envelope: OutcomeEnvelope, appended_wall_s: float) -> list[tuple[OutcomeEvent, float]]:
        """Each usable event with its time in Unix seconds, never after the broker took it."""
        replica_s = self._offset_s((envelope.replica, ""), appended_wall_s - envelope.sent_wall_s, appended_wall_s)
        dated: list[tuple[OutcomeEvent, float]] = []
        for event in filter(is_usable, envelope.events):
            offset_s = replica_s
            if event.clock:
                clock = (envelope.replica, event.clock)
                offset_s = self._offset_s(clock, appended_wall_s - event.at_wall_s, appended_wall_s)
            trusted = abs(offset_s) <= OFFSET_MAX_S
            self.misdated += not trusted
            dated.append((event, min(event.at_wall_s + offset_s, appended_wall_s) if trusted else appended_wall_s))
        return dated

    def advance(self, at_s: float) -> None:
        """An event of that time was taken."""
        self.head_s = max(self.head_s, at_s)

    def _offset_s(self, clock: tuple[str, str], told_s: float, appended_wall_s: float) -> float:
        """The clock's offset, with what this report told of it."""
        if not math.isfinite(told_s):
            return math.inf
        least = self._offsets.pop(clock, None) or _LeastRecent()
        self._offsets[clock] = least  # now the youngest key
        if len(self._offsets) > REPORTERS_MAX:
            del self._offsets[next(iter(self._offsets))]
        return least.add(appended_wall_s, told_s)


class _LeastRecent:
    """The least value of the last OFFSET_WINDOW_S: a queue of values that no later one undercuts."""

    def __init__(self) -> None:
        self._ascending: deque[tuple[float, float]] = deque()

    def add(self, at_s: float, value: float) -> float:
        while self._ascending and self._ascending[-1][1] >= value:
            self._ascending.pop()
        self._ascending.append((at_s, value))
        while self._ascending[0][0] < at_s - OFFSET_WINDOW_S:
            self._ascending.popleft()
        return self._ascending[0][1]


class Watermark:
    """How far event time is complete: the least head of the logs that are not idle, minus a lag.

    All logs idle: the furthest head goes on with this process's clock. None until every log was read to its end once:
    half-read logs say nothing about each other.
    """

    def __init__(self, sources: Iterable[str], *, lag_s: float, idle_s: float) -> None:
        self._lag_s = lag_s
        self._idle_s = idle_s
        self._heard: dict[str, tuple[float, float]] = {}
        self._behind = set(sources)
        self._reached_s = -math.inf

    def heard(self, source: str, head_s: float, now_s: float) -> None:
        self._heard[source] = (head_s, now_s)

    def caught_up(self, source: str) -> None:
        """That log has been read to the end it had at start."""
        self._behind.discard(source)

    def at(self, now_s: float) -> float | None:
        """Unix seconds; never goes back. None while a log is still being read up, or nothing was heard."""
        if self._behind or not self._heard:
            return None
        active = [head_s for head_s, heard_at_s in self._heard.values() if now_s - heard_at_s <= self._idle_s]
        head_s = min(active) if active else max(head + (now_s - heard) for head, heard in self._heard.values())
        self._reached_s = max(self._reached_s, head_s - self._lag_s)
        return self._reached_s


def is_usable(event: OutcomeEvent) -> bool:
    """False for times that are no numbers or lie outside all reason, and for counts no engine can reach."""
    counts = (event.prompt_tokens, event.cached_tokens, event.output_tokens)
    return (
        math.isfinite(event.at_wall_s)
        and 0.0 <= event.elapsed_s <= ELAPSED_MAX_S
        and all(count is None or count <= TOKENS_MAX for count in counts)
    )


ELAPSED_MAX_S = 30 * 86400.0
TOKENS_MAX = 2**31 - 1
