"""Services: whichever call asks, what is open is what is counted, and equals share it."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from tests.adapters.desks import Office, event, request
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

Asking = Callable[[grpc.aio.Channel, list[str]], AsyncIterator[decision_pb2.Decision]]


async def one_by_one(channel: grpc.aio.Channel, names: list[str]) -> AsyncIterator[decision_pb2.Decision]:
    stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
    for name in names:
        yield (await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request(name)))).decision


async def on_a_stream(channel: grpc.aio.Channel, names: list[str]) -> AsyncIterator[decision_pb2.Decision]:
    stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
    asked = [scheduler_pb2.ScheduleRequest(request=request(name)) for name in names]
    async for answer in stub.ScheduleStream(iter(asked)):
        yield answer.decision


async def routed_only(channel: grpc.aio.Channel, names: list[str]) -> AsyncIterator[decision_pb2.Decision]:
    stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
    for name in names:
        yield (await stub.Route(scheduler_pb2.RouteRequest(request=request(name)))).decision


async def in_batches(channel: grpc.aio.Channel, names: list[str]) -> AsyncIterator[decision_pb2.Decision]:
    stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
    asked = [scheduler_pb2.RouteRequest(request=request(name)) for name in names]
    batches = [scheduler_pb2.RouteStreamRequest(requests=asked[at : at + 60]) for at in range(0, len(asked), 60)]
    async for batch in stub.RouteStream(iter(batches)):
        for answer in batch.answers:
            yield answer.decision


async def reported_open(channel: grpc.aio.Channel) -> dict[str, int]:
    """What the replica says is open, by instance."""
    stub: Any = scheduler_pb2_grpc.FleetMindStub(channel)
    sites = (await stub.Sites(scheduler_pb2.SitesRequest())).sites
    return {i.instance: i.queued + i.decoding for site in sites for pool in site.pools for i in pool.instances}


async def finish(channel: grpc.aio.Channel, decisions: list[decision_pb2.Decision]) -> None:
    stub: Any = outcomes_pb2_grpc.OutcomesStub(channel)
    events = [
        event(d.request, kind=outcomes_pb2.OUTCOME_KIND_FINISHED, decision=d.id, instance=d.target) for d in decisions
    ]
    await stub.Report(iter([outcomes_pb2.ReportRequest(events=events)]))


@pytest.mark.parametrize("ask", [one_by_one, on_a_stream, routed_only, in_batches])
async def test_idle_equals_share_requests_and_what_is_open_is_what_is_told(ask: Asking) -> None:
    office = Office(small=3)
    site = office.town.site
    chat = replace(site.policy.classes["chat"], running_max_per_instance=200, backlog_max_s=60.0)
    site.adopt(replace(site.policy, classes={**site.policy.classes, "chat": chat}))
    async with office.serving() as (_, channel):
        chosen: Counter[str] = Counter()
        async for decision in ask(channel, [f"one-{n}" for n in range(300)]):
            chosen[decision.target] += 1
            await finish(channel, [decision])
        if ask not in (on_a_stream, in_batches):  # these ask on before the last one has ended
            assert all(80 <= count <= 120 for count in chosen.values()), chosen
        assert sum((await reported_open(channel)).values()) == 0
        held = [decision async for decision in ask(channel, [f"open-{n}" for n in range(300)])]
        chosen = Counter(decision.target for decision in held)
        assert all(80 <= count <= 120 for count in chosen.values()), chosen
        assert await reported_open(channel) == chosen
        await finish(channel, held)
        assert set((await reported_open(channel)).values()) == {0}


async def test_instances_are_told_under_their_own_revision() -> None:
    office = Office(large=2)
    town = office.town
    town.changes("b-large-1", model_digest="large-chat@2026-03")
    town.hears_telemetry()
    town.hears_summary_of(town)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.FleetMindStub(channel)
        sites = (await stub.Sites(scheduler_pb2.SitesRequest())).sites
    told = {p.model_digest: [i.instance for i in p.instances] for site in sites for p in site.pools if site.name == "b"}
    assert told == {"large-chat@2026-03": ["b-large-1"], "large-chat@2026-09": ["b-large-0"]}


async def test_a_repeated_route_places_nothing_twice() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        first, again = [decision async for decision in routed_only(channel, ["r1", "r1"])]
    assert first.id == again.id
    assert len(office.town.site.ledger) == 1


async def test_telemetry_that_grows_old_shows_in_the_metric_that_alarms() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        [fresh] = [decision async for decision in one_by_one(channel, ["r1"])]
        assert REGISTRY.get_sample_value("tokenfleet_telemetry_age_seconds") == pytest.approx(fresh.age_s)
        office.town.now_s -= 30.0  # heard so long ago
        office.town.hears_telemetry()
        [old] = [decision async for decision in one_by_one(channel, ["r2"])]
    assert old.mode == decision_pb2.MODE_STALE
    assert REGISTRY.get_sample_value("tokenfleet_telemetry_age_seconds") == pytest.approx(old.age_s)
    assert old.age_s > 29.0
