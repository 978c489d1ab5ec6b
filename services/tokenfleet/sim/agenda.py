"""Agenda: what happens when, in virtual time."""

import heapq
from collections.abc import Callable
from enum import IntEnum
from functools import partial

Action = Callable[[float], None]  # is told the time


class Rank(IntEnum):
    """Who goes first at one moment: engines tell, links bring, gateways release, scrapes read, requests arrive."""

    ENGINE = 0
    DELIVERY = 1
    RELEASE = 2
    PERIODIC = 3
    ARRIVAL = 4


class Agenda:
    """Actions by time, then rank, then the order in which they were entered. `now_s` is the time of what runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, Action]] = []
        self._entered = 0

    def at(self, at_s: float, rank: Rank, action: Action) -> None:
        """Enter an action; not earlier than what runs now."""
        self._entered += 1
        heapq.heappush(self._heap, (at_s, rank, self._entered, action))

    def every(self, period_s: float, action: Action) -> None:
        """At 0 and after every period; counted, so that no error of addition gathers."""
        self.at(0.0, Rank.PERIODIC, partial(self._turn, period_s, 0, action))

    def run(self, *, until_s: float, while_: Callable[[], bool]) -> None:
        """Run in order, up to `until_s` inclusive, as long as `while_` holds and there is something."""
        heap = self._heap
        while heap and while_():
            at_s, _, _, action = heapq.heappop(heap)
            if at_s > until_s:
                return
            self.now_s = at_s
            action(at_s)

    def _turn(self, period_s: float, number: int, action: Action, now_s: float) -> None:
        action(now_s)
        self.at((number + 1) * period_s, Rank.PERIODIC, partial(self._turn, period_s, number + 1, action))
