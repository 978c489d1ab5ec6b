"""Coalesce: each of many callers gets its own answer, whatever becomes of the others and of a replica."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2

from tests.adapters.desks import Office, event
from tests.adapters.desks import request as placeable
from tokenfleet.client import coalesce
from tokenfleet.client.coalesce import BATCH_MAX, REQUEST_BYTES_MAX, RouteError
from tokenfleet.client.gateway import Gateway
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

Answering = Callable[[int], Awaitable[None]]


class Replica(scheduler_pb2_grpc.TokenPilotServicer):
    """Admits every request by its name after `before`, which is told the number of the batch; keeps what it heard."""

    def __init__(self, name: str, before: Answering) -> None:
        self.name = name
        self.batches: list[list[str]] = []
        self.streams = 0
        self._before = before

    async def RouteStream(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.RouteStreamRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[scheduler_pb2.RouteStreamResponse]:
        self.streams += 1
        async for message in request_iterator:
            self.batches.append([each.request.id for each in message.requests])
            await self._before(len(self.batches))
            yield scheduler_pb2.RouteStreamResponse(answers=[self._answer(each.request) for each in message.requests])

    def _answer(self, request: decision_pb2.Request) -> scheduler_pb2.RouteAnswer:
        if request.model == "gpt-9":
            problem = scheduler_pb2.Problem(
                code=code_pb2.NOT_FOUND, reason="UNKNOWN_MODEL", field="model", message="no model 'gpt-9'"
            )
            return scheduler_pb2.RouteAnswer(error=problem)
        if self.name == "unready":
            problem = scheduler_pb2.Problem(code=code_pb2.UNAVAILABLE, reason="TABLE_NOT_READY", message="not yet")
            return scheduler_pb2.RouteAnswer(error=problem)
        decision = decision_pb2.Decision(request=request.id, target=self.name, verdict=decision_pb2.VERDICT_ADMIT)
        return scheduler_pb2.RouteAnswer(decision=decision)


async def at_once(batch: int) -> None: ...


async def never(batch: int) -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def asking(*replicas: Replica) -> AsyncGenerator[Gateway]:
    """A client of servers of these replicas."""
    async with AsyncExitStack() as stack:
        addresses: list[str] = []
        for replica in replicas:
            server = grpc.aio.server()
            scheduler_pb2_grpc.add_TokenPilotServicer_to_server(replica, server)
            addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
            await server.start()
            stack.push_async_callback(server.stop, None)
        yield await stack.enter_async_context(Gateway(addresses))


def request(request_id: str, **facts: Any) -> decision_pb2.Request:
    return decision_pb2.Request(id=request_id, **facts)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "TRY_TIMEOUT_S", 0.3)


async def test_those_that_ask_together_travel_together_and_each_gets_its_own_answer() -> None:
    replica = Replica("a", at_once)
    async with asking(replica) as fleet:
        answers = await asyncio.gather(*(fleet.route(request(f"r{n}")) for n in range(100)))
        alone = await fleet.route(request("alone"))
    assert [answer.request for answer in answers] == [f"r{n}" for n in range(100)]
    assert alone.request == "alone"
    assert max(len(batch) for batch in replica.batches) == BATCH_MAX
    assert sum(len(batch) for batch in replica.batches) == 101
    assert len(replica.batches) <= 100 // BATCH_MAX + 2
    assert replica.streams == 1


async def test_a_bad_request_is_its_callers_error_alone() -> None:
    async with asking(Replica("a", at_once)) as fleet:
        bad, good = await asyncio.gather(
            fleet.route(request("bad", model="gpt-9")), fleet.route(request("good")), return_exceptions=True
        )
        huge = request("huge", block_keys=b"\0" * REQUEST_BYTES_MAX)
        with pytest.raises(RouteError, match="bytes, at most") as caught:
            await fleet.route(huge)
    assert isinstance(bad, RouteError)
    assert (bad.code(), bad.reason, bad.field) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL", "model")
    assert isinstance(good, decision_pb2.Decision)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_caller_that_leaves_takes_only_its_own_question_back() -> None:
    going = asyncio.Event()

    async def held(batch: int) -> None:
        if batch == 2:
            await going.wait()

    replica = Replica("a", held)
    async with asking(replica) as fleet:
        await fleet.route(request("first"))
        leaves = asyncio.create_task(fleet.route(request("leaves")))
        stays = asyncio.create_task(fleet.route(request("stays")))
        while len(replica.batches) < 2:
            await asyncio.sleep(0.001)
        unsent = asyncio.create_task(fleet.route(request("unsent")))
        await asyncio.sleep(0)
        leaves.cancel()
        unsent.cancel()  # not yet on its way, so nobody is asked
        going.set()
        assert (await stays).request == "stays"
        assert (await fleet.route(request("last"))).request == "last"
    assert [name for batch in replica.batches for name in batch] == ["first", "leaves", "stays", "last"]
    assert leaves.cancelled()
    assert unsent.cancelled()
    assert replica.streams == 1


async def test_a_deadline_is_one_callers_own() -> None:
    going = asyncio.Event()

    async def held(batch: int) -> None:
        await going.wait()

    async with asking(Replica("a", held)) as fleet:
        hurried = asyncio.create_task(fleet.route(request("hurried"), timeout_s=0.05))
        patient = asyncio.create_task(fleet.route(request("patient")))
        with pytest.raises(RouteError, match=r"no decision within 0\.05 s") as caught:
            await hurried
        going.set()
        assert (await patient).request == "patient"
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize("name", ["frozen", "unready"])
async def test_a_replica_that_gives_no_answer_costs_time_and_no_answer(name: str) -> None:
    bad, good = Replica(name, never if name == "frozen" else at_once), Replica("good", at_once)
    async with asking(bad, good) as fleet:
        answers = await asyncio.gather(*(fleet.route(request(f"r{n}")) for n in range(40)))
        assert {answer.target for answer in answers} == {"good"}
        assert (await fleet.route(request("later"))).target == "good"
    assert [answer.request for answer in answers] == [f"r{n}" for n in range(40)]


async def test_a_stream_that_dies_between_question_and_answer_is_asked_again_elsewhere() -> None:
    async def dies(batch: int) -> None:
        if batch > 1:
            raise asyncio.CancelledError

    first, second = Replica("first", dies), Replica("second", dies)
    async with asking(first, second) as fleet:
        answers = [await fleet.route(request(f"r{n}")) for n in range(2)]
    assert [answer.request for answer in answers] == ["r0", "r1"]
    assert len({answer.target for answer in answers}) == 2


async def test_replicas_that_are_all_silent_are_an_error_in_time() -> None:
    async with asking(Replica("a", never), Replica("b", never)) as fleet:
        with pytest.raises(RouteError) as caught:
            await asyncio.wait_for(fleet.route(request("r"), timeout_s=30.0), 20.0)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_nobody_at_the_address_is_unavailable(unused_tcp_port: int) -> None:
    async with Gateway([f"127.0.0.1:{unused_tcp_port}"]) as fleet:
        with pytest.raises(RouteError) as caught:
            await asyncio.wait_for(fleet.route(request("r"), timeout_s=30.0), 20.0)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_a_stream_gives_way_to_a_new_one_when_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "STREAM_AGE_MAX_S", 0.05)
    replica = Replica("a", at_once)
    async with asking(replica) as fleet:
        for n in range(30):
            assert (await fleet.route(request(f"r{n}"))).request == f"r{n}"
            await asyncio.sleep(0.01)
    assert replica.streams > 1
    assert [name for batch in replica.batches for name in batch] == [f"r{n}" for n in range(30)]


async def test_who_still_waits_when_the_client_closes_is_told_so() -> None:
    async with asking(Replica("a", never)) as fleet:
        waits = asyncio.create_task(fleet.route(request("r")))
        await asyncio.sleep(0.05)
    with pytest.raises(RouteError, match="the client was closed") as caught:
        await waits
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_a_service_that_stands_still_is_not_asked_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "TRY_TIMEOUT_S", 20.0)
    going = asyncio.Event()

    async def held(batch: int) -> None:
        await going.wait()

    replica = Replica("a", held)
    count = 2 * BATCH_MAX * coalesce.BATCHES_UNANSWERED_MAX
    async with asking(replica) as fleet:
        tasks = [asyncio.create_task(fleet.route(request(f"r{n}"), timeout_s=20.0)) for n in range(count)]
        async with asyncio.timeout(15.0):
            while fleet._coalescer is None or len(fleet._coalescer._unanswered) < coalesce.BATCHES_UNANSWERED_MAX:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # time to ask for more, were there no bound
        assert len(fleet._coalescer._unanswered) == coalesce.BATCHES_UNANSWERED_MAX
        going.set()
        answers = await asyncio.gather(*tasks)
    assert [answer.request for answer in answers] == [f"r{n}" for n in range(count)]


async def test_callers_that_come_and_go_on_the_real_service_leave_nothing_behind() -> None:
    """Cancelled at any moment between question and answer; the others are answered, each with its own."""
    office = Office(small=4)
    rng = Random(1)
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:

        async def caller(n: int) -> str:
            await asyncio.sleep(rng.random() * 0.2)
            asked = placeable(f"r{n}")
            if n % 3:
                return (await fleet.route(asked, dry_run=True)).request
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.random() * 0.005):
                    await fleet.route(asked, dry_run=True)
            return asked.id

        answers = await asyncio.gather(*(caller(n) for n in range(600)))
        assert answers == [f"r{n}" for n in range(600)]
        assert fleet._coalescer is not None
        while fleet._coalescer._unanswered:
            await asyncio.sleep(0.01)
        assert not fleet._coalescer._waiting
        assert (await fleet.route(placeable("last"))).request == "last"
    assert [d.request for envelope in office.outbox.of("decisions") for d in envelope.decisions] == ["last"]


def holdable(name: str, **facts: Any) -> decision_pb2.Request:
    return placeable(name, **({"prompt_tokens": 3000, "wait_max_s": 30.0} | facts))


def first_token(office: Office, decision: decision_pb2.Decision) -> None:
    kind = outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN
    office.desk.report(event(decision.request, decision=decision.id, instance=decision.target, kind=kind))


async def until_held(office: Office, count: int) -> None:
    async with asyncio.timeout(10.0):
        while len(office.desk.holding) != count:
            await asyncio.sleep(0.001)


async def test_a_held_question_gives_way_to_others_and_outlives_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesce, "STREAM_AGE_MAX_S", 0.05)
    monkeypatch.setattr(coalesce, "TRY_TIMEOUT_S", 20.0)
    office = Office(small=1)
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        running = await fleet.route(placeable("running", prompt_tokens=60_000))
        held = asyncio.create_task(fleet.route(holdable("held")))
        await until_held(office, 1)
        for n in range(20):  # on several streams
            assert (await fleet.route(placeable(f"r{n}"), dry_run=True)).request == f"r{n}"
            await asyncio.sleep(0.01)
        assert fleet._coalescer is not None
        assert fleet._coalescer._old
        assert len(office.desk.holding) == 1
        assert (await fleet.route(holdable("dry"), dry_run=True)).verdict == decision_pb2.VERDICT_QUEUE
        first_token(office, running)
        assert (await held).verdict == decision_pb2.VERDICT_ADMIT
    told = [d.verdict for envelope in office.outbox.of("decisions") for d in envelope.decisions if d.request == "held"]
    assert told == ["queue", "admit"]


async def test_a_caller_that_leaves_a_held_question_places_nothing() -> None:
    office = Office(small=1)
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        await fleet.route(placeable("running", prompt_tokens=60_000))
        leaves = asyncio.create_task(fleet.route(holdable("leaves")))
        stays = asyncio.create_task(fleet.route(holdable("stays")))
        await until_held(office, 2)
        leaves.cancel()
        with pytest.raises(RouteError, match="no decision within"):
            await fleet.route(holdable("late"), timeout_s=0.1)
        await until_held(office, 1)
        stays.cancel()
        await until_held(office, 0)
        assert len(office.town.site.ledger) == 1


async def test_a_held_question_is_asked_elsewhere_when_its_replica_goes() -> None:
    class Holds(Replica):
        """Holds every request for ever and, told to go, ends its streams."""

        going = asyncio.Event()

        async def RouteStream(
            self,
            request_iterator: AsyncIterator[scheduler_pb2.RouteStreamRequest],
            context: grpc.aio.ServicerContext[Any, Any],
        ) -> AsyncIterator[scheduler_pb2.RouteStreamResponse]:
            message = await anext(request_iterator)
            self.batches.append([each.request.id for each in message.requests])
            queue = decision_pb2.VERDICT_QUEUE
            answers = [
                scheduler_pb2.RouteAnswer(decision=decision_pb2.Decision(id=each.request.id, verdict=queue))
                for each in message.requests
            ]
            yield scheduler_pb2.RouteStreamResponse(answers=answers)
            await self.going.wait()

    holds, good = Holds("holds", at_once), Replica("good", at_once)
    async with asking(holds, good) as fleet:
        answers = [asyncio.create_task(fleet.route(request(f"r{n}", wait_max_s=30.0))) for n in range(4)]
        while not holds.batches and not all(answer.done() for answer in answers):
            await asyncio.sleep(0.01)
        holds.going.set()
        assert {(await answer).target for answer in answers} == {"good"}


async def test_a_replica_that_freezes_while_it_holds_is_left_after_the_longest_wait() -> None:
    async def nothing_more(batch: int) -> None: ...

    class Freezes(Replica):
        """Says `queue` and nothing ever after."""

        def _answer(self, request: decision_pb2.Request) -> scheduler_pb2.RouteAnswer:
            queue = decision_pb2.Decision(id=request.id, verdict=decision_pb2.VERDICT_QUEUE)
            return scheduler_pb2.RouteAnswer(decision=queue)

    async with asking(Freezes("frozen", nothing_more), Replica("good", at_once)) as fleet:
        answers = await asyncio.gather(*(fleet.route(request(f"r{n}", wait_max_s=0.2)) for n in range(4)))
    assert {answer.target for answer in answers} == {"good"}


async def test_a_caller_that_leaves_is_withdrawn_from_the_old_stream_that_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coalesce, "STREAM_AGE_MAX_S", 0.05)
    monkeypatch.setattr(coalesce, "TRY_TIMEOUT_S", 20.0)
    office = Office(small=1)
    async with office.serving() as (server, _), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        running = await fleet.route(placeable("running", prompt_tokens=60_000))
        names = ("leaves", "stays", "late")
        asked = {name: asyncio.create_task(fleet.route(holdable(name))) for name in names}
        await until_held(office, 3)
        assert fleet._coalescer is not None
        while not fleet._coalescer._old:
            await asyncio.sleep(0.01)
        asked["leaves"].cancel()
        await until_held(office, 2)
        asked["late"].cancel()
        await until_held(office, 1)
        assert fleet._coalescer._asking is not None
        assert not fleet._coalescer._gathered.is_set()  # no new stream is opened for it
        first_token(office, running)
        assert (await asked["stays"]).verdict == decision_pb2.VERDICT_ADMIT
        while fleet._coalescer._old:
            await asyncio.sleep(0.001)
    told = {d.request: d.verdict for envelope in office.outbox.of("decisions") for d in envelope.decisions}
    assert told == {"running": "admit", "leaves": "queue", "late": "queue", "stays": "admit"}
