"""KV events of a simulated engine on ZMQ, on the wire as vLLM 0.32 sends them."""

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from tokenfleet.sim.engine import events as sim

REPLAY_BATCHES_MAX = 10_000  # vLLM's buffer_steps
REPLAY_BYTES_MAX = 4_000_000  # ours: two minutes of the shipped load; vLLM has no such bound, but a machine of its own
SEND_QUEUE_MAX = 100_000  # vLLM's hwm: messages kept for a slow subscriber, then dropped
BIND_ATTEMPTS = 100  # of 20 ms: a closed socket's port is free a moment later
REPLAY_END = (-1).to_bytes(8, "big", signed=True)


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Blocks of one chain became reusable; token_ids are theirs, extra_keys one entry a block."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[str] | None]
    group_idx: int = 0
    kv_cache_spec_kind: str = "full_attention"


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Blocks are gone from the medium."""

    block_hashes: list[int]
    medium: str = "GPU"
    group_idx: int = 0


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """The prefix cache is empty."""


WireEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a stored block is made of."""

    token_ids: list[int]
    salt: str


def wire_event(event: sim.Event, prompt_of: Callable[[str], Prompt], block_size: int) -> WireEvent | None:
    """The engine's event as its subscribers see it; None if they don't."""
    match event:
        case sim.BlocksStored():
            prompt = prompt_of(event.job_id)
            first, count = event.first_block, len(event.hashes)
            salted = first == 0 and prompt.salt  # the children inherit the salt along the chain
            return BlockStored(
                block_hashes=list(event.hashes),
                parent_block_hash=event.parent,
                token_ids=prompt.token_ids[first * block_size : (first + count) * block_size],
                block_size=block_size,
                extra_keys=[[prompt.salt] if salted and at == 0 else None for at in range(count)],
            )
        case sim.BlocksRemoved():
            return BlockRemoved(block_hashes=list(event.hashes))
        case sim.Cleared():
            return AllBlocksCleared()
        case _:
            return None


class KvPublisher:
    """Publishes batches with a sequence from 0 and replays the last ones on request: 10,000 or REPLAY_BYTES_MAX."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], topic: str) -> None:
        self._topic = topic.encode()
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque()
        self._sent_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._publisher = context.socket(zmq.PUB)
        self._publisher.setsockopt(zmq.SNDHWM, SEND_QUEUE_MAX)
        sockets = zmq.asyncio.Context.shadow(context.underlying)  # pyright: ignore[reportUnknownMemberType]  # open stub
        self._replay = sockets.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, SEND_QUEUE_MAX)  # the default of 1,000 would drop the rest of a replay
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str, *, port: int, replay_port: int) -> None:
        """Bind both sockets on `host`. Raises zmq.ZMQError if a port stays taken for 2 s."""
        await _bind(self._publisher, host, port)
        await _bind(self._replay, host, replay_port)
        self._serving = asyncio.create_task(self._serve_replays())

    def publish(self, events: list[WireEvent], wall_s: float) -> None:
        """One batch, of data-parallel rank 0."""
        sequence, payload = self._sequence.to_bytes(8, "big"), self._encoder.encode((wall_s, events, 0))
        self._sequence += 1
        self._keep(sequence, payload)
        self._publisher.send_multipart((self._topic, sequence, payload))

    def _keep(self, sequence: bytes, payload: bytes) -> None:
        self._sent.append((sequence, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > REPLAY_BATCHES_MAX or self._sent_bytes > REPLAY_BYTES_MAX:
            self._sent_bytes -= len(self._sent.popleft()[1])

    def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
        self._publisher.close(linger=0)
        self._replay.close(linger=0)

    async def _serve_replays(self) -> None:
        while True:
            client, *_, start = await self._replay.recv_multipart()
            for sequence, payload in list(self._sent):
                if sequence >= start:  # big-endian: bytes order as their numbers do
                    await self._reply(client, self._topic, sequence, payload)
            await self._reply(client, b"", REPLAY_END, b"")

    async def _reply(self, client: bytes, *frames: bytes) -> None:
        message = [client, b"", *frames]
        await self._replay.send_multipart(message)  # pyright: ignore[reportUnknownMemberType]  # open stub


async def _bind(socket: zmq.Socket[bytes] | zmq.asyncio.Socket, host: str, port: int) -> None:
    for attempt in range(BIND_ATTEMPTS):
        try:
            socket.bind(f"tcp://{host}:{port}")
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or attempt == BIND_ATTEMPTS - 1:
                raise
            await asyncio.sleep(0.02)
