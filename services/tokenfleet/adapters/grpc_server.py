"""gRPC server: one way to serve any of the services, with health, reflection and errors as rich statuses.

A domain error becomes a status in the one table STATUS_OF, with `google.rpc.ErrorInfo` (and `RetryInfo` where
waiting helps); anything else is INTERNAL with an id that the log names, never a stack trace to the caller.
"""

import asyncio
import logging
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any, Final, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tokenfleet.adapters.credentials import Credentials
from tokenfleet.adapters.identity import Identified
from tokenfleet.core.errors import (
    BadRecordError,
    BadRequestError,
    ForeignTenantError,
    NotAllowedError,
    NotFoundError,
    NotKeptError,
    PolicyError,
    SetupError,
    TableNotReadyError,
    TokenFleetError,
    UnauthenticatedError,
    UnknownModelError,
    UnknownSiteError,
    UnknownTenantError,
)
from tokenfleet.wire.v1 import scheduler_pb2

log = logging.getLogger(__name__)

DOMAIN: Final = "tokenfleet"
STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"  # where every gRPC library looks for rich errors
RETRY_WHEN_NOT_READY_S: Final = 1.0
RECEIVED_MAX_BYTES: Final = 2 << 20  # 16,384 block keys are 128 KiB; a stream message may carry several
STATUS_OF: Final[dict[type[TokenFleetError], int]] = {
    BadRequestError: code_pb2.INVALID_ARGUMENT,
    UnknownModelError: code_pb2.NOT_FOUND,
    UnknownTenantError: code_pb2.NOT_FOUND,
    UnknownSiteError: code_pb2.NOT_FOUND,
    NotFoundError: code_pb2.NOT_FOUND,
    ForeignTenantError: code_pb2.PERMISSION_DENIED,
    UnauthenticatedError: code_pb2.UNAUTHENTICATED,
    NotAllowedError: code_pb2.PERMISSION_DENIED,
    TableNotReadyError: code_pb2.UNAVAILABLE,
    NotKeptError: code_pb2.UNAVAILABLE,
    PolicyError: code_pb2.FAILED_PRECONDITION,
    SetupError: code_pb2.UNAVAILABLE,
    BadRecordError: code_pb2.DATA_LOSS,
    TokenFleetError: code_pb2.INTERNAL,
}
OPTIONS: Final = (
    ("grpc.max_receive_message_length", RECEIVED_MAX_BYTES),
    ("grpc.so_reuseport", 0),  # a taken port must be an error, not half of the calls
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.max_connection_age_ms", 300_000),  # so that clients find restarted replicas again
    ("grpc.max_connection_age_grace_ms", 30_000),
)

GRPCS_OWN: Final = (grpc.aio.AbortError, grpc.aio.InternalError)  # an abort of ours; the caller has gone meanwhile

Register = Callable[[grpc.aio.Server], None]


class GrpcServer:
    """A server on `listen` (HOST:PORT) for the services that `registers` add; NOT_SERVING until `serving(True)`.

    `names` are the full names of the services, for health and reflection. `port` is the bound port after entering.
    Without `credentials` whoever reaches it may ask everything. Raises SetupError when the port can't be bound.
    """

    def __init__(
        self,
        listen: str,
        *,
        registers: Iterable[Register],
        names: tuple[str, ...],
        reflect: bool,
        credentials: Credentials | None = None,
    ) -> None:
        self.listen = listen
        self.port = 0
        self._registers = tuple(registers)
        self._names = names
        self._reflect = reflect
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> "GrpcServer":
        probe_port(self.listen)
        identified = () if self._credentials is None else (Identified(self._credentials),)
        server = grpc.aio.server(interceptors=(ErrorsAsStatuses(), *identified), options=OPTIONS)
        for register in self._registers:
            register(server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._reflect:
            reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            self.port = server.add_insecure_port(self.listen)
        except RuntimeError as error:
            raise SetupError(
                f"gRPC address {self.listen} can't be bound; set TOKENFLEET_LISTEN to a free one"
            ) from error
        await self.serving(False)
        await server.start()
        self._server = server
        if self._credentials is None:
            log.warning("TOKENFLEET_CREDENTIALS is not set: who reaches %s may ask all, for any tenant", self.listen)
        return self

    async def serving(self, ready: bool) -> None:
        """Sets the health of the server and of each of its services."""
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._names):
            await self._health.set(name, state)

    async def __aexit__(self, *_: object) -> None:
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(grace=2.0)


class ErrorsAsStatuses(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers into statuses, for all four kinds of call."""

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        read, write = partial(_message, handler.request_deserializer), handler.response_serializer
        # Messages are read in here and not by gRPC, which has a stack trace for whoever sends bytes that are none.
        if handler.unary_unary:
            one = _answering(handler.unary_unary, read, method)
            return grpc.unary_unary_rpc_method_handler(one, None, write)
        if handler.stream_unary:
            one = _answering(handler.stream_unary, partial(_messages, read), method)
            return grpc.stream_unary_rpc_method_handler(one, None, write)
        if handler.unary_stream:
            many = _streaming(handler.unary_stream, read, method)
            return grpc.unary_stream_rpc_method_handler(many, None, write)
        many = _streaming(handler.stream_stream, partial(_messages, read), method)
        return grpc.stream_stream_rpc_method_handler(many, None, write)


def status_of(error: Exception, *, method: str) -> status_pb2.Status:
    """The status that `error` becomes; an unforeseen one is logged under an id that the status names."""
    if not isinstance(error, TokenFleetError):
        mark = uuid.uuid4().hex[:12]
        log.error("%s failed (%s)", method, mark, exc_info=error)
        return status_pb2.Status(code=code_pb2.INTERNAL, message=f"internal error {mark}; the server's log has it")
    code = next(STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF)
    info = error_details_pb2.ErrorInfo(reason=reason_of(type(error)), domain=DOMAIN)
    details = [_packed(info)]
    if isinstance(error, BadRequestError):
        info.metadata["field"] = error.field
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.problem)
        details = [_packed(info), _packed(error_details_pb2.BadRequest(field_violations=[violation]))]
    if code == code_pb2.UNAVAILABLE:
        delay = duration_pb2.Duration(nanos=0, seconds=int(RETRY_WHEN_NOT_READY_S))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code, message=str(error), details=details)


def problem_of(error: Exception, *, method: str) -> scheduler_pb2.Problem:
    """The same as a value, for one request of a stream that goes on."""
    status = status_of(error, method=method)
    problem = scheduler_pb2.Problem(code=status.code, message=status.message)
    problem.reason = reason_of(type(error)) if isinstance(error, TokenFleetError) else "INTERNAL"
    if isinstance(error, BadRequestError):
        problem.field = error.field
    if status.code == code_pb2.UNAVAILABLE:
        problem.retry_after_s = RETRY_WHEN_NOT_READY_S
    return problem


def reason_of(kind: type[TokenFleetError]) -> str:
    """UPPER_SNAKE name of an error: UnknownModelError is UNKNOWN_MODEL."""
    name = kind.__name__.removesuffix("Error")
    return "".join(("_" if c.isupper() and i else "") + c.upper() for i, c in enumerate(name))


def probe_port(listen: str) -> None:
    """Raises SetupError when another program listens on `listen`."""
    host, _, port = listen.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not HOST:PORT"
        raise SetupError(
            f"gRPC address {listen} can't be bound ({reason}); set TOKENFLEET_LISTEN to a free one"
        ) from error


def _answering(
    handler: Callable[[Any, Any], Any], read: Callable[[Any], Any], method: str
) -> Callable[[Any, Any], Any]:
    async def answer(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            await _refuse_overdue(context)
            return await handler(read(raw), context)
        except GRPCS_OWN:
            raise
        except Exception as error:
            await _abort(context, status_of(error, method=method))

    return answer


def _streaming(
    handler: Callable[[Any, Any], Any], read: Callable[[Any], Any], method: str
) -> Callable[[Any, Any], Any]:
    async def answer(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            await _refuse_overdue(context)
            async with aclosing(handler(read(raw), context)) as messages:  # what it waits for ends with it
                async for message in messages:
                    await _write(context, message)
        except GRPCS_OWN:
            raise
        except Exception as error:
            await _abort(context, status_of(error, method=method))

    return answer


async def _write(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Returns when there is room for more. Who asked may leave with answers on the way: that is nobody's failure."""
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


async def _refuse_overdue(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Nobody waits for the answer any more: no work, and nothing placed for it."""
    left_s = cast(float | None, context.time_remaining())  # None without a deadline, whatever the stub says
    if left_s is not None and left_s <= 0:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the call was looked at")


def _message(parse: Callable[[bytes], Any], value: bytes) -> Any:
    """Raises BadRequestError for bytes that are no message of the call."""
    try:
        return parse(value)
    except DecodeError as error:
        raise BadRequestError("request", "the bytes are no message of this call") from error


async def _messages(read: Callable[[bytes], Any], values: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for value in values:
        yield read(value)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], status: status_pb2.Status) -> None:
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))


def _packed(detail: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(detail)
    return packed
