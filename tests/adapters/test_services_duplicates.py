"""Idempotency keys over real gRPC: one execution, its answer for all who ask, and typed refusals."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from tests.adapters.desks import Office, details_of, event, request
from tests.adapters.test_holding import ADMIT, QUEUE, REJECT, Held, holdable, with_held
from tests.adapters.test_services import report, schedule
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2


def keyed(request_id: str, key: str = "k", **facts: Any) -> decision_pb2.Request:
    return request(request_id, idempotency_key=key, **facts)


async def test_a_key_runs_once_is_answered_to_all_conflicts_with_other_bodies_and_is_done_at_the_end() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        first = await schedule(channel, keyed("r1", body_hash=2**64 - 1))
        assert (first.verdict, first.duplicate, first.idempotency_key) == (ADMIT, False, "k")
        again = await schedule(channel, keyed("r2", body_hash=2**64 - 1))
        assert (again.id, again.request, again.target, again.duplicate) == (first.id, "r1", first.target, True)
        other = await schedule(channel, keyed("r3", body_hash=1))
        assert (other.verdict, other.reason) == (REJECT, decision_pb2.REASON_KEY_CONFLICT)
        end = event("r1", decision=first.id, instance=first.target, output_tokens=9)
        assert (await report(channel, [end])).accepted == 1
        done = await schedule(channel, keyed("r2", body_hash=2**64 - 1))
        assert (done.verdict, done.reason) == (REJECT, decision_pb2.REASON_DUPLICATE_DONE)
    recorded = [(d.request, d.reason) for envelope in office.outbox.of("decisions") for d in envelope.decisions]
    assert recorded == [("r1", ""), ("r3", "key_conflict"), ("r2", "duplicate_done")]
    assert [e.kind for envelope in office.outbox.of("outcomes") for e in envelope.events] == ["finished"]


async def test_a_key_of_257_bytes_is_named() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await schedule(channel, keyed("r1", key="x" * 257))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "idempotency_key" in str(details_of(caught.value)["BadRequest"])


async def test_a_duplicate_waits_with_the_one_that_is_held_and_only_that_one_is_told_to_run() -> None:
    async def tell(held: Held) -> None:
        first = asyncio.create_task(held.schedule(holdable("r1", idempotency_key="k")))
        await held.until(1)
        joined = asyncio.create_task(held.schedule(holdable("r2", idempotency_key="k")))
        leaves = asyncio.create_task(held.schedule(holdable("r3", idempotency_key="k")))
        await asyncio.sleep(0.2)
        assert len(held.office.desk.holding) == 1
        leaves.cancel()
        held.first_token()
        ran, told = await first, await joined
        assert (ran.id, ran.verdict, ran.duplicate) == (told.id, ADMIT, False)
        assert (told.request, told.duplicate) == ("r1", True)

    held = await with_held(tell)
    assert [d.verdict for d in held.recorded("r1")] == ["queue", "admit"]
    assert held.recorded("r2") == []


async def test_where_the_first_caller_leaves_one_who_joined_runs_it() -> None:
    async def tell(held: Held) -> None:
        first = asyncio.create_task(held.schedule(holdable("r1", idempotency_key="k")))
        await held.until(1)
        joined = asyncio.create_task(held.schedule(holdable("r2", idempotency_key="k")))
        await asyncio.sleep(0.2)
        first.cancel()
        await asyncio.sleep(0.1)
        held.first_token()
        final = await joined
        assert (final.verdict, final.duplicate) == (ADMIT, False)

    await with_held(tell)


async def test_on_a_stream_the_duplicate_gets_its_own_final_answer() -> None:
    async def tell(held: Held) -> None:
        call = held.scheduler.ScheduleStream()
        for name in ("r1", "r2"):
            await call.write(scheduler_pb2.ScheduleRequest(request=holdable(name, idempotency_key="k")))
        waiting = [await call.read(), await call.read()]
        assert [(w.decision.verdict, w.decision.duplicate) for w in waiting] == [(QUEUE, False), (QUEUE, True)]
        held.first_token()
        final = [await call.read(), await call.read()]
        assert {f.held for f in final} == {waiting[0].decision.id}
        assert sorted(f.decision.duplicate for f in final) == [False, True]
        await call.done_writing()

    await with_held(tell)
