"""gRPC server: every error of ours is a status, an unforeseen one tells nothing, and health says what is so."""

import asyncio
import logging
import socket
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.adapters.desks import Office, details_of, request
from tokenfleet.adapters.grpc_server import STATUS_OF, ErrorsAsStatuses, GrpcServer, reason_of, status_of
from tokenfleet.core import errors
from tokenfleet.core.errors import SetupError, TokenFleetError, UnknownModelError
from tokenfleet.wire.v1 import scheduler_pb2, scheduler_pb2_grpc


def family(kind: type[TokenFleetError]) -> list[type[TokenFleetError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in family(child))]


@pytest.mark.parametrize("kind", family(TokenFleetError), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_has_a_status_of_its_own_and_stands_in_the_tree(kind: type[TokenFleetError]) -> None:
    assert kind in STATUS_OF
    assert kind.__name__ in (errors.__doc__ or "")
    assert reason_of(kind).replace("_", "").isupper()


def test_a_status_is_small_however_large_the_policy() -> None:
    status = status_of(UnknownModelError("m" * 256, [f"{n}" + "x" * 250 for n in range(5000)]), method="m")
    assert "and 4980 more" in status.message
    assert status.ByteSize() < 4096  # gRPC takes 8 KiB of metadata


async def test_an_unforeseen_error_names_a_line_of_the_log_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    office = Office(small=1)

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("the secret inside")

    monkeypatch.setattr(office.desk, "decide", broken)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught, caplog.at_level(logging.ERROR):
            await stub.Schedule(scheduler_pb2.ScheduleRequest(request=request()))
        assert caught.value.code() == grpc.StatusCode.INTERNAL
        words = caught.value.details() or ""
        mark = words.removeprefix("internal error ").partition(";")[0]
        assert details_of(caught.value) == {}
        assert "secret" not in words
        [line] = [record for record in caplog.records if mark in record.getMessage()]
        assert line.exc_info is not None


async def test_health_is_not_serving_until_told() -> None:
    office = Office(small=1)
    async with office.serving() as (server, channel):
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def health(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        for service in ("", "tokenfleet.wire.v1.Scheduler", "tokenfleet.wire.v1.Outcomes"):
            assert await health(service) == health_pb2.HealthCheckResponse.NOT_SERVING
        await server.serving(True)
        for service in ("", "tokenfleet.wire.v1.Scheduler", "tokenfleet.wire.v1.Outcomes"):
            assert await health(service) == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health("nobody")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("listen", ["nonsense", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999", "[::1"])
async def test_an_address_that_is_none_says_so_in_one_line(listen: str) -> None:
    with pytest.raises(SetupError, match="TOKENFLEET_LISTEN") as caught:
        async with GrpcServer(listen, registers=(), names=(), reflect=False):
            raise AssertionError("nobody can listen there")
    assert "\n" not in str(caught.value)
    assert listen in str(caught.value)


async def test_a_taken_port_says_so_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"{listen} can't be bound"):
            async with GrpcServer(listen, registers=(), names=(), reflect=False):
                raise AssertionError("the port is taken")
    await asyncio.sleep(0)


def test_waiting_helps_only_where_it_is_said() -> None:
    assert {kind.__name__ for kind, code in STATUS_OF.items() if code == code_pb2.UNAVAILABLE} == {
        "TableNotReadyError",
        "NotKeptError",
        "SetupError",
    }


async def test_a_caller_who_is_gone_when_he_is_refused_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    aborts: list[grpc.StatusCode] = []

    class Gone:
        def time_remaining(self) -> float:
            return -1.0

        async def abort(self, code: grpc.StatusCode, *_: object) -> None:
            aborts.append(code)
            raise grpc.aio.InternalError("execute_batch")  # what gRPC says of a call that has ended

    async def found(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(lambda *_: b"", bytes, bytes)  # pyright: ignore[reportUnknownLambdaType]

    details: Any = SimpleNamespace(method="/x/Y")
    handler: Any = await ErrorsAsStatuses().intercept_service(found, details)
    with pytest.raises(grpc.aio.InternalError):
        await handler.unary_unary(b"", Gone())
    assert (aborts, caplog.records) == ([grpc.StatusCode.DEADLINE_EXCEEDED], [])
