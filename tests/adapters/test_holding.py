"""Holding: a held call stays open, gets its final answer in its turn, and leaves nothing when its caller goes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from tests.adapters.desks import Office, event, request
from tokenfleet.core.asked import Decided, Steps
from tokenfleet.core.decision import Decision as Told
from tokenfleet.core.decision import Request
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.site import Heard
from tokenfleet.core.tokenpilot.held import PERIOD_S
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

LONG = 20_000
QUEUE, ADMIT, REJECT = decision_pb2.VERDICT_QUEUE, decision_pb2.VERDICT_ADMIT, decision_pb2.VERDICT_REJECT


def holdable(name: str, prompt_tokens: int = 3000, **facts: Any) -> decision_pb2.Request:
    return request(name, prompt_tokens=prompt_tokens, **({"wait_max_s": 60.0} | facts))


class Held:
    """One small instance that computes a long prompt; what can be held is held."""

    def __init__(self, office: Office, channel: grpc.aio.Channel, *, port: int = 0) -> None:
        self.office = office
        self.port = port
        self.scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        self.pilot: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        self.running = decision_pb2.Decision()

    async def begin(self) -> None:
        """The instance is busy: for some seconds, yet a chat may still wait for it."""
        self.running = await self.route(request("running", prompt_tokens=LONG))
        assert self.running.verdict == ADMIT

    async def route(self, asked: decision_pb2.Request, **how: Any) -> decision_pb2.Decision:
        return (await self.pilot.Route(scheduler_pb2.RouteRequest(request=asked), **how)).decision

    async def schedule(self, asked: decision_pb2.Request, **how: Any) -> decision_pb2.Decision:
        return (await self.scheduler.Schedule(scheduler_pb2.ScheduleRequest(request=asked), **how)).decision

    def first_token(self, decision: decision_pb2.Decision | None = None) -> None:
        told = decision or self.running
        first = outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN
        self.office.desk.report(
            event(told.request, tenant=told.tenant, decision=told.id, instance=told.target, kind=first)
        )

    async def until(self, count: int) -> None:
        """So many requests are held."""
        async with asyncio.timeout(10.0):
            while len(self.office.desk.holding) != count:
                await asyncio.sleep(0.001)

    def recorded(self, name: str) -> list[Told]:
        """What the records say of a request, in order."""
        return [d for envelope in self.office.outbox.of("decisions") for d in envelope.decisions if d.request == name]


async def with_held(tell: Callable[[Held], Awaitable[None]], *, small: int = 1) -> Held:
    office = Office(small=small)
    async with office.serving() as (server, channel):
        held = Held(office, channel, port=server.port)
        await held.begin()
        await tell(held)
    return held


@pytest.mark.parametrize("call", ["route", "schedule"])
async def test_a_held_call_stays_open_until_the_first_token_and_is_recorded_twice(call: str) -> None:
    async def tell(held: Held) -> None:
        waits = asyncio.create_task(getattr(held, call)(holdable("r1")))
        await held.until(1)
        assert held.recorded("r1")[0].verdict == "queue"
        assert held.office.town.site.ledger.entry(held.recorded("r1")[0].id, held.office.town.now_s) is None
        await asyncio.sleep(3 * PERIOD_S)
        assert not waits.done()
        held.first_token()
        final = await waits
        assert (final.verdict, final.target) == (ADMIT, "b-small-0")
        assert final.sentence.startswith("held ")
        assert final.took_s < PERIOD_S  # the wait is no part of it
        queue, told = held.recorded("r1")
        assert (queue.verdict, told.verdict, told.id) == ("queue", "admit", final.id)
        assert queue.id != told.id
        assert (await getattr(held, call)(holdable("r1"))).id == final.id  # from now on a repeated call's answer

    await with_held(tell)


async def test_a_first_token_releases_at_once_and_nobody_looks_while_nothing_is_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def tell(held: Held) -> None:
        waits = asyncio.create_task(held.route(holdable("r1")))
        await held.until(1)
        held.first_token()
        assert (await asyncio.wait_for(waits, 10.0)).verdict == ADMIT
        assert not held.office.desk.holding._some.is_set()

    monkeypatch.setattr("tokenfleet.adapters.holding.PERIOD_S", 3600.0)
    await with_held(tell)


async def test_after_its_longest_wait_it_goes_without_any_first_token() -> None:
    async def tell(held: Held) -> None:
        final = await held.route(holdable("r1", wait_max_s=0.1))
        assert [d.verdict for d in held.recorded("r1")] == ["queue", "admit"]
        assert final.sentence.startswith("held ")

    await with_held(tell)


async def test_a_caller_with_a_deadline_is_answered_before_it() -> None:
    async def tell(held: Held) -> None:
        final = await held.route(holdable("r1"), timeout=1.0)
        assert final.verdict == ADMIT

    await with_held(tell)


@pytest.mark.parametrize("way", ["cancel", "deadline"])
async def test_who_leaves_places_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenfleet.adapters.holding.MARGIN_S", -60.0)  # the deadline comes before the turn

    async def tell(held: Held) -> None:
        asked = scheduler_pb2.RouteRequest(request=holdable("r1"))
        call = held.pilot.Route(asked, timeout=0.2 if way == "deadline" else None)
        await held.until(1)
        if way == "cancel":
            call.cancel()
        await held.until(0)
        assert len(held.office.town.site.held) == 0
        held.first_token()
        assert [d.verdict for d in held.recorded("r1")] == ["queue"]
        assert len(held.office.town.site.ledger) == 1  # the long one
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await call

    await with_held(tell)


async def test_a_repeated_call_joins_the_wait_and_one_leaving_leaves_the_other() -> None:
    async def tell(held: Held) -> None:
        first = held.pilot.Route(scheduler_pb2.RouteRequest(request=holdable("r1")))
        await held.until(1)
        again = asyncio.create_task(held.route(holdable("r1")))
        while len(next(iter(held.office.desk.holding._calls.values())).callers) < 2:
            await asyncio.sleep(0.001)
        assert len(held.office.town.site.held) == 1
        first.cancel()
        while len(next(iter(held.office.desk.holding._calls.values())).callers) > 1:
            await asyncio.sleep(0.001)
        with pytest.raises(grpc.aio.AioRpcError, match="another prompt or model"):
            await held.route(holdable("r1", prompt_tokens=7))
        held.first_token()
        assert (await again).verdict == ADMIT
        assert [d.verdict for d in held.recorded("r1")] == ["queue", "admit"]

    await with_held(tell)


async def test_anothers_request_of_the_same_id_is_placed_and_disturbs_nobody() -> None:
    async def tell(held: Held) -> None:
        waits = asyncio.create_task(held.route(holdable("r1")))
        await held.until(1)
        assert (await held.route(holdable("r1", tenant="globex"))).verdict == ADMIT
        held.first_token()
        held.first_token(await held.route(holdable("r1", tenant="globex")))
        assert (await waits).tenant == "acme"

    await with_held(tell)


async def test_a_dry_run_is_told_queue_at_once() -> None:
    async def tell(held: Held) -> None:
        asked = scheduler_pb2.ScheduleRequest(request=holdable("r1"), dry_run=True)
        decision = (await held.scheduler.Schedule(asked)).decision
        assert (decision.verdict, decision.dry_run) == (QUEUE, True)
        assert len(held.office.desk.holding) == 0
        assert held.recorded("r1") == []

    await with_held(tell)


async def test_at_the_end_of_the_process_all_that_is_held_goes_out_by_cost() -> None:
    async def tell(held: Held) -> None:
        answers = [asyncio.create_task(held.route(holdable(f"r{n}"))) for n in range(5)]
        await held.until(5)
        held.office.releasing.cancel()
        assert [(await answer).verdict for answer in answers] == [ADMIT] * 5
        assert [d.verdict for d in held.recorded("r3")] == ["queue", "admit"]
        assert len(held.office.town.site.ledger) == 6
        assert (await held.route(holdable("late"))).verdict == ADMIT  # nobody would release it
        assert [d.verdict for d in held.recorded("late")] == ["admit"]

    await with_held(tell)


async def test_a_held_request_whose_model_is_gone_gets_its_error_and_the_others_their_answers() -> None:
    async def tell(held: Held) -> None:
        site = held.office.town.site
        tasks = {
            name: asyncio.create_task(held.route(holdable(name, model=model)))
            for name, model in (("gone", "small-chat"), ("stays", "small-chat"))
        }
        await held.until(2)
        models = {name: model for name, model in site.policy.models.items() if name != "small-chat"}
        site.adopt(replace(site.policy, models=models))
        held.first_token()
        for task in tasks.values():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert len(site.held) == len(held.office.desk.holding) == 0

    await with_held(tell)


async def test_one_models_end_lets_the_held_requests_of_another_wait_on() -> None:
    office = Office(small=1, large=1)
    async with office.serving() as (_, channel):
        held, site = Held(office, channel), office.town.site
        await held.begin()
        await held.route(request("running-large", model="large-chat", prompt_tokens=LONG))
        goes = asyncio.create_task(held.route(holdable("goes", model="large-chat")))
        waits = asyncio.create_task(held.route(holdable("waits")))
        await held.until(2)
        models = {name: model for name, model in site.policy.models.items() if name != "large-chat"}
        site.adopt(replace(site.policy, models=models))
        with pytest.raises(grpc.aio.AioRpcError):
            await goes
        await asyncio.sleep(2 * PERIOD_S)
        assert len(office.desk.holding) == 1
        held.first_token()
        assert (await waits).verdict == ADMIT
        assert [d.verdict for d in held.recorded("waits")] == ["queue", "admit"]


async def test_an_error_in_one_held_request_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(held: Held) -> None:
        desk = held.office.desk
        settle = desk.holding._settle

        def bad(asked: Request, steps: Steps, decided: Decided) -> None:
            if asked.id == "bad":
                raise RuntimeError("unforeseen")
            settle(asked, steps, decided)

        monkeypatch.setattr(desk.holding, "_settle", bad)
        prompts = {"bad": 500, "good": 5000}
        tasks = {name: asyncio.create_task(held.route(holdable(name, size))) for name, size in prompts.items()}
        waits = asyncio.create_task(held.route(holdable("long", LONG)))
        await held.until(3)
        held.first_token()
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(tasks["bad"], 10.0)
        assert (await tasks["good"]).verdict == ADMIT
        assert not waits.done()
        waits.cancel()

    await with_held(tell)


async def test_a_held_request_takes_its_quota_when_it_comes() -> None:
    office = Office(small=1, tenant_limits={"acme": 3})
    async with office.serving() as (_, channel):
        held = Held(office, channel)
        running = await held.schedule(request("running", prompt_tokens=LONG))
        waits = [asyncio.create_task(held.schedule(holdable(f"r{n}"))) for n in range(2)]
        await held.until(2)
        assert [(await held.schedule(holdable(f"r{n}"))).verdict for n in (2, 3, 4)] == [REJECT] * 3
        waits[0].cancel()
        await held.until(1)
        waits.append(asyncio.create_task(held.schedule(holdable("r5"))))
        await held.until(2)
        held.first_token(running)
        assert [(await wait).verdict for wait in waits[1:]] == [ADMIT, ADMIT]


async def test_a_request_that_is_held_no_longer_can_be_refused() -> None:
    async def tell(held: Held) -> None:
        waits = asyncio.create_task(held.schedule(holdable("r1")))
        await held.until(1)
        held.office.town.hears_control("b-small-0", "draining")
        held.first_token()
        held.office.desk.holding.let_all_go()
        final = await waits
        assert final.verdict == REJECT
        assert held.office.outbox.of("outcomes")[-1].events[0].kind == "rejected"

    await with_held(tell)


async def test_on_a_stream_a_held_request_blocks_nobody_and_its_final_answer_names_it() -> None:
    async def tell(held: Held) -> None:
        stream = held.pilot.RouteStream()
        ask = scheduler_pb2.RouteRequest
        both = [ask(request=holdable("r1")), ask(request=request("now"))]
        await stream.write(scheduler_pb2.RouteStreamRequest(requests=both))
        first = (await stream.read()).answers
        assert [a.decision.verdict for a in first] == [QUEUE, ADMIT]
        await stream.write(scheduler_pb2.RouteStreamRequest())
        assert len((await stream.read()).answers) == 0
        held.first_token(first[1].decision)
        held.first_token()
        [final] = (await stream.read()).answers
        assert (final.held, final.decision.request) == (first[0].decision.id, "r1")
        assert final.decision.verdict == ADMIT
        await stream.write(scheduler_pb2.RouteStreamRequest(requests=[ask(request=request("later"))]))
        assert [a.decision.request for a in (await stream.read()).answers] == ["later"]
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF

    await with_held(tell)


async def test_a_stream_that_has_said_all_stays_open_for_its_last_held_request() -> None:
    async def tell(held: Held) -> None:
        stream = held.scheduler.ScheduleStream()
        await stream.write(scheduler_pb2.ScheduleRequest(request=holdable("r1")))
        queue = await stream.read()
        assert (queue.decision.verdict, queue.held) == (QUEUE, "")
        await stream.done_writing()
        await asyncio.sleep(0.1)  # the end is read before the first token comes
        held.first_token()
        final = await stream.read()
        assert (final.decision.verdict, final.held) == (ADMIT, queue.decision.id)
        assert await stream.read() is grpc.aio.EOF

    await with_held(tell)


async def test_withdrawn_or_cut_a_streams_held_requests_place_nothing() -> None:
    async def tell(held: Held) -> None:
        stream = held.pilot.RouteStream()
        asked = [scheduler_pb2.RouteRequest(request=holdable(f"r{n}")) for n in range(3)]
        await stream.write(scheduler_pb2.RouteStreamRequest(requests=asked))
        queued = (await stream.read()).answers
        await held.until(3)
        await stream.write(scheduler_pb2.RouteStreamRequest(withdrawn=[queued[1].decision.id, "unknown"]))
        assert len((await stream.read()).answers) == 0
        await held.until(2)
        stream.cancel()
        await held.until(0)
        held.first_token()
        assert len(held.office.town.site.ledger) == 1

    await with_held(tell)


@pytest.mark.parametrize("call", ["route", "schedule"])
@pytest.mark.parametrize("way", ["cancel", "channel closed"])
async def test_a_stream_that_is_cut_holds_nothing_any_more(call: str, way: str) -> None:
    async def tell(held: Held) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{held.port}") as channel:
            if call == "route":
                stream = scheduler_pb2_grpc.TokenPilotStub(channel).RouteStream()
                asked: Any = scheduler_pb2.RouteStreamRequest(
                    requests=[scheduler_pb2.RouteRequest(request=holdable(f"r{n}")) for n in range(3)]
                )
                await stream.write(asked)
            else:
                stream = scheduler_pb2_grpc.SchedulerStub(channel).ScheduleStream()
                for n in range(3):
                    await stream.write(scheduler_pb2.ScheduleRequest(request=holdable(f"r{n}")))
            await held.until(3)
            if way == "cancel":
                stream.cancel()
                await held.until(0)
        await held.until(0)
        held.first_token()
        await asyncio.sleep(2 * PERIOD_S)
        assert len(held.office.town.site.ledger) == 1

    await with_held(tell)


async def test_who_hears_another_replica_place_holds_nothing_new() -> None:
    async def tell(held: Held) -> None:
        site = held.office.town.site
        other = PlacementEnvelope(site="b", replica="other", start="1", n=1, events=())
        site.heard(other, Heard(now_s=held.office.town.now_s))
        assert (await held.route(holdable("r1"))).verdict == ADMIT
        assert [d.verdict for d in held.recorded("r1")] == ["admit"]

    await with_held(tell)
