"""KvFollower: keeps one engine rank's blocks current from its KV events on ZMQ.

Late join or restart: replay from 0; what is known then is complete or a true lower bound. A gap: one replay; if it
can't be closed, what was known is dropped (removals may be lost) and the stream goes on: engines have no snapshot.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import zmq
import zmq.asyncio
from prometheus_client import Counter

from tokenfleet.adapters.engines.kv_events import decode_batch
from tokenfleet.adapters.engines.kv_sequence import KvSequence
from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.kvevents import KvBatch
from tokenfleet.core.kvstate import EngineBlocks

LIVE_WAITING_MAX = 100_000  # the engine's own hwm: live batches kept while a replay is read
REPLAY_BATCHES_MAX = 100_000  # ten times what vLLM keeps; bounds a replay that never ends
REPLAY_SILENT_MAX_S = 2.0  # vLLM answers between two publishes of one thread, at least every 0.1 s
SILENT_CHECK_S = 5.0  # after so long without a batch the engine is asked whether one was missed
DRAIN_MAX = 64  # batches taken before other tasks of the loop get a turn
BIND = "@"  # CZMQ's sign for "bind to this"
REPLAY_END = b"\xff" * 8

GAPS = Counter("tokenfleet_agent_kv_gaps_total", "Gaps in engines' KV events")
LOST = Counter("tokenfleet_agent_kv_lost_total", "Times a rank's known blocks were dropped because KV events were lost")

logger = logging.getLogger(__name__)


class KvFollower:
    """One rank of one engine. `run` follows until cancelled.

    `endpoint` is the engine's PUB address; with a leading `@` it is ours to bind, for engines that dial.
    `replay_endpoint` may be empty. `restarted` is called when the sequence went back. `gaps` and `lost` count since its
    start.
    """

    def __init__(
        self,
        blocks: EngineBlocks,
        context: zmq.asyncio.Context,
        *,
        name: str,
        endpoint: str,
        replay_endpoint: str = "",
        rank: int = 0,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self.gaps = 0
        self.lost = 0
        self._blocks = blocks
        self._context = context
        self._name = f"{name}/{rank}"
        self._endpoint = _of_rank(endpoint, rank)
        self._replay_endpoint = _of_rank(replay_endpoint, rank)
        self._rank = rank
        self._restarted = restarted
        self._sequence = KvSequence()

    async def run(self) -> None:
        socket = self._context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, LIVE_WAITING_MAX)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            _attach(socket, self._endpoint)
            await self._start_over()
            while True:
                if not await socket.poll(int(SILENT_CHECK_S * 1000)):
                    await self._check()
                await self._drain(socket)
        finally:
            socket.close(linger=0)

    async def _drain(self, socket: zmq.asyncio.Socket) -> None:
        for _ in range(DRAIN_MAX):
            try:
                frames: list[bytes] = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) >= 2 and len(frames[-2]) == 8:
                await self._hear(int.from_bytes(frames[-2], "big"), frames[-1])
        await asyncio.sleep(0)

    async def _hear(self, number: int, payload: bytes) -> None:
        verdict = self._sequence.judge(number, payload)
        if verdict == "back":
            logger.info("%s: KV sequence went back to %d: another life of the engine", self._name, number)
            self._restarted()
            self._sequence.restart(None)
        if verdict in ("gap", "back"):
            await self._close_gap(number)
            verdict = self._sequence.judge(number, payload)
        if verdict == "again":
            return
        if verdict != "next":
            self._lose(number, "the engine's replay doesn't reach back far enough")
        self._take(number, payload, replayed=False)

    async def _close_gap(self, number: int) -> None:
        self.gaps += 1
        GAPS.inc()
        if self._sequence.expected is not None:
            await self._catch_up(self._sequence.expected)
        elif number == 0:
            self._begin()
        else:
            await self._start_over()

    async def _check(self) -> None:
        """Ask for batches that were missed without a later one to show it: dropped ones, or those before we were on."""
        if self._sequence.expected is None:
            await self._start_over()
        else:
            await self._catch_up(self._sequence.expected)

    async def _start_over(self) -> None:
        """Read all that the engine still has, from 0."""
        self._begin()
        if await self._catch_up(0):
            if self._sequence.expected == 0:
                self._blocks.heard_from_start(self._rank)  # it never said anything
        else:
            self._sequence.restart(None)

    def _begin(self) -> None:
        self._blocks.lost(self._rank)
        self._sequence.restart(0)

    async def _catch_up(self, start: int) -> bool:
        """Apply what the engine has from `start` on; False if it did not answer to the end."""
        if not self._replay_endpoint:
            return False
        try:
            async with aclosing(self._replay(start)) as batches:
                async for number, payload in batches:
                    verdict = self._sequence.judge(number, payload)
                    if verdict == "gap":
                        self._lose(number, f"the engine's replay begins at {number}")
                    if verdict in ("gap", "next"):
                        self._take(number, payload, replayed=True)
        except TimeoutError:
            logger.info("%s: no answer from %s within %s s", self._name, self._replay_endpoint, REPLAY_SILENT_MAX_S)
            return False
        return True

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        # a socket for each replay, so that the rest of one given up never mixes with the next
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.RCVHWM, REPLAY_BATCHES_MAX)
            socket.connect(self._replay_endpoint)
            request = [b"", start.to_bytes(8, "big")]
            await socket.send_multipart(request)  # pyright: ignore[reportUnknownMemberType]  # open stub
            for nth in range(REPLAY_BATCHES_MAX):
                if nth % DRAIN_MAX == 0:
                    await asyncio.sleep(0)
                async with asyncio.timeout(REPLAY_SILENT_MAX_S):
                    frames: list[bytes] = await socket.recv_multipart()
                if len(frames) < 3 or frames[-2] == REPLAY_END:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]
        finally:
            socket.close(linger=0)

    def _take(self, number: int, payload: bytes, *, replayed: bool) -> None:
        if number == 0:
            self._blocks.heard_from_start(self._rank)
        self._sequence.took(number, payload, replayed=replayed)
        try:
            batch = decode_batch(payload)
        except BadRecordError as error:
            self._lose(self._sequence.expected, str(error))
            return
        self._blocks.apply(KvBatch(rank=self._rank, events=batch.events))

    def _lose(self, expected: int | None, why: str) -> None:
        self.lost += 1
        LOST.inc()
        self._blocks.lost(self._rank)
        self._sequence.expected = expected
        logger.warning("%s: KV events lost, known blocks dropped: %s", self._name, why)


def _attach(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Connect to the engine, or bind for one that dials its subscribers."""
    if endpoint.startswith(BIND):
        socket.bind(endpoint.removeprefix(BIND))
    else:
        socket.connect(endpoint)


def _of_rank(endpoint: str, rank: int) -> str:
    """Rank r of an engine publishes on the port r above that of rank 0."""
    if not rank or "tcp://" not in endpoint:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
