"""Gateway client: an answer comes as long as one replica gives one."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from tests.adapters.desks import Office, event
from tests.adapters.desks import request as placeable
from tokenfleet.client import gateway
from tokenfleet.client.gateway import SERVICE_CONFIG, Gateway, target_of
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

Answering = Callable[[], Awaitable[None]]


class Replica(scheduler_pb2_grpc.SchedulerServicer):
    """Admits every request after `before`."""

    def __init__(self, before: Answering) -> None:
        self._before = before

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ScheduleResponse:
        await self._before()
        decision = decision_pb2.Decision(request=request.request.id, verdict=decision_pb2.VERDICT_ADMIT)
        return scheduler_pb2.ScheduleResponse(decision=decision)


async def at_once() -> None: ...


async def never() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def replicas(*answering: Answering) -> AsyncGenerator[list[str]]:
    """The addresses of servers that answer so."""
    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        for each in answering:
            server = grpc.aio.server()
            scheduler_pb2_grpc.add_SchedulerServicer_to_server(Replica(each), server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield addresses


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "TRY_TIMEOUT_S", 0.5)


async def test_a_frozen_replica_costs_time_and_no_answer() -> None:
    async with replicas(never, at_once) as addresses, Gateway(addresses) as fleet:
        asked = [fleet.schedule(decision_pb2.Request(id=f"r{n}")) for n in range(6)]  # both replicas have their turn
        answers = await asyncio.gather(*asked)
    assert [answer.decision.request for answer in answers] == [f"r{n}" for n in range(6)]


async def test_replicas_that_are_all_frozen_are_an_error_in_time() -> None:
    async with replicas(never, never) as addresses, Gateway(addresses) as fleet:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(fleet.schedule(decision_pb2.Request(id="r")), 20.0)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_deadlines_are_the_calls_own() -> None:
    """grpcio ends a call up to 2 s before the `timeout` of a service config."""
    assert all("timeout" not in method for method in SERVICE_CONFIG["methodConfig"])


class Origin(scheduler_pb2_grpc.SchedulerServicer):
    """Sends every request to a site that can't be reached and then, told so, takes it; keeps what it was asked."""

    def __init__(self, *gateways: str) -> None:
        self.asked: list[decision_pb2.Request] = []
        self._gateways = gateways

    async def Schedule(
        self, request: scheduler_pb2.ScheduleRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> scheduler_pb2.ScheduleResponse:
        self.asked.append(request.request)
        await asyncio.sleep(0.05)
        gone = decision_pb2.Decision(verdict=decision_pb2.VERDICT_REDIRECT, site="c", gateways=self._gateways)
        here = decision_pb2.Decision(verdict=decision_pb2.VERDICT_ADMIT, site="b")
        return scheduler_pb2.ScheduleResponse(decision=here if request.request.sites_tried else gone)


@pytest.mark.parametrize("gateways", [("127.0.0.1:1",), (), ("decide-0:1", "decide-1:1")])
async def test_without_a_way_to_the_site_the_origin_is_asked_again_and_the_time_counts(
    gateways: tuple[str, ...],
) -> None:
    origin, server = Origin(*gateways), grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(origin, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with Gateway([address]) as fleet:
        answer = await fleet.schedule(decision_pb2.Request(id="r", elapsed_s=2.0))
    await server.stop(None)
    assert answer.admitted
    first, second = origin.asked
    assert (first.attempt, second.attempt, list(second.sites_tried)) == (0, 1, ["c"])
    assert first.elapsed_s >= 2.0
    assert second.elapsed_s >= first.elapsed_s + 0.04  # the origin's answer alone took 0.05 s


@pytest.mark.parametrize(
    ("targets", "target"),
    [
        (("127.0.0.1:7500",), "ipv4:127.0.0.1:7500"),
        (("127.0.0.1:7500", "127.0.0.2:7500"), "ipv4:127.0.0.1:7500,127.0.0.2:7500"),
        (("[fd00::10]:7500", "[fd00::11]:7500"), "ipv6:[fd00::10]:7500,[fd00::11]:7500"),
        (("[::1]:7500",), "ipv6:[::1]:7500"),
        (("decide-b:7500",), "decide-b:7500"),
        (("10.example:7500",), "10.example:7500"),
    ],
)
def test_replicas_are_one_target(targets: tuple[str, ...], target: str) -> None:
    assert target_of(targets) == target


@pytest.mark.parametrize("targets", [("decide-0:1", "decide-1:1"), ("127.0.0.1:1", "[::1]:1"), ("127.0.0.1:1", "b:1")])
def test_a_list_that_grpc_would_not_resolve_is_refused(targets: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="one name that stands for all"):
        target_of(targets)


class Taking(outcomes_pb2_grpc.OutcomesServicer):
    """Takes every event."""

    async def Report(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        taken = 0
        async for batch in request_iterator:
            taken += len(batch.events)
        return outcomes_pb2.ReportResponse(accepted=taken)


async def test_a_listener_that_fails_does_not_end_the_reports_that_follow() -> None:
    heard: list[str] = []

    def listen(event: outcomes_pb2.OutcomeEvent) -> None:
        heard.append(event.request)
        if len(heard) == 1:
            raise ValueError("the listener's own")

    server = grpc.aio.server()
    outcomes_pb2_grpc.add_OutcomesServicer_to_server(Taking(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with Gateway([address], on_acknowledged=listen) as fleet, asyncio.timeout(10):
            fleet.report(outcomes_pb2.OutcomeEvent(request="r1"))
            while not heard:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            fleet.report(outcomes_pb2.OutcomeEvent(request="r2"))
            while "r2" not in heard:
                await asyncio.sleep(0.01)
            await fleet.drained()
    finally:
        await server.stop(None)


async def test_a_held_request_is_waited_for_and_its_trail_tells_of_it() -> None:
    office = Office(small=1)
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        running = (await fleet.schedule(placeable("running", prompt_tokens=20_000))).decision
        held = asyncio.create_task(fleet.schedule(placeable("held", prompt_tokens=3000, wait_max_s=30.0)))
        async with asyncio.timeout(10.0):
            while len(office.desk.holding) != 1:
                await asyncio.sleep(0.001)
        kind = outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN
        office.desk.report(event("running", decision=running.id, instance=running.target, kind=kind))
        answer = await held
        assert answer.admitted
        queue, admit = decision_pb2.VERDICT_QUEUE, decision_pb2.VERDICT_ADMIT
        assert [decision.verdict for decision in answer.trail] == [queue, admit]
        dry = await fleet.schedule(placeable("dry", wait_max_s=30.0), dry_run=True)
        assert dry.decision.dry_run
        with pytest.raises(grpc.aio.AioRpcError, match="gpt-9") as caught:
            await fleet.schedule(placeable("bad", model="gpt-9", wait_max_s=30.0))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_replica_that_is_not_ready_is_asked_again_for_a_held_request_too() -> None:
    office = Office(small=1)
    office.ready = False
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        asked = asyncio.create_task(fleet.schedule(placeable("r1", wait_max_s=30.0)))
        await asyncio.sleep(0.1)
        office.ready = True
        assert (await asked).admitted


async def test_of_a_request_that_may_be_held_a_frozen_replica_is_left_as_soon_as_of_any_other() -> None:
    """What holds says so at once; what says nothing is asked no longer, however long the request may wait."""

    class Streams(scheduler_pb2_grpc.SchedulerServicer):
        async def ScheduleStream(
            self,
            request_iterator: AsyncIterator[scheduler_pb2.ScheduleRequest],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
            async for message in request_iterator:
                decision = decision_pb2.Decision(request=message.request.id, verdict=decision_pb2.VERDICT_ADMIT)
                yield scheduler_pb2.ScheduleResponse(decision=decision)

    class Frozen(scheduler_pb2_grpc.SchedulerServicer):
        async def ScheduleStream(
            self,
            request_iterator: AsyncIterator[scheduler_pb2.ScheduleRequest],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> AsyncIterator[scheduler_pb2.ScheduleResponse]:
            await asyncio.Event().wait()
            yield scheduler_pb2.ScheduleResponse()

    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        for servicer in (Streams(), Frozen()):
            server = grpc.aio.server()
            scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        fleet = await stack.enter_async_context(Gateway(addresses))
        asked = [fleet.schedule(decision_pb2.Request(id=f"r{n}", wait_max_s=3600.0)) for n in range(6)]
        answers = await asyncio.wait_for(asyncio.gather(*asked), 20.0)
    assert [answer.decision.request for answer in answers] == [f"r{n}" for n in range(6)]
