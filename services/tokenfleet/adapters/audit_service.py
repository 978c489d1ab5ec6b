"""Audit service: Find, Explain and Goodput over gRPC, from what PostgreSQL holds."""

import logging
import math
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, TypeVar, cast

import grpc.aio
import msgspec
from google.protobuf.message import Message
from msgspec import Struct

from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.grpc_server import Register
from tokenfleet.adapters.identity import caller
from tokenfleet.adapters.messages import tenant_from_wire, to_wire
from tokenfleet.adapters.postgres import PostgresAwayError
from tokenfleet.adapters.safe_text import WALL_MAX_S, from_json
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import BadRequestError, NotFoundError, SetupError
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.wire.v1 import audit_pb2, audit_pb2_grpc, decision_pb2, outcomes_pb2

SERVICE_NAME: Final = "tokenfleet.wire.v1.Audit"
FIND_LIMIT: Final = 100
FIND_LIMIT_MAX: Final = 1000
WINDOW_MAX_S: Final = 86_400.0

T = TypeVar("T")
Context = grpc.aio.ServicerContext[Any, Any]

log = logging.getLogger(__name__)


class AuditService(audit_pb2_grpc.AuditServicer):
    """Answers from the store; UNAVAILABLE while PostgreSQL is.

    Who may speak for some tenants alone names one of them to Find and Goodput, and is told by Explain what is theirs.
    """

    def __init__(self, store: AuditStore) -> None:
        self._store = store

    async def Find(self, request: audit_pb2.FindRequest, context: Context) -> audit_pb2.FindResponse:
        del context
        if request.limit > FIND_LIMIT_MAX:
            raise BadRequestError("limit", f"{request.limit} is more than {FIND_LIMIT_MAX}")
        verdict = decision_pb2.Verdict.Name(request.verdict).removeprefix("VERDICT_").lower() if request.verdict else ""
        since_s, until_s = _bounds(request)
        tenant = _tenant(request.tenant)
        try:
            bodies = await self._store.decisions_like(
                filters=(tenant, request.model, request.site, request.target, verdict),
                since_s=since_s,
                until_s=until_s,
                limit=request.limit or FIND_LIMIT,
            )
        except PostgresAwayError as error:
            raise _away() from error
        return audit_pb2.FindResponse(decisions=_messages(bodies, Decision, decision_pb2.Decision))

    async def Explain(self, request: audit_pb2.ExplainRequest, context: Context) -> audit_pb2.ExplainResponse:
        del context
        if not request.request_id:
            raise BadRequestError("request_id", "is empty")
        try:
            decisions, outcomes = await self._store.told_of(request.request_id)
        except PostgresAwayError as error:
            raise _away() from error
        found = audit_pb2.ExplainResponse(
            decisions=_theirs(_messages(decisions, Decision, decision_pb2.Decision)),
            outcomes=_theirs(_messages(outcomes, OutcomeEvent, outcomes_pb2.OutcomeEvent)),
        )
        if not found.decisions and not found.outcomes:
            raise NotFoundError(f"no decision and no outcome is known of request {request.request_id[:80]!r}")
        return found

    async def Goodput(self, request: audit_pb2.GoodputRequest, context: Context) -> audit_pb2.GoodputResponse:
        del context
        if not 0.0 < request.window_s <= WINDOW_MAX_S:
            raise BadRequestError("window_s", f"{request.window_s:g} is the width of no window")
        since_s, until_s = _bounds(request)
        tenant = _tenant(request.tenant)
        try:
            windows = await self._store.goodput_windows(
                width_s=request.window_s,
                request_class=request.request_class,
                tenant=tenant,
                since_s=since_s,
                until_s=until_s,
            )
        except PostgresAwayError as error:
            raise _away() from error
        return audit_pb2.GoodputResponse(windows=map(_window, windows))


def register(service: AuditService) -> Register:
    """Adds the service to a server."""
    generated: Any = audit_pb2_grpc  # without types
    return partial(generated.add_AuditServicer_to_server, service)


def _tenant(named: str) -> str:
    """The tenant whose rows are asked for; empty, for all, where the caller may speak for all."""
    return tenant_from_wire(named, caller()) if named or caller().tenants is not None else ""


def _theirs(messages: list[T]) -> list[T]:
    """What may be told to the caller; of the rest not even that it is there."""
    return [each for each in messages if caller().speaks_for(cast(Any, each).tenant)]


def _bounds(request: audit_pb2.FindRequest | audit_pb2.GoodputRequest) -> tuple[float | None, float | None]:
    since_s = _time("since_wall_s", request.since_wall_s) if request.HasField("since_wall_s") else None
    until_s = _time("until_wall_s", request.until_wall_s) if request.HasField("until_wall_s") else None
    if since_s is not None and until_s is not None and until_s <= since_s:
        raise BadRequestError("until_wall_s", "is not after since_wall_s")
    return since_s, until_s


def _time(field: str, value: float) -> float:
    if not (math.isfinite(value) and abs(value) <= WALL_MAX_S):
        raise BadRequestError(field, "is not a time in Unix seconds")
    return value


def _messages(bodies: Iterable[str], kind: type[Struct], wire: type[T]) -> list[T]:
    """Rows that another version wrote and this one can't read are left out, and the log says so."""
    messages: list[T] = []
    for body in bodies:
        try:
            value = from_json(body, kind)
        except msgspec.ValidationError as error:
            log.error("a row of audit can't be read as %s: %s", kind.__name__, error)
            continue
        messages.append(cast(T, to_wire(value, cast(Message, wire()))))
    return messages


def _window(row: dict[str, object]) -> audit_pb2.GoodputWindow:
    known = audit_pb2.GoodputWindow.DESCRIPTOR.fields_by_name
    fields: dict[str, Any] = {name: value for name, value in row.items() if name in known and value is not None}
    return audit_pb2.GoodputWindow(start_wall_s=cast(float, row["start_s"]), **fields)


def _away() -> SetupError:
    return SetupError("PostgreSQL does not answer; decisions are not affected, ask again later")
