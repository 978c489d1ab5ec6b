"""Mended aiokafka: a connection that is closed under a request is a Kafka error, whatever the event loop calls it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

from tokenfleet.adapters.aiokafka_mended import mend


async def send_on_a_closed_transport() -> None:
    """Raises what a client of the connection would see."""
    served: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: served.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connection = AIOKafkaConnection("127.0.0.1", port)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    connection._writer, connection._versions = writer, {3: (0, 5)}  # pyright: ignore  # as after its own handshake
    writer.transport.abort()
    await asyncio.sleep(0.05)
    try:
        connection.send(MetadataRequest(["topic"]))
    finally:
        server.close()
        for each in served:
            each.close()


def test_a_closed_transport_is_a_kafka_error_on_uvloop() -> None:
    mend()
    with pytest.raises(KafkaConnectionError, match="broken"):
        uvloop.run(send_on_a_closed_transport())


async def test_a_client_that_is_closed_while_it_connects_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    mend()
    closed, connects = list[str](), asyncio.Event()
    connection = SimpleNamespace(connected=lambda: True, close=lambda reason: closed.append(reason.name))

    async def slowly(*_: Any, **__: Any) -> Any:
        await connects.wait()
        return connection

    monkeypatch.setattr("aiokafka.client.create_conn", slowly)
    client: Any = AIOKafkaClient(bootstrap_servers="127.0.0.1:1")
    client.cluster.broker_metadata = lambda _: SimpleNamespace(host="127.0.0.1", port=1)
    connecting = asyncio.create_task(client._get_conn(1))
    await asyncio.sleep(0)
    await client.close()
    connects.set()
    assert await connecting is None
    assert closed == ["SHUTDOWN"]
