"""Places: a caller whose request waits in the queue of its class reads where it stands, and leaves it at once."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from msgspec.structs import replace

from tests.adapters.desks import Office, event, request
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.client.gateway import Gateway
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

QUEUE, ADMIT = decision_pb2.VERDICT_QUEUE, decision_pb2.VERDICT_ADMIT


def holdable(name: str, request_class: str = "batch", **facts: Any) -> decision_pb2.Request:
    return request(name, prompt_tokens=100, wait_max_s=60.0, declared_class=request_class, **facts)


class Line:
    """Classes wait apart for one instance that computes a long prompt."""

    def __init__(self, office: Office, channel: grpc.aio.Channel, *, port: int) -> None:
        self.office = office
        self.port = port
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        self.pilot: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        self.fleet: Any = scheduler_pb2_grpc.FleetMindStub(channel)

    async def begin(self) -> None:
        asked = scheduler_pb2.RouteRequest(request=request("running", prompt_tokens=100_000))
        self.running = (await self.pilot.Route(asked)).decision
        assert self.running.verdict == ADMIT

    async def ask(self, name: str) -> Any:
        """A stream of one request, and what it is told first."""
        call = self.scheduler.ScheduleStream()
        await call.write(scheduler_pb2.ScheduleRequest(request=holdable(name)))
        return call, (await call.read()).decision

    def first_token(self) -> None:
        kind = outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN
        told = event("running", decision=self.running.id, instance=self.running.target, kind=kind)
        self.office.desk.report(told)

    async def until(self, count: int) -> None:
        """So many requests wait, for their callers and in line alike."""
        async with asyncio.timeout(10.0):
            while len(self.office.desk.holding) != count:
                await asyncio.sleep(0.001)
        assert len(self.office.town.site.queues("small-chat")) == count


@asynccontextmanager
async def line() -> AsyncGenerator[Line]:
    office = Office(small=1)
    policy = office.town.site.policy
    pacing = replace(policy.slomax.pacing, enabled=True)
    office.town.site.adopt(replace(policy, slomax=replace(policy.slomax, pacing=pacing)))
    async with office.serving() as (server, channel):
        its = Line(office, channel, port=server.port)
        await its.begin()
        yield its


@pytest.fixture(autouse=True)
def told_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenfleet.adapters.holding.TOLD_PERIOD_S", 0.01)


async def test_a_stream_tells_the_place_in_line_as_it_moves_up_and_then_the_answer() -> None:
    async with line() as its:
        first, told = await its.ask("r1")
        assert (told.verdict, told.place.position) == (QUEUE, 1)
        second, told = await its.ask("r2")
        assert (told.verdict, told.place.position) == (QUEUE, 2)
        assert told.candidates  # the record of it says where it would go now
        first.cancel()
        moved = await second.read()
        assert (moved.held, moved.decision.id) == (told.id, told.id)
        assert (moved.decision.verdict, moved.decision.place.position) == (QUEUE, 1)
        assert "number 1 of the batch requests" in moved.decision.sentence
        assert not moved.decision.candidates
        its.first_token()
        final = await second.read()
        assert (final.held, final.decision.verdict, final.decision.request) == (told.id, ADMIT, "r2")
        second.cancel()


async def test_what_waits_in_class_queues_is_told_as_held_though_others_place_too() -> None:
    async with line() as its:
        call, _ = await its.ask("r1")
        its.office.town.site.held.heard_another(monotonic_s())
        told = await its.fleet.Sites(scheduler_pb2.SitesRequest())
        assert (told.held, told.holds_none) == (1, "")
        call.cancel()


async def test_a_stream_that_is_closed_gives_its_places_up_at_once() -> None:
    async with line() as its:
        call, _ = await its.ask("r1")
        await call.write(scheduler_pb2.ScheduleRequest(request=holdable("r2")))
        await its.until(2)
        call.cancel()
        await its.until(0)
        its.first_token()
        placed = [entry.request for entry in its.office.town.site.ledger.entries()]
        assert placed == ["running"]


async def test_a_batch_of_routes_is_told_places_too_and_can_give_one_up() -> None:
    async with line() as its:
        call = its.pilot.RouteStream()
        asked = [scheduler_pb2.RouteRequest(request=holdable(f"r{n}")) for n in range(3)]
        await call.write(scheduler_pb2.RouteStreamRequest(requests=asked))
        told = [answer.decision for answer in (await call.read()).answers]
        assert [decision.place.position for decision in told] == [1, 2, 3]
        await call.write(scheduler_pb2.RouteStreamRequest(withdrawn=[told[0].id]))
        heard: dict[str, int] = {}
        async with asyncio.timeout(10.0):
            while heard != {"r1": 1, "r2": 2}:
                for answer in (await call.read()).answers:
                    heard[answer.decision.request] = answer.decision.place.position
        await its.until(2)
        call.cancel()


async def test_the_client_hears_where_its_request_stands_and_withdraws_by_leaving() -> None:
    async with line() as its, Gateway([f"127.0.0.1:{its.port}"]) as fleet:
        heard: list[int] = []
        ahead = asyncio.create_task(fleet.schedule(holdable("ahead")))
        await its.until(1)
        waits = asyncio.create_task(
            fleet.schedule(holdable("r"), queued=lambda told: heard.append(told.place.position))
        )
        await its.until(2)
        ahead.cancel()
        async with asyncio.timeout(10.0):
            while heard != [2, 1]:
                await asyncio.sleep(0.001)
        its.first_token()
        answer = await waits
        assert [decision.verdict for decision in answer.trail] == [QUEUE, ADMIT]


async def test_routes_that_are_coalesced_wait_through_what_is_said_of_their_places() -> None:
    async with line() as its, Gateway([f"127.0.0.1:{its.port}"]) as fleet:
        routes = [asyncio.create_task(fleet.route(holdable(f"r{n}"))) for n in range(3)]
        await its.until(3)
        routes[0].cancel()
        await its.until(2)
        await asyncio.sleep(0.1)  # several words on places
        assert not any(route.done() for route in routes[1:])
        its.first_token()
        answers = await asyncio.gather(*routes[1:])
        assert {decision.verdict for decision in answers} == {ADMIT}
