"""Gateway client: an answer comes as long as one replica gives one."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

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
