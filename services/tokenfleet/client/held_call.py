"""Held call: one request that its replica may hold; who is silent is left as soon as one that can't hold anything.

A unary call that is held says nothing until the end, as a frozen replica does. A stream of one request says `queue`.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from tokenfleet.client.route_error import RouteError, error_of
from tokenfleet.client.token import Shown
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2

PAUSES_S: Final = (0.05, 0.1, 0.2)  # between tries

Queued = Callable[[decision_pb2.Decision], None]
"""Is told the `queue` decision, and that again each time its place in line has changed."""


async def schedule_held(
    stub: Any,
    message: scheduler_pb2.ScheduleRequest,
    *,
    patience_s: float,
    queued: Queued | None = None,
    shown: Shown = None,
) -> list[decision_pb2.Decision]:
    """The decision on `message`; after a `queue` decision if it was held. Who leaves early is withdrawn at once.

    A replica that answers that it is not ready is passed over, as the service config does it for calls that fail.

    Raises RouteError, a grpc.aio.AioRpcError: the service's own, or one of SILENT_CODES when nothing is said within
    `patience_s`, or within that and the longest wait of what is held.
    """
    for pause_s in PAUSES_S:
        try:
            return await _schedule(stub, message, patience_s, queued, shown)
        except RouteError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or not error.reason:
                raise
        await asyncio.sleep(pause_s)
    return await _schedule(stub, message, patience_s, queued, shown)


async def _schedule(
    stub: Any, message: scheduler_pb2.ScheduleRequest, patience_s: float, queued: Queued | None, shown: Shown
) -> list[decision_pb2.Decision]:
    call = stub.ScheduleStream(metadata=shown)
    try:
        async with asyncio.timeout(patience_s):
            await call.write(message)
            first = await _read(call)
        if first.verdict != decision_pb2.VERDICT_QUEUE or message.dry_run:
            return [first]
        async with asyncio.timeout(message.request.wait_max_s + patience_s):
            told = first
            while told.verdict == decision_pb2.VERDICT_QUEUE:
                if queued is not None:
                    queued(told)
                told = await _read(call)
            return [first, told]
    except TimeoutError as error:
        raise RouteError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {patience_s:g} s") from error
    except asyncio.InvalidStateError as error:  # written to a call that has failed: it says why
        raise RouteError(await call.code(), await call.details() or "") from error
    finally:
        call.cancel()


async def _read(call: Any) -> decision_pb2.Decision:
    try:
        response = await call.read()
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream was cut") from error  # gRPC's own
    if response is grpc.aio.EOF:
        raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream ended before its answer")
    if response.HasField("error"):
        raise error_of(response.error)
    return response.decision
