"""Calls: one question to a running fleet, for commands and scripts. Failures are SetupError or the server's words."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio

from tokenfleet.client.gateway import CHANNEL_OPTIONS, target_of
from tokenfleet.client.token import shown
from tokenfleet.core.errors import BadRequestError, NotFoundError, SetupError
from tokenfleet.wire.v1 import (
    audit_pb2,
    audit_pb2_grpc,
    decision_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

CALL_TIMEOUT_S: Final = 10.0
REFUSED_CODES: Final = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


async def schedule(targets: Sequence[str], request: decision_pb2.Request, *, dry_run: bool) -> decision_pb2.Decision:
    """The three questions at once, without following redirects."""
    message = scheduler_pb2.ScheduleRequest(request=request, dry_run=dry_run)
    stub = scheduler_pb2_grpc.SchedulerStub
    wait_s = request.wait_max_s
    return (await _call(targets, lambda channel: _unary(stub(channel), "Schedule", message, wait_s))).decision


async def route(targets: Sequence[str], request: decision_pb2.Request, *, dry_run: bool) -> decision_pb2.Decision:
    """Which instance of the site behind `targets`."""
    message = scheduler_pb2.RouteRequest(request=request, dry_run=dry_run)
    stub = scheduler_pb2_grpc.TokenPilotStub
    wait_s = request.wait_max_s
    return (await _call(targets, lambda channel: _unary(stub(channel), "Route", message, wait_s))).decision


async def what_if(
    targets: Sequence[str], request: decision_pb2.Request, changes: scheduler_pb2.Changes
) -> scheduler_pb2.WhatIfResponse:
    """Which instance of the site behind `targets` the request would get now, and under `changes`."""
    message = scheduler_pb2.WhatIfRequest(request=request, changes=changes)
    stub = scheduler_pb2_grpc.TokenPilotStub
    return await _call(targets, lambda channel: _unary(stub(channel), "WhatIf", message))


async def sites(targets: Sequence[str]) -> scheduler_pb2.SitesResponse:
    """How all sites look to the replica that answers."""
    stub = scheduler_pb2_grpc.FleetMindStub
    return await _call(targets, lambda channel: _unary(stub(channel), "Sites", scheduler_pb2.SitesRequest()))


async def explain(target: str, request_id: str) -> audit_pb2.ExplainResponse:
    """All decisions and outcome events of a request, from PostgreSQL."""
    message = audit_pb2.ExplainRequest(request_id=request_id)
    return await _call([target], lambda channel: _unary(audit_pb2_grpc.AuditStub(channel), "Explain", message))


async def find(
    target: str, *, verdict: str = "", tenant: str = "", model: str = "", site: str = "", limit: int = 20
) -> audit_pb2.FindResponse:
    """The newest decisions that match, from PostgreSQL. Raises BadRequestError for a verdict that there isn't."""
    numbers = {name.removeprefix("VERDICT_").lower(): value for name, value in decision_pb2.Verdict.items() if value}
    if verdict and verdict not in numbers:
        raise BadRequestError("--verdict", f"{verdict!r} is none of {', '.join(numbers)}")
    wanted: Any = numbers.get(verdict, 0)
    message = audit_pb2.FindRequest(tenant=tenant, model=model, site=site, limit=limit, verdict=wanted)
    return await _call([target], lambda channel: _unary(audit_pb2_grpc.AuditStub(channel), "Find", message))


def _unary(stub: Any, method: str, message: Any, wait_max_s: float = 0.0) -> Awaitable[Any]:
    return getattr(stub, method)(message, timeout=CALL_TIMEOUT_S + wait_max_s, metadata=shown())


async def _call(targets: Sequence[str], ask: Callable[[grpc.aio.Channel], Awaitable[Any]]) -> Any:
    """Raises BadRequestError or NotFoundError for what the server says of the question, else SetupError."""
    async with grpc.aio.insecure_channel(target_of(tuple(targets)), options=CHANNEL_OPTIONS) as channel:
        try:
            return await ask(channel)
        except grpc.aio.AioRpcError as error:
            words = error.details() or error.code().name
            if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
                field, _, problem = words.partition(": ")
                raise BadRequestError(field, problem) from error
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(words) from error
            if error.code() in REFUSED_CODES:
                words = f"{', '.join(targets)} refused the call ({error.code().name}): {words}"
                raise SetupError(f"{words}; TOKENFLEET_TOKEN or TOKENFLEET_TOKEN_FILE holds the token shown") from error
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                words += "; does it run? start a fleet with `tokenfleet up`, or give the address"
            raise SetupError(f"{', '.join(targets)} gave no answer ({error.code().name}): {words}") from error
