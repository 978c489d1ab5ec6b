"""Mended aiokafka: what aiokafka 0.14 does that must not reach us, changed where it happens, before any client is."""

from functools import partial
from typing import Any

import aiokafka.client
from aiokafka.client import AIOKafkaClient
from aiokafka.conn import AIOKafkaConnection, CloseReason
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.metadata import MetadataRequest

_send = AIOKafkaConnection.send
_close = AIOKafkaClient.close
_get_conn = AIOKafkaClient._get_conn


def mend() -> None:
    """Change it; again changes nothing.

    Only `topics apply` creates topics: aiokafka lets brokers create what it asks for, in their own shape; when the
    embedded broker has been restarted, several clients at once then make one topic twice.
    """
    aiokafka.client.MetadataRequest = partial(MetadataRequest, allow_auto_topic_creation=False)
    AIOKafkaConnection.send = send_or_say_broken
    AIOKafkaClient.close = close_for_good
    AIOKafkaClient._get_conn = connection_unless_closed


def send_or_say_broken(self: AIOKafkaConnection, request: Any, expect_response: bool = True) -> Any:
    """A transport that was closed a moment ago is an OSError on asyncio and a RuntimeError on uvloop.

    aiokafka expects the first only; the second would end its sender, and with it the producer, for good.
    """
    try:
        return _send(self, request, expect_response)
    except RuntimeError as error:
        self.close(reason=CloseReason.CONNECTION_BROKEN)
        raise KafkaConnectionError(f"connection at {self.host}:{self.port} broken: {error}") from error


async def close_for_good(self: Any) -> None:
    """Says first that no connection is wanted any more."""
    self.closed_for_good = True
    await _close(self)


async def connection_unless_closed(self: Any, *args: Any, **how: Any) -> AIOKafkaConnection | None:
    """A client that is closed while it connects would keep the connection open, and nobody would know of it."""
    connection = await _get_conn(self, *args, **how)
    if connection is not None and getattr(self, "closed_for_good", False):
        connection.close(reason=CloseReason.SHUTDOWN)
        return None
    return connection
