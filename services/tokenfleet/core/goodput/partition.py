"""PartitionGoodput: goodput of the logical requests of one outcomes partition, over the topics of all sites.

All events of a request travel in the same partition number of each site's topic, so one object sees all of them.
Events in, rows out; reading the same logs again in any interleaving gives the same sums.
"""

import heapq
import math
from collections.abc import Iterable

from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.goodput.arms import Arms, Logical
from tokenfleet.core.goodput.event_time import LogClock, Watermark
from tokenfleet.core.goodput.request import Heard, LogicalRequest
from tokenfleet.core.goodput.rows import Rows
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent

REQUESTS_MAX = 2_000_000  # bounds memory at some 2 GiB; past it the requests next to be forgotten go early
ROWS_A_PARTIAL = 500  # keeps a record below what a topic takes, even with names of 256 bytes each


class PartitionGoodput:
    """The state of one partition. `policy` may be replaced at any time; it judges what is heard from then on.

    `published` are this partition's rows on the goodput topic, `from_s` the event time from which the replay is
    complete (see `Rows`).
    """

    def __init__(
        self,
        policy: Policy,
        *,
        sources: Iterable[str],
        published: Iterable[GoodputRow] = (),
        from_s: float = -math.inf,
    ) -> None:
        terms = policy.goodput
        sources = tuple(sources)
        self.policy = policy
        self._arms: Arms | None = None
        self._clocks = {source: LogClock() for source in sources}
        self._watermark = Watermark(sources, lag_s=terms.watermark_lag_s, idle_s=terms.idle_partition_s)
        self._watermark_s = -math.inf
        self._rows = Rows(terms.windows_s, published=published, from_s=from_s)
        self._requests: dict[Logical, LogicalRequest] = {}
        self._due: list[tuple[float, Logical]] = []
        self._misses: list[tuple[float, Logical]] = []  # open requests of a trial, by when they miss their level

    def hear(
        self, source: str, envelope: OutcomeEnvelope, *, appended_wall_s: float, now_s: float
    ) -> list[OutcomeEvent]:
        """Take one record of the log `source` in, in the order of that log; returns the events that were new."""
        clock = self._clocks[source]
        new: list[OutcomeEvent] = []
        for event, at_s in clock.date(envelope, appended_wall_s):
            late = at_s < clock.head_s - self.policy.goodput.watermark_lag_s - self.policy.goodput.lateness_s
            heard = Heard(event, clock.head_s if late else at_s, envelope.site == event.origin, late)
            clock.advance(at_s)
            if self._hear(event, heard):
                new.append(event)
        self._watermark.heard(source, clock.head_s, now_s)
        return new

    def caught_up(self, source: str) -> None:
        """The log `source` was read to the end it had at start; nothing is published before all were."""
        self._watermark.caught_up(source)

    def advance(self, now_s: float) -> float | None:
        """Sweep, forget and close what the watermark has passed; returns it (Unix seconds, None: not known yet)."""
        watermark_s = self._watermark.at(now_s)
        self._watermark_s = -math.inf if watermark_s is None else watermark_s
        while self._due and (self._due[0][0] <= self._watermark_s or len(self._requests) > REQUESTS_MAX):
            self._settle_due(heapq.heappop(self._due))
        while self._misses and self._misses[0][0] <= self._watermark_s:
            _, name = heapq.heappop(self._misses)
            if (request := self._requests.get(name)) is not None:
                self._count(name, request)
        if watermark_s is None:
            return None
        self._rows.close(watermark_s, lateness_s=self.policy.goodput.lateness_s + self.policy.goodput.watermark_lag_s)
        return watermark_s

    def partials(self, *, site: str, partition: int, cluster: str, now_s: float) -> tuple[GoodputPartial, ...]:
        """What to publish now: changed rows in records of a bounded size, at least one record for its watermark."""
        watermark_s = self.advance(now_s)
        if watermark_s is None:
            return ()
        partials: list[GoodputPartial] = []
        while not partials or len(partials[-1].rows) == ROWS_A_PARTIAL:
            rows = self._rows.changed(ROWS_A_PARTIAL)
            partials.append(
                GoodputPartial(site=site, partition=partition, watermark_s=watermark_s, rows=rows, cluster=cluster)
            )
        return tuple(partials)

    def count_into(self, arms: Arms | None) -> None:
        """Count both arms of a trial from now on, with the requests in memory; None: there is no trial."""
        self._arms = arms
        self._misses = []
        for name, request in self._requests.items():
            self._count(name, request)

    @property
    def requests(self) -> int:
        """Logical requests in memory."""
        return len(self._requests)

    def _hear(self, event: OutcomeEvent, heard: Heard) -> bool:
        name = (event.tenant, event.request)
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = LogicalRequest()
        if not request.hear(heard):
            return False
        self._repost(name, request)
        return True

    def _repost(self, name: Logical, request: LogicalRequest) -> None:
        account = request.account(self.policy, self._watermark_s)
        self._count(name, request)
        if account.postings != request.postings:
            # The new ones go first: a row that both touch must not look unused in between.
            self._rows.post(account.postings)
            self._rows.retract(request.postings)
            request.postings = account.postings
        if account.due_s != request.due_s:
            request.due_s = account.due_s
            request.forget = account.forget
            heapq.heappush(self._due, (account.due_s, name))

    def _count(self, name: Logical, request: LogicalRequest) -> None:
        """What the request counts for in the trial now, if there is one."""
        if self._arms is None:
            return
        settled = request.settled(self.policy, self._watermark_s)
        self._arms.hear(name, settled)
        if settled is None and (misses_at_s := request.misses_at_s(self.policy)) < math.inf:
            heapq.heappush(self._misses, (misses_at_s, name))

    def _settle_due(self, due: tuple[float, Logical]) -> None:
        due_s, name = due
        request = self._requests.get(name)
        if request is None or request.due_s != due_s:
            return  # something was heard since
        if request.forget or len(self._requests) > REQUESTS_MAX:
            self._rows.release(request.postings)
            del self._requests[name]
        else:
            self._repost(name, request)
