"""Services: the gRPC calls of a decide replica, answered from one Site.

A `Desk` answers: check the fields, decide, write what must not be lost to the outbox, reply. No call waits for
Kafka or PostgreSQL.
"""

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, Final, Protocol

import grpc.aio
from msgspec.structs import replace
from prometheus_client import Counter, Gauge, Histogram

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.messages import decision_to_wire, outcome_from_wire, request_from_wire, to_wire
from tokenfleet.adapters.topics import DECISIONS, OUTCOMES, PLACEMENTS, Topic, partition_of
from tokenfleet.core.asked import ADMIT, DISPATCH, ROUTE, SCHEDULE, Ids, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import BadRequestError, NotKeptError, TableNotReadyError
from tokenfleet.core.records import (
    DecisionEnvelope,
    OutcomeEnvelope,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
)
from tokenfleet.core.schedule import decide
from tokenfleet.core.site import Site
from tokenfleet.wire.v1 import (
    decision_pb2,
    outcomes_pb2,
    outcomes_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

SERVICE_NAMES: Final = tuple(
    f"tokenfleet.wire.v1.{name}" for name in ("Scheduler", "SLOMax", "FleetMind", "TokenPilot", "Outcomes")
)
REFUSED_NAMED_MAX: Final = 100  # refused events named in one reply to Report; the rest are only counted

DECISIONS_COUNTED = Counter(
    "tokenfleet_decisions_total", "Decisions answered", ["verdict", "reason", "mode", "request_class"]
)
DECIDED_IN = Histogram(
    "tokenfleet_decision_seconds",
    "Time to decide, without the network",
    buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
OUTCOMES_COUNTED = Counter("tokenfleet_outcome_events_total", "Outcome events taken", ["kind"])
TELEMETRY_AGE = Gauge("tokenfleet_telemetry_age_seconds", "Age of the youngest telemetry at the last decision")


class Outbox(Protocol):
    """Where records go that must reach Kafka even when it is away now."""

    def put(self, topic: Topic[Any], site: str, message: Any, *, partition: int) -> bool:
        """Keeps `message`; when it returns it survives the end of this process. False when it is lost, and counted."""
        ...


class Desk:
    """Answers on `site` for one replica. `start` counts this replica's starts; `ready` says whether tables are read."""

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

    def decide(self, message: decision_pb2.Request, steps: Steps, *, dry_run: bool) -> Decision:
        """The decision on one call. A repeated call gets its first answer again."""
        self._refuse_unready()
        request = request_from_wire(message, site=self.site.name, dry_run=dry_run)
        began_s = monotonic_s()
        repeats = self.site.repeats
        if not dry_run and (before := repeats.answered(request, steps, now_s=began_s)) is not None:
            return before
        self._decisions += 1
        ids = Ids(decision=self._name(self._decisions), now_wall_s=wall_s())
        decided = decide(self.site, request, steps, ids, now_s=began_s)
        decision = replace(decided.decision, took_s=monotonic_s() - began_s)
        if not dry_run:
            if decided.placement is not None:
                self._place(decided.placement, session=request.session, now_s=began_s)
            if decided.outcome is not None:
                self._tell(decided.outcome)
            self._record(decision)
            repeats.answer(request, steps, decision, now_s=began_s)
            self._count(decision)
        return decision

    def report(self, message: outcomes_pb2.OutcomeEvent) -> None:
        """Takes one outcome event: the ledger at once, the record by the outbox.

        Raises BadRequestError, TableNotReadyError, NotKeptError: another replica, or this one in a second, can take it.
        """
        self._refuse_unready()
        reported = outcome_from_wire(message, site=self.site.name, received_wall_s=wall_s())
        now_s = monotonic_s()
        event, change = self.site.settled(reported, now_s=now_s)
        if change is not None:
            self._place(change, session="", now_s=now_s)
        if not self._tell(event):
            raise NotKeptError("the disk takes no more reports; another replica can, or this one when there is room")
        OUTCOMES_COUNTED.labels(event.kind).inc()

    def _refuse_unready(self) -> None:
        if not self._ready():
            raise TableNotReadyError("the tables are still being read; ask again in a second")

    def _name(self, number: int) -> str:
        return f"{self.site.name}-{self.site.replica}-{self._start}-{number}"

    def _place(self, event: PlacementEvent, *, session: str, now_s: float) -> None:
        partition = partition_of(event.instance, self._partitions(PLACEMENTS.name))
        self._envelopes += 1
        envelope = PlacementEnvelope(
            site=self.site.name,
            replica=self.site.replica,
            start=str(self._start),
            n=self._envelopes,
            events=(event,),
        )
        self._outbox.put(PLACEMENTS, self.site.name, envelope, partition=partition)
        self.site.placed(event, partition=partition, session=session, now_s=now_s)

    def _tell(self, event: OutcomeEvent) -> bool:
        envelope = OutcomeEnvelope(
            site=self.site.name, replica=self.site.replica, sent_wall_s=wall_s(), events=(event,)
        )
        partition = partition_of(event.request, self._partitions(OUTCOMES.name))
        return self._outbox.put(OUTCOMES, self.site.name, envelope, partition=partition)

    def _record(self, decision: Decision) -> None:
        envelope = DecisionEnvelope(site=self.site.name, replica=self.site.replica, decisions=(decision,))
        partition = partition_of(self.site.replica, self._partitions(DECISIONS.name))
        self._outbox.put(DECISIONS, self.site.name, envelope, partition=partition)

    def _count(self, decision: Decision) -> None:
        DECISIONS_COUNTED.labels(decision.verdict, decision.reason, decision.mode, decision.request_class).inc()
        DECIDED_IN.observe(decision.took_s)
        if decision.age_s is not None:
            TELEMETRY_AGE.set(decision.age_s)


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """The three questions in one call."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ScheduleResponse:
        decision = self._desk.decide(request.request, SCHEDULE, dry_run=request.dry_run)
        return scheduler_pb2.ScheduleResponse(decision=decision_to_wire(decision))

    async def ScheduleStream(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ScheduleRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        async for request in request_iterator:
            yield await self.Schedule(request, context)


class SLOMaxService(scheduler_pb2_grpc.SLOMaxServicer):
    """May it run now."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Admit(
        self, request: scheduler_pb2.AdmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[scheduler_pb2.AdmitResponse]:
        decision = self._desk.decide(request.request, ADMIT, dry_run=request.dry_run)
        yield scheduler_pb2.AdmitResponse(decision=decision_to_wire(decision))


class TokenPilotService(scheduler_pb2_grpc.TokenPilotServicer):
    """On which instance of this site."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Route(
        self, request: scheduler_pb2.RouteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.RouteResponse:
        decision = self._desk.decide(request.request, ROUTE, dry_run=request.dry_run)
        return scheduler_pb2.RouteResponse(decision=decision_to_wire(decision))


class FleetMindService(scheduler_pb2_grpc.FleetMindServicer):
    """At which site; and how the sites look from here."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Dispatch(
        self, request: scheduler_pb2.DispatchRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.DispatchResponse:
        decision = self._desk.decide(request.request, DISPATCH, dry_run=request.dry_run)
        return scheduler_pb2.DispatchResponse(decision=decision_to_wire(decision))

    async def Sites(
        self, request: scheduler_pb2.SitesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.SitesResponse:
        site, now_s = self._desk.site, monotonic_s()
        return scheduler_pb2.SitesResponse(
            site=site.name,
            replica=site.replica,
            sites=[_site(site, name, now_s) for name in sorted(site.policy.sites)],
            policy_revision=site.policy.revision,
            calibration_revision=site.calibration_revision,
            tables=site.versions(),
        )


class OutcomesService(outcomes_pb2_grpc.OutcomesServicer):
    """How requests went."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Report(
        self,
        request_iterator: AsyncIterator[outcomes_pb2.ReportRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> outcomes_pb2.ReportResponse:
        response = outcomes_pb2.ReportResponse()
        index = 0
        async for batch in request_iterator:
            for event in batch.events:
                try:
                    self._desk.report(event)
                    response.accepted += 1
                except BadRequestError as error:
                    if len(response.refused) < REFUSED_NAMED_MAX:
                        response.refused.add(index=index, problem=str(error))
                index += 1
        return response


def registers(desk: Desk) -> list[Callable[[grpc.aio.Server], None]]:
    """What adds each service of `desk` to a server."""
    scheduler: Any = scheduler_pb2_grpc  # generated without types
    outcomes: Any = outcomes_pb2_grpc
    return [
        partial(scheduler.add_SchedulerServicer_to_server, SchedulerService(desk)),
        partial(scheduler.add_SLOMaxServicer_to_server, SLOMaxService(desk)),
        partial(scheduler.add_FleetMindServicer_to_server, FleetMindService(desk)),
        partial(scheduler.add_TokenPilotServicer_to_server, TokenPilotService(desk)),
        partial(outcomes.add_OutcomesServicer_to_server, OutcomesService(desk)),
    ]


def _site(site: Site, name: str, now_s: float) -> scheduler_pb2.Site:
    """One site: the others from their summaries, one's own instance by instance."""
    terms = site.policy.site(name)
    message = scheduler_pb2.Site(name=name, jurisdiction=terms.jurisdiction)
    summary = site.peers.summary(name)
    if (age_s := site.peers.age_s(name, now_s)) is not None:
        message.summary_age_s = age_s
        if summary is not None and summary.age_s is not None:
            message.telemetry_age_s = summary.age_s + age_s
    if summary is not None:
        message.gateways.extend(summary.gateways)
        for pool in summary.pools:
            to_wire(pool, message.pools.add())
    if name == site.name:
        if (own_age_s := site.capacity.age_s(now_s)) is not None:
            message.telemetry_age_s = own_age_s
        _own_instances(site, message, now_s)
    return message


def _own_instances(site: Site, message: scheduler_pb2.Site, now_s: float) -> None:
    """Each instance under its revision: the revisions of a model share the name of their pool."""
    for view in site.pools(now_s):
        for instance in view.instances:
            digest = instance.model_digest
            told = next((p for p in message.pools if (p.pool, p.model_digest) == (view.pool, digest)), None)
            if told is None:  # no summary tells of it yet
                told = message.pools.add(pool=view.pool, model=view.model, model_digest=digest)
            wire = to_wire(instance, told.instances.add())
            assert isinstance(wire, scheduler_pb2.Instance)
            wire.cached_blocks = site.prefix.blocks(instance.instance)
            told.endpoints = max(told.endpoints, len(told.instances))
