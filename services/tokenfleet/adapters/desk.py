"""Desk: decides for whoever asks one replica, and writes what must not be lost before anybody is answered.

No call waits for Kafka or PostgreSQL: records go to the outbox, many decisions' in one envelope where they came
together.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from tokenfleet.adapters.batch_tickets import BatchTickets
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.holding import Holding
from tokenfleet.adapters.identity import caller
from tokenfleet.adapters.messages import outcome_from_wire, request_from_wire
from tokenfleet.adapters.pool_shard import BookState
from tokenfleet.adapters.topics import DECISIONS, OUTCOMES, PLACEMENTS, Topic, partition_of
from tokenfleet.core.asked import Decided, Ids, Steps
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.errors import BadRequestError, NotKeptError, TableNotReadyError
from tokenfleet.core.records import (
    TERMINAL_KINDS,
    DecisionEnvelope,
    OutcomeEnvelope,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
)
from tokenfleet.core.schedule import decide
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.tickets import Ended, HandedIn, TicketEvent, Used
from tokenfleet.core.ticketed import BATCH, lacks_ticket
from tokenfleet.core.tokenpilot.whatif import Changes, WhatIf, what_if
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2

DECISIONS_COUNTED = Counter(
    "tokenfleet_decisions_total", "Decisions answered", ["verdict", "reason", "mode", "request_class"]
)
DECIDED_IN = Histogram(
    "tokenfleet_decision_seconds",
    "Time to decide, without the network and without the time held",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
GATED = Counter("tokenfleet_gate_answers_total", "What feasibility gates said", ["gate", "request_class"])
DUPLICATES = Counter(
    "tokenfleet_duplicates_total", "Requests that got the answer of another one with their key", ["verdict"]
)
OUTCOMES_COUNTED = Counter("tokenfleet_outcome_events_total", "Outcome events taken", ["kind"])
TELEMETRY_AGE = Gauge("tokenfleet_telemetry_age_seconds", "Age of the youngest telemetry at the last decision")


Asked = scheduler_pb2.RouteRequest | scheduler_pb2.ScheduleRequest


class Outbox(Protocol):
    """Where records go that must reach Kafka even when it is away now."""

    def put(self, topic: Topic[Any], site: str, message: Any, *, partition: int) -> bool:
        """Keeps `message`; when it returns it survives the end of this process. False when it is lost, and counted."""
        ...


class Desk:
    """Answers on `site` for one replica. `start` counts this replica's starts; `ready` says whether tables are read.

    Verdict `queue` on what is no dry run: `holding` has the final decision for who waits for it.
    """

    def __init__(
        self, site: Site, outbox: Outbox, *, start: int, partitions: Callable[[str], int], ready: Callable[[], bool]
    ) -> None:
        self.site = site
        self._outbox = outbox
        self._start = start
        self._partitions = partitions
        self._ready = ready
        self._decisions = 0
        self._envelopes = 0
        self._unwritten = _Unwritten()
        self.tickets: BatchTickets | None = None  # where PostgreSQL keeps batch work
        self.books: Callable[[], Sequence[BookState]] = list  # the shared books, where there are any
        self.holding = Holding(site, next_ids=self._next_ids, settle=self._settle, write=self._write)

    @property
    def envelopes(self) -> int:
        """The number of the last placements envelope."""
        return self._envelopes

    def decide(
        self, message: decision_pb2.Request, steps: Steps, *, dry_run: bool, left_s: float | None = None
    ) -> Decision:
        """The decision on one call, whose deadline is `left_s` away. A repeated call gets its first answer again."""
        try:
            return self._decided(message, steps, dry_run=dry_run, left_s=left_s)
        finally:
            self._write()

    def decide_each(
        self, asked: Iterable[Asked], steps: Steps, *, left_s: float | None = None
    ) -> list[Decision | Exception]:
        """The decision on each request in order, or the error in its place; a later one sees the earlier placed."""
        answers: list[Decision | Exception] = []
        for each in asked:
            try:
                answers.append(self._decided(each.request, steps, dry_run=each.dry_run, left_s=left_s))
            except Exception as error:
                answers.append(error)
        self._write()
        return answers

    async def until_turn(self, message: decision_pb2.Request, *, within_s: float) -> None:
        """Returns when the request's ticket is granted, no policy wants tickets any more, or the time is over."""
        request = request_from_wire(message, site=self.site.name, caller=caller())
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.site.policy.slomax.batch.enabled and not self.site.tickets.granted(request):
                    assert self.tickets is not None, "a ticket was given out"
                    await self.tickets.look()

    def what_if(self, message: decision_pb2.Request, changes: Changes) -> WhatIf:
        """What would be chosen now, and under `changes`. Leaves no trace."""
        self._refuse_unready()
        request = request_from_wire(message, site=self.site.name, dry_run=True, caller=caller())
        return what_if(self.site, request, changes, now_s=monotonic_s())

    def report(self, message: outcomes_pb2.OutcomeEvent) -> None:
        """Takes one outcome event: the ledger at once, the record by the outbox.

        Raises BadRequestError, TableNotReadyError, NotKeptError: another replica, or this one in a second, can take it.
        """
        self._refuse_unready()
        reported = outcome_from_wire(message, site=self.site.name, received_wall_s=wall_s(), caller=caller())
        now_s = monotonic_s()
        self._refuse_anothers(reported, now_s)
        event, change = self.site.settled(reported, now_s=now_s)
        if change is not None:
            self._place(change, now_s=now_s)
            self._write()
            if event.kind == "first_token":
                self.holding.release_soon()
        if not self._tell([event], partition=self._partition_of(event)):
            raise NotKeptError("the disk takes no more reports; another replica can, or this one when there is room")
        OUTCOMES_COUNTED.labels(event.kind).inc()
        if event.kind in TERMINAL_KINDS and event.request_class == BATCH and self.site.policy.slomax.batch.enabled:
            self._kept(Ended(tenant=event.tenant, request=event.request, attempt=event.attempt, how=event.kind))

    def _decided(self, message: decision_pb2.Request, steps: Steps, *, dry_run: bool, left_s: float | None) -> Decision:
        self._refuse_unready()
        request = request_from_wire(message, site=self.site.name, dry_run=dry_run, caller=caller())
        began_s = monotonic_s()
        if not dry_run:
            if (before := self.site.repeats.answered(request, steps, now_s=began_s)) is not None:
                return before
            request = self.holding.holdable(request, left_s=left_s)
        decided = decide(self.site, request, steps, self._next_ids(), now_s=began_s)
        if isinstance(decided.ticket, HandedIn) and not self._kept(decided.ticket):  # none is taken in any more
            decided = decide(self.site, request, steps, self._next_ids(), now_s=began_s)
        decision = replace(decided.decision, took_s=monotonic_s() - began_s)
        if self.tickets is not None and not dry_run and lacks_ticket(self.site, request, steps, decision):
            self.tickets.fell_back()
        if decision.duplicate:  # recorded when it was made
            DUPLICATES.labels(decision.verdict).inc()
        elif not dry_run:
            if decision.verdict == "queue":
                self.holding.begins(request, steps, decision, now_s=began_s)
            self._settle(request, steps, replace(decided, decision=decision))
        return decision

    def _settle(self, request: Request, steps: Steps, decided: Decided) -> None:
        """Places and records what was decided; `_write` tells the others."""
        now_s, decision = monotonic_s(), decided.decision
        if isinstance(decided.ticket, Used):
            self._kept(decided.ticket)
        if decided.placement is not None:
            self._place(decided.placement, now_s=now_s, session=request.session, block_keys=request.block_keys)
        if decided.sent is not None:
            partition = partition_of(decided.sent.site, self._partitions(PLACEMENTS.name))
            self._unwritten.sends.setdefault(partition, []).append(decided.sent)
        if decided.outcome is not None:
            self._unwritten.outcomes.setdefault(self._partition_of(decided.outcome), []).append(decided.outcome)
        self._unwritten.decisions.append(decision)
        self.site.repeats.answer(request, steps, decision, now_s=now_s)
        self._count(decision)

    def _kept(self, event: TicketEvent) -> bool:
        return self.tickets is not None and self.tickets.keep(event)

    def _next_ids(self) -> Ids:
        self._decisions += 1
        return Ids(decision=self._name(self._decisions), now_wall_s=wall_s())

    def _refuse_unready(self) -> None:
        if not self._ready():
            raise TableNotReadyError("the tables are still being read; ask again in a second")

    def _refuse_anothers(self, event: OutcomeEvent, now_s: float) -> None:
        """Raises BadRequestError for an event of one tenant on what runs here as another's."""
        placed = self.site.ledger.entry(event.decision, now_s)
        if placed is not None and placed.tenant != event.tenant:
            raise BadRequestError("decision", "it placed another tenant's request")
        owners = self.site.ledger.tenants_of(event.request, event.attempt)
        if placed is None and owners and event.tenant not in owners:
            raise BadRequestError("request", "it runs as another tenant's")

    def _name(self, number: int) -> str:
        return f"{self.site.name}-{self.site.replica}-{self._start}-{number}"

    def _place(self, event: PlacementEvent, *, now_s: float, session: str = "", block_keys: bytes = b"") -> None:
        """Counts a change of the ledger here at once; `_write` tells the others."""
        partition = partition_of(event.instance, self._partitions(PLACEMENTS.name))
        self._unwritten.placements.setdefault(partition, []).append(event)
        self.site.placed(event, partition=partition, session=session, now_s=now_s, block_keys=block_keys)

    def _write(self) -> None:
        """Puts all that is not written yet into the outbox: placements first, evidence last."""
        unwritten, self._unwritten = self._unwritten, _Unwritten()
        for partition in unwritten.placements | unwritten.sends:
            self._envelopes += 1
            placements = PlacementEnvelope(
                site=self.site.name,
                replica=self.site.replica,
                start=str(self._start),
                n=self._envelopes,
                events=tuple(unwritten.placements.get(partition, ())),
                sends=tuple(unwritten.sends.get(partition, ())),
            )
            self._outbox.put(PLACEMENTS, self.site.name, placements, partition=partition)
        for partition, outcomes in unwritten.outcomes.items():
            self._tell(outcomes, partition=partition)
        if unwritten.decisions:
            decisions = DecisionEnvelope(
                site=self.site.name, replica=self.site.replica, decisions=tuple(unwritten.decisions)
            )
            partition = partition_of(self.site.replica, self._partitions(DECISIONS.name))
            self._outbox.put(DECISIONS, self.site.name, decisions, partition=partition)

    def _tell(self, events: Sequence[OutcomeEvent], *, partition: int) -> bool:
        envelope = OutcomeEnvelope(
            site=self.site.name, replica=self.site.replica, sent_wall_s=wall_s(), events=tuple(events)
        )
        return self._outbox.put(OUTCOMES, self.site.name, envelope, partition=partition)

    def _partition_of(self, event: OutcomeEvent) -> int:
        return partition_of(event.request, self._partitions(OUTCOMES.name))

    def _count(self, decision: Decision) -> None:
        DECISIONS_COUNTED.labels(decision.verdict, decision.reason, decision.mode, decision.request_class).inc()
        DECIDED_IN.observe(decision.took_s)
        if decision.admission is not None and decision.admission.gate:
            GATED.labels(decision.admission.gate, decision.request_class).inc()
        if decision.age_s is not None:
            TELEMETRY_AGE.set(decision.age_s)


class _Unwritten:
    """What was decided and is in no outbox yet, by partition where that matters; empty between two calls."""

    def __init__(self) -> None:
        self.placements: dict[int, list[PlacementEvent]] = {}
        self.sends: dict[int, list[SendEvent]] = {}
        self.outcomes: dict[int, list[OutcomeEvent]] = {}
        self.decisions: list[Decision] = []
