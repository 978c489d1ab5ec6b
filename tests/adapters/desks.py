"""Desks: a decision service on real gRPC in one line, and all that it would have told Kafka."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import grpc.aio
import msgspec
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from tests.core.fleets import Town
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.codec import decode, encode
from tokenfleet.adapters.credentials import Credentials
from tokenfleet.adapters.desk import Desk
from tokenfleet.adapters.grpc_server import STATUS_DETAILS_KEY, GrpcServer, Register
from tokenfleet.adapters.services import SERVICE_NAMES, registers
from tokenfleet.adapters.topics import Topic
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2

PARTITIONS = 4


class Outbox:
    """Keeps what is put, after a turn through the codec: what readers could not read fails the test here.

    A `full` one loses all, as a spool on a full disk does.
    """

    def __init__(self) -> None:
        self.put_in: list[tuple[str, msgspec.Struct]] = []
        self.full = False

    def put(self, topic: Topic[Any], site: str, message: Any, *, partition: int) -> bool:
        assert site == "b"
        assert 0 <= partition < PARTITIONS
        if self.full:
            return False
        self.put_in.append((topic.name, decode(topic, encode(topic, message))))
        return True

    def of(self, name: str) -> list[Any]:
        """The records for the topic `name`."""
        return [message for topic, message in self.put_in if topic == name]


class Office:
    """Site b with small engines, its desk and its outbox; `ready` may be set."""

    def __init__(self, **engines: Any) -> None:
        self.town = Town("b", **engines)
        self.town.now_s = monotonic_s()
        self.town.hears_telemetry()
        self.outbox = Outbox()
        self.ready = True
        self.desk = Desk(
            self.town.site, self.outbox, start=1, partitions=lambda _: PARTITIONS, ready=lambda: self.ready
        )

    @contextlib.asynccontextmanager
    async def serving(
        self, credentials: Credentials | None = None, *, further: tuple[Register, ...] = ()
    ) -> AsyncGenerator[tuple[GrpcServer, grpc.aio.Channel]]:
        """The real server, with `further` services, and a channel to it, with whoever releases what is held."""
        self.releasing = asyncio.create_task(self.desk.holding.run())
        await asyncio.sleep(0)
        try:
            async with (
                GrpcServer(
                    "127.0.0.1:0",
                    registers=(*registers(self.desk), *further),
                    names=SERVICE_NAMES,
                    reflect=False,
                    credentials=credentials,
                ) as server,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            ):
                yield server, channel
        finally:
            self.releasing.cancel()
            await asyncio.gather(self.releasing, return_exceptions=True)


def request(request_id: str = "r1", **facts: Any) -> decision_pb2.Request:
    """A chat request as a gateway sends it."""
    known: dict[str, Any] = {"model": "small-chat", "tenant": "acme", "origin": "b", "prompt_tokens": 1000}
    return decision_pb2.Request(id=request_id, **(known | facts))


def event(request_id: str = "r1", **facts: Any) -> outcomes_pb2.OutcomeEvent:
    """The end of a request as a gateway reports it."""
    known: dict[str, Any] = {
        "kind": outcomes_pb2.OUTCOME_KIND_FINISHED,
        "tenant": "acme",
        "request_class": "chat",
        "model": "small-chat",
        "origin": "b",
    }
    return outcomes_pb2.OutcomeEvent(request=request_id, **(known | facts))


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    """The rich details of a failed call by the name of their type."""
    status = status_pb2.Status()
    [packed] = [value for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS_KEY]
    status.ParseFromString(packed if isinstance(packed, bytes) else packed.encode())
    assert status.message == error.details()
    assert status.code == error.code().value[0]
    known = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found: dict[str, Message] = {}
    for packed_detail in status.details:
        [kind] = [kind for kind in known if packed_detail.TypeName() == kind.DESCRIPTOR.full_name]
        detail = kind()
        packed_detail.Unpack(detail)
        found[kind.DESCRIPTOR.name] = detail
    return found
