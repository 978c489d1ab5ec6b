"""Services: the gRPC calls of a decide replica, answered from one Desk."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final, cast

import grpc.aio

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.desk import Asked, Desk
from tokenfleet.adapters.grpc_server import problem_of
from tokenfleet.adapters.late_answers import LateAnswers, interleaved
from tokenfleet.adapters.messages import changes_from_wire, decision_to_wire, to_wire, wire_fields
from tokenfleet.core.asked import ADMIT, DISPATCH, ROUTE, SCHEDULE, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import BadRequestError
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
BATCH_MAX: Final = 64  # requests in one message of RouteStream: its answers are about 64 KiB
WATCHING_MAX: Final = 10_000  # streams that wait for a ticket's turn; further ones end, and their gateways come again
FORECAST_AGAIN_S: Final = 300.0  # between two words on a ticket that waits by an open stream
AT_ONCE: Final = 16  # of them decided before other calls have their turn: a few milliseconds


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """The three questions in one call."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ScheduleResponse:
        decision = await _final(self._desk, request, SCHEDULE, context)
        return scheduler_pb2.ScheduleResponse(decision=decision_to_wire(decision))

    async def ScheduleStream(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ScheduleRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
        late = LateAnswers(self._desk.holding)
        with closing(late):
            async with aclosing(interleaved(request_iterator, late)) as requests:
                async for request in requests:
                    if request is None:
                        for held, answer in late.take():
                            yield _schedule_response(answer, held=held)
                    else:
                        [answer] = self._desk.decide_each([request], SCHEDULE, left_s=_left_s(context))
                        late.expect(answer)
                        yield _schedule_response(answer)


class SLOMaxService(scheduler_pb2_grpc.SLOMaxServicer):
    """May it run now."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._watching = 0

    async def Admit(
        self, request: scheduler_pb2.AdmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[scheduler_pb2.AdmitResponse]:
        decision = self._desk.decide(request.request, ADMIT, dry_run=request.dry_run)
        yield scheduler_pb2.AdmitResponse(decision=decision_to_wire(decision))
        if request.dry_run or decision.ticket is None or self._watching >= WATCHING_MAX:
            return
        self._watching += 1
        try:
            async for later in self._in_turn(request.request, decision):
                yield scheduler_pb2.AdmitResponse(decision=decision_to_wire(later))
        finally:
            self._watching -= 1

    async def _in_turn(self, asked: decision_pb2.Request, decision: Decision) -> AsyncIterator[Decision]:
        """What is said of a ticket from now on: the forecast again from time to time, and last what becomes of it."""
        began_s, elapsed_s = monotonic_s(), asked.elapsed_s
        while decision.ticket is not None:
            asked.ticket = decision.ticket.token
            if decision.ticket.granted and decision.admission is not None:
                await asyncio.sleep(decision.admission.not_before_s or 0.0)
            else:
                await self._desk.until_turn(asked, within_s=FORECAST_AGAIN_S)
            asked.elapsed_s = elapsed_s + monotonic_s() - began_s
            decision = self._desk.decide(asked, ADMIT, dry_run=False)
            yield decision


class TokenPilotService(scheduler_pb2_grpc.TokenPilotServicer):
    """On which instance of this site."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def Route(
        self, request: scheduler_pb2.RouteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.RouteResponse:
        decision = await _final(self._desk, request, ROUTE, context)
        return scheduler_pb2.RouteResponse(decision=decision_to_wire(decision))

    async def RouteStream(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.RouteStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.RouteStreamResponse]:
        late = LateAnswers(self._desk.holding)
        with closing(late):
            async with aclosing(interleaved(request_iterator, late)) as messages:
                async for message in messages:
                    response = scheduler_pb2.RouteStreamResponse()
                    if message is None:
                        for held, answer in late.take():
                            _add_answer(response, answer, held=held)
                    else:
                        await self._answer(message, response, late, _left_s(context))
                    yield response

    async def _answer(
        self,
        message: scheduler_pb2.RouteStreamRequest,
        response: scheduler_pb2.RouteStreamResponse,
        late: LateAnswers,
        left_s: float | None,
    ) -> None:
        """Answers one message into `response`; what is held then comes `late`."""
        asked = message.requests
        if len(asked) > BATCH_MAX:
            raise BadRequestError("requests", f"{len(asked):,} in one message, at most {BATCH_MAX} are taken")
        for queue_id in message.withdrawn:
            late.withdraw(queue_id)
        for start in range(0, len(asked), AT_ONCE):
            if start:
                await asyncio.sleep(0)  # others have their turn
            for answer in self._desk.decide_each(asked[start : start + AT_ONCE], ROUTE, left_s=left_s):
                late.expect(answer)
                _add_answer(response, answer)

    async def WhatIf(
        self, request: scheduler_pb2.WhatIfRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.WhatIfResponse:
        answer = self._desk.what_if(request.request, changes_from_wire(request.changes))
        response = scheduler_pb2.WhatIfResponse()
        to_wire(answer, response)
        return response


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
        response = scheduler_pb2.SitesResponse(
            site=site.name,
            replica=site.replica,
            sites=[_site(site, name, now_s) for name in sorted(site.policy.sites)],
            policy_revision=site.policy.revision,
            calibration_revision=site.calibration_revision,
            tables=site.versions(),
            held=len(self._desk.holding),
            holds_none=self._holds_none(now_s),
            rule=site.policy.tokenpilot.rule,
        )
        for each in self._desk.books():
            to_wire(each, response.books.add())
        for pool in self._desk.tickets.states() if self._desk.tickets is not None else ():
            to_wire(pool, response.batch.add())
        return response

    def _holds_none(self, now_s: float) -> str:
        if self._desk.site.policy.paces:
            return ""  # every replica has queues by class, whoever else places
        if self._desk.books():
            return "the owner of the pool's book orders what waits"
        return self._desk.site.held.off(self._desk.site.policy.tokenpilot, now_s)


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


async def _final(
    desk: Desk,
    asked: Asked,
    steps: Steps,
    context: grpc.aio.ServicerContext[Any, Any],
) -> Decision:
    """The decision on a unary call, which waits for the final one while its request is held."""
    decision = desk.decide(asked.request, steps, dry_run=asked.dry_run, left_s=_left_s(context))
    if decision.verdict != "queue" or decision.dry_run:
        return decision
    answer = desk.holding.answer_to(decision)
    try:
        return await answer
    finally:
        answer.cancel()


def _left_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """How far the caller's deadline is away."""
    return cast(float | None, context.time_remaining())  # None without a deadline, whatever the stub says


def _schedule_response(answer: Decision | Exception, *, held: str = "") -> scheduler_pb2.ScheduleResponse:
    if isinstance(answer, Decision):
        return scheduler_pb2.ScheduleResponse(decision=decision_to_wire(answer), held=held)
    return scheduler_pb2.ScheduleResponse(error=problem_of(answer, method="ScheduleStream"), held=held)


def _add_answer(response: scheduler_pb2.RouteStreamResponse, answer: Decision | Exception, *, held: str = "") -> None:
    if isinstance(answer, Decision):
        response.answers.add(held=held, decision=wire_fields(answer, decision_pb2.Decision.DESCRIPTOR))
    else:
        response.answers.add(error=problem_of(answer, method="RouteStream"), held=held)


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
