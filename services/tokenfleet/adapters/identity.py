"""Identity: which calls a caller may make, by the token it shows; what answers a call asks `caller()` who that is.

A stream is its opener's to its end. Health and reflection are everybody's.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

import grpc
import grpc.aio

from tokenfleet.adapters.credentials import Credentials
from tokenfleet.core.errors import NotAllowedError, TokenFleetError
from tokenfleet.core.identity import ANYONE, Caller, Role

log = logging.getLogger(__name__)

AUTHORIZATION: Final = "authorization"
OPEN: Final = ("/grpc.health.", "/grpc.reflection.")
PACKAGE: Final = "/tokenfleet.wire.v1."
ROLES_OF: Final[dict[str, frozenset[Role]]] = {
    "Scheduler/Schedule": frozenset({"gateway"}),
    "Scheduler/ScheduleStream": frozenset({"gateway"}),
    "SLOMax/Admit": frozenset({"gateway"}),
    "FleetMind/Dispatch": frozenset({"gateway"}),
    "FleetMind/Sites": frozenset({"operator"}),  # instances, loads and caches of all tenants
    "TokenPilot/Route": frozenset({"gateway"}),
    "TokenPilot/RouteStream": frozenset({"gateway"}),
    "TokenPilot/WhatIf": frozenset({"operator"}),
    "Outcomes/Report": frozenset({"gateway"}),
    "Audit/Find": frozenset({"operator", "auditor"}),
    "Audit/Explain": frozenset({"operator", "auditor"}),
    "Audit/Goodput": frozenset({"operator", "auditor"}),
}
_CALLER: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def caller() -> Caller:
    """Who makes the call that is being answered; anyone where no credentials are asked for."""
    return _CALLER.get()


class Identified(grpc.aio.ServerInterceptor):
    """Lets only those through who may, as `credentials` and ROLES_OF say; a call in neither is nobody's."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(OPEN):
            return handler
        try:
            _CALLER.set(self._let_in(method, handler_call_details))  # of this call alone: each has a task of its own
        except TokenFleetError as error:
            return _refusing(handler, error)
        return handler

    def _let_in(self, method: str, details: grpc.HandlerCallDetails) -> Caller:
        shown = next((str(value) for key, value in details.invocation_metadata or () if key == AUTHORIZATION), "")
        known = self._credentials.caller(shown)
        allowed = ROLES_OF.get(method.removeprefix(PACKAGE), frozenset())
        if not known.roles & allowed:
            raise NotAllowedError(
                f"{known.name} may not call {method.removeprefix(PACKAGE)}, that takes a role of: "
                + (", ".join(sorted(allowed)) or "nobody's")
            )
        return known


def _refusing(handler: Any, error: TokenFleetError) -> "grpc.RpcMethodHandler[Any, Any]":
    """A handler of the same kind that reads nothing and raises `error`."""

    async def refuse(_request: Any, _context: Any) -> Any:
        raise error

    async def refuse_stream(_request: Any, _context: Any) -> AsyncIterator[Any]:
        raise error
        yield  # makes it a stream

    if handler.unary_unary:
        return grpc.unary_unary_rpc_method_handler(refuse, bytes, handler.response_serializer)
    if handler.stream_unary:
        return grpc.stream_unary_rpc_method_handler(refuse, bytes, handler.response_serializer)
    if handler.unary_stream:
        return grpc.unary_stream_rpc_method_handler(refuse_stream, bytes, handler.response_serializer)
    return grpc.stream_stream_rpc_method_handler(refuse_stream, bytes, handler.response_serializer)
