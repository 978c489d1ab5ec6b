"""Streams: every request of a batch gets its own answer, in order, whatever the others are."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2

from tests.adapters.desks import Office, event, request
from tokenfleet.adapters.services import BATCH_MAX
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2, scheduler_pb2_grpc

BROKEN = "a request that breaks what decides"


def batch(*requests: decision_pb2.Request, **how: Any) -> scheduler_pb2.RouteStreamRequest:
    return scheduler_pb2.RouteStreamRequest(
        requests=[scheduler_pb2.RouteRequest(request=each, **how) for each in requests]
    )


async def route_stream(
    channel: grpc.aio.Channel, *messages: scheduler_pb2.RouteStreamRequest
) -> list[list[scheduler_pb2.RouteAnswer]]:
    """The answers to each message, after which the stream ended well."""
    stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
    call = stub.RouteStream(iter(messages))
    answers = [list(response.answers) async for response in call]
    assert await call.code() == grpc.StatusCode.OK
    return answers


def told(answers: Sequence[scheduler_pb2.RouteAnswer]) -> list[str]:
    """The request of each decision, the reason and field of each error."""
    return [
        each.decision.request if each.HasField("decision") else f"{each.error.reason} {each.error.field}".strip()
        for each in answers
    ]


async def test_each_request_of_a_batch_is_answered_in_its_place_and_a_bad_one_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    office = Office(small=2)
    place = office.desk._place

    def breaking(event: Any, **how: Any) -> None:
        if event.request == BROKEN:
            raise ValueError("the secret inside")
        place(event, **how)

    monkeypatch.setattr(office.desk, "_place", breaking)
    asked = batch(
        request("r1"),
        request("r2", model="gpt-9"),
        request("r3", prompt_tokens=-1),
        request(BROKEN),
        request("r4"),
        request(""),
        request("r1"),
    )
    async with office.serving() as (_, channel):
        first, then = await route_stream(channel, asked, batch(request("r5")))
    assert told(first) == [
        "r1",
        "UNKNOWN_MODEL model",
        "BAD_REQUEST prompt_tokens",
        "INTERNAL",
        "r4",
        "BAD_REQUEST id",
        "r1",
    ]
    assert told(then) == ["r5"]
    assert [each.error.code for each in first if each.HasField("error")] == [
        code_pb2.NOT_FOUND,
        code_pb2.INVALID_ARGUMENT,
        code_pb2.INTERNAL,
        code_pb2.INVALID_ARGUMENT,
    ]
    assert "there is: large-chat, small-chat" in first[1].error.message
    assert "secret" not in first[3].error.message
    assert first[6].decision == first[0].decision  # a repeated call gets the same answer
    assert [len(envelope.decisions) for envelope in office.outbox.of("decisions")] == [2, 1]
    assert len(office.town.site.ledger) == 3


async def test_the_requests_of_one_batch_see_one_another_placed() -> None:
    office = Office(small=4)
    async with office.serving() as (_, channel):
        [answers] = await route_stream(
            channel, batch(*(request(f"r{n}", prompt_tokens=4000) for n in range(BATCH_MAX)))
        )
    placed = [each.decision.target for each in answers]
    assert sorted(placed.count(target) for target in set(placed)) == [16, 16, 16, 16]
    assert sum(len(envelope.events) for envelope in office.outbox.of("placements")) == BATCH_MAX
    numbers = [envelope.n for envelope in office.outbox.of("placements")]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) < BATCH_MAX / 2  # those that came together travel together


@pytest.mark.parametrize("ended", [True, False], ids=["one after another", "all open"])
@pytest.mark.parametrize("path", ["Route", "RouteStream", "ScheduleStream"])
async def test_equal_instances_get_equal_shares_on_every_path(path: str, ended: bool) -> None:
    """Equal costs never go to the lowest name, and what one call placed counts for the next, whichever way it came."""
    office = Office(small=3)
    asks = 300 if ended else 180  # open ones are bounded: 64 an instance
    taken: Counter[str] = Counter()
    async with office.serving() as (_, channel):
        scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        pilot: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        routes, schedules = pilot.RouteStream(), scheduler.ScheduleStream()
        for n in range(asks):
            asked = request(f"r{n}", prompt_tokens=100)
            if path == "Route":
                decision = (await pilot.Route(scheduler_pb2.RouteRequest(request=asked))).decision
            elif path == "RouteStream":
                await routes.write(batch(asked))
                decision = (await routes.read()).answers[0].decision
            else:
                await schedules.write(scheduler_pb2.ScheduleRequest(request=asked))
                decision = (await schedules.read()).decision
            taken[decision.target] += 1
            if ended:
                office.desk.report(event(f"r{n}", decision=decision.id, instance=decision.target))
    least, most = asks * 4 // 15, asks * 6 // 15
    assert len(taken) == 3
    assert all(least <= count <= most for count in taken.values()), taken
    assert len(office.town.site.ledger) == (0 if ended else asks)


async def test_a_dry_run_in_a_batch_leaves_no_trace() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        [answers] = await route_stream(channel, batch(request("r1"), request("r2"), dry_run=True))
    assert [each.decision.dry_run for each in answers] == [True, True]
    assert office.outbox.put_in == []


async def test_an_empty_message_gets_an_empty_answer_and_one_of_too_many_ends_the_stream() -> None:
    office = Office(small=1)
    full = batch(*(request(f"r{n}") for n in range(BATCH_MAX)))
    over = batch(*(request(f"o{n}") for n in range(BATCH_MAX + 1)))
    async with office.serving() as (_, channel):
        assert [len(answers) for answers in await route_stream(channel, batch(), full, batch())] == [0, BATCH_MAX, 0]
        with pytest.raises(grpc.aio.AioRpcError, match="requests: 65 in one message, at most 64 are taken") as caught:
            await route_stream(channel, over)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    decided = [decision for envelope in office.outbox.of("decisions") for decision in envelope.decisions]
    assert len(decided) == BATCH_MAX


async def test_before_the_tables_are_read_each_answer_says_when_to_ask_again_and_the_stream_stays() -> None:
    office = Office(small=1)
    office.ready = False
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        call = stub.RouteStream()
        await call.write(batch(request("r1")))
        [early] = (await call.read()).answers
        assert (early.error.code, early.error.reason) == (code_pb2.UNAVAILABLE, "TABLE_NOT_READY")
        assert early.error.retry_after_s == 1.0
        office.ready = True
        await call.write(batch(request("r1")))
        assert told((await call.read()).answers) == ["r1"]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_caller_who_has_said_all_still_gets_all_answers() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        call = stub.RouteStream()
        for n in range(20):
            await call.write(batch(request(f"r{n}")))
        await call.done_writing()
        answers = [told(response.answers) async for response in call]
    assert answers == [[f"r{n}"] for n in range(20)]


async def test_a_cancelled_stream_hurts_no_other_and_what_it_asked_is_answered_again() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        gone, other = stub.RouteStream(), stub.RouteStream()
        await gone.write(batch(request("r1")))
        first = (await gone.read()).answers[0].decision
        for n in range(20):
            await gone.write(batch(*(request(f"c{n}-{i}") for i in range(BATCH_MAX))))
        gone.cancel()
        await other.write(batch(request("r1"), request("r2")))
        again = (await other.read()).answers
        assert told(again) == ["r1", "r2"]
        assert again[0].decision.id == first.id
        await other.done_writing()
        assert await other.read() is grpc.aio.EOF


MANY = 120  # messages with answers of 64 KiB and more: twice what was seen to fit into windows and buffers


async def stalled(office: Office, channel: grpc.aio.Channel) -> Any:
    """A call that asks for MANY batches and reads no answer, once the server decides no more of them."""

    async def many() -> AsyncIterator[scheduler_pb2.RouteStreamRequest]:
        for m in range(MANY):
            yield batch(*(request(f"r{m}-{n}") for n in range(BATCH_MAX)), dry_run=True)

    stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
    call = stub.RouteStream(many())
    before = -1
    while office.desk._decisions != before:
        before = office.desk._decisions
        await asyncio.sleep(0.3)
    return call


async def test_who_reads_no_answers_is_asked_to_wait() -> None:
    """Flow control: the server decides only so much ahead of a reader that stands still."""
    office = Office(small=8)
    async with office.serving() as (_, channel):
        call = await stalled(office, channel)
        assert 0 < office.desk._decisions < MANY * BATCH_MAX
        read = 0
        async for response in call:
            read += len(response.answers)
        assert read == office.desk._decisions == MANY * BATCH_MAX


async def test_who_leaves_with_answers_on_the_way_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    office = Office(small=8)
    async with office.serving() as (_, channel):
        caplog.clear()
        call = await stalled(office, channel)
        call.cancel()
        assert told((await route_stream(channel, batch(request("r1"))))[0]) == ["r1"]
    assert caplog.records == []


async def test_a_bad_request_on_the_schedule_stream_is_an_answer_and_the_stream_goes_on() -> None:
    office = Office(small=1)
    asked = [request("r1"), request("r2", tenant="nobody"), request("r3", hop=2), request("r4")]
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        call = stub.ScheduleStream(iter([scheduler_pb2.ScheduleRequest(request=each) for each in asked]))
        answers = [response async for response in call]
    assert [each.decision.request or f"{each.error.reason} {each.error.field}" for each in answers] == [
        "r1",
        "UNKNOWN_TENANT tenant",
        "BAD_REQUEST hop",
        "r4",
    ]
    assert len(office.outbox.of("decisions")) == 2
