"""Following KV events over real ZMQ sockets: late joins, gaps, restarts; and what a number says of its stream."""

import asyncio
import base64
import json
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from tests.ports import free_port
from tokenfleet.adapters.engines import kv_follow
from tokenfleet.adapters.engines.kv_follow import KvFollower
from tokenfleet.adapters.engines.kv_sequence import RECENT_KEPT, KvSequence
from tokenfleet.core.blocks import block_keys, chain_seed, unpacked
from tokenfleet.core.kvstate import EngineBlocks

FRAMES = [
    [base64.b64decode(frame) for frame in json.loads(line)]
    for line in (Path(__file__).parent.parent / "fixtures" / "vllm-0.32.0.kvevents.jsonl").read_text().splitlines()
]


class Engine:
    """A KV publisher as vLLM has it: PUB with a sequence, ROUTER that replays what it kept."""

    def __init__(self, context: zmq.asyncio.Context, *, kept: int = 100, first: int = 0) -> None:
        self.endpoint, self.replay_endpoint = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        self.replays: list[int] = []
        self._context = context
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=kept)
        self._next = first
        self._open()

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self._serving = asyncio.create_task(self._serve())

    async def publish(self, payload: bytes, *, dropped: bool = False) -> None:
        number = self._next.to_bytes(8, "big")
        self._next = (self._next + 1) % 2**64
        self._kept.append((number, payload))
        if not dropped:
            await self._pub.send_multipart([b"topic", number, payload])

    async def stored(self, name: int, *, dropped: bool = False) -> None:
        event = {"type": "BlockStored", "block_hashes": [name], "token_ids": [name, name], "block_size": 2}
        await self.publish(msgpack.packb([float(self._next), [event], 0]), dropped=dropped)

    async def restart(self) -> None:
        """Another life on the same ports, numbered from 0, with nothing kept."""
        self.close()
        await asyncio.sleep(0.05)
        self._next = 0
        self._kept.clear()
        self._open()
        await asyncio.sleep(0.3)  # the subscriber's reconnect

    def close(self) -> None:
        self._serving.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)

    async def _serve(self) -> None:
        while True:
            client, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            for number, payload in list(self._kept):
                if number >= start:
                    await self._router.send_multipart([client, b"", b"topic", number, payload])
            await self._router.send_multipart([client, b"", b"", b"\xff" * 8, b""])


def key_of(name: int) -> int:
    tokens = np.asarray([name, name], dtype=np.uint32)
    return int(unpacked(block_keys(tokens, seed=chain_seed(b"s", model="m"), block_tokens=2))[0])


class Followed:
    """A follower at work and what it made of the events."""

    def __init__(self, context: zmq.asyncio.Context, engine: Engine, *, replay: bool = True, size: int = 2) -> None:
        self.restarts = 0
        self.blocks = EngineBlocks(secret=b"s", model="m", block_tokens=size)
        self.follower = KvFollower(
            self.blocks,
            context,
            name="i",
            endpoint=engine.endpoint,
            replay_endpoint=engine.replay_endpoint if replay else "",
            restarted=self._restarted,
        )
        self.task = asyncio.create_task(self.follower.run())

    def _restarted(self) -> None:
        self.restarts += 1

    async def knows(self, *names: int, state: str) -> None:
        """Wait until exactly the blocks of these names are held, in this state."""
        expected = {key_of(name) for name in names}
        await until(lambda: set(unpacked(self.blocks.keys()).tolist()) == expected and self.blocks.state == state)


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not fact():
            await asyncio.sleep(0.01)


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.sleep(0)
    context.destroy(linger=0)


async def test_a_late_join_is_complete_when_the_engine_kept_all(context: zmq.asyncio.Context) -> None:
    engine = Engine(context)
    for name in (1, 2, 3):
        await engine.stored(name)
    followed = Followed(context, engine)
    await followed.knows(1, 2, 3, state="exact")
    await engine.stored(4)
    await followed.knows(1, 2, 3, 4, state="exact")
    assert (followed.follower.lost, engine.replays) == (0, [0])


async def test_a_late_join_is_a_lower_bound_when_the_engine_kept_less(context: zmq.asyncio.Context) -> None:
    engine = Engine(context, kept=2)
    for name in (1, 2, 3):
        await engine.stored(name)
    await Followed(context, engine).knows(2, 3, state="approx")


async def test_the_recorded_stream_of_a_real_vllm_that_joined_late(context: zmq.asyncio.Context) -> None:
    engine = Engine(context, first=1)
    followed = Followed(context, engine, size=32)
    await until(lambda: engine.replays == [0])
    await asyncio.sleep(0.2)
    for _, _, payload in FRAMES:
        await engine.publish(payload)
    await until(lambda: followed.blocks.digest().blocks == 3 * 15)
    assert followed.blocks.state == "approx"  # number 0 was never heard


async def test_a_gap_is_closed_by_one_replay(context: zmq.asyncio.Context) -> None:
    engine = Engine(context)
    followed = Followed(context, engine)
    await engine.stored(1)
    await followed.knows(1, state="exact")
    await engine.stored(2, dropped=True)
    await engine.stored(3)
    await followed.knows(1, 2, 3, state="exact")
    assert (followed.follower.gaps, followed.follower.lost) == (1, 0)
    assert engine.replays[1:] == [1]


async def test_a_gap_that_can_not_be_closed_drops_what_was_known_and_goes_on(context: zmq.asyncio.Context) -> None:
    engine = Engine(context, kept=1)
    followed = Followed(context, engine)
    await engine.stored(1)
    await followed.knows(1, state="exact")
    await engine.stored(2, dropped=True)
    await engine.stored(3)
    await followed.knows(3, state="approx")
    await engine.stored(4)
    await followed.knows(3, 4, state="approx")
    assert (followed.follower.gaps, followed.follower.lost) == (1, 1)
    change = followed.blocks.take()
    assert change is not None
    assert change.cleared


async def test_without_replay_the_stream_is_followed_from_where_it_is(context: zmq.asyncio.Context) -> None:
    engine = Engine(context)
    await engine.stored(1)
    followed = Followed(context, engine, replay=False)
    await asyncio.sleep(0.3)  # the subscription; nothing tells when it is there
    await engine.stored(2)
    await followed.knows(2, state="approx")


async def test_a_sequence_that_goes_back_is_another_life(context: zmq.asyncio.Context) -> None:
    engine = Engine(context)
    followed = Followed(context, engine)
    for name in (1, 2):
        await engine.stored(name)
    await followed.knows(1, 2, state="exact")
    await engine.restart()
    await engine.stored(7)
    await followed.knows(7, state="exact")
    assert followed.restarts == 1


async def test_a_lost_batch_with_none_after_it_is_asked_for(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_follow, "SILENT_CHECK_S", 0.1)
    engine = Engine(context)
    followed = Followed(context, engine)
    await engine.stored(1, dropped=True)
    await followed.knows(1, state="exact")


async def test_an_engine_that_is_not_up_yet_is_waited_for(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SILENT_CHECK_S", "REPLAY_SILENT_MAX_S"):
        monkeypatch.setattr(kv_follow, name, 0.3)
    engine = Engine(context)
    engine.close()
    followed = Followed(context, engine)
    await asyncio.sleep(0.1)
    await engine.restart()
    await engine.stored(1)
    await followed.knows(1, state="exact")
    assert followed.restarts == 0


async def test_an_engine_may_dial(context: zmq.asyncio.Context) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    blocks = EngineBlocks(secret=b"s", model="m", block_tokens=2)
    follower = asyncio.create_task(KvFollower(blocks, context, name="i", endpoint=f"@{endpoint}").run())
    pub = context.socket(zmq.PUB)
    pub.connect(endpoint)
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 1], "block_size": 2}
    for number in range(100):  # the first ones are lost until the subscription is there
        await pub.send_multipart([b"", number.to_bytes(8, "big"), msgpack.packb([0.0, [event], 0])])
        await asyncio.sleep(0.02)
        if blocks.keys():
            break
    pub.close(linger=0)
    assert not follower.done()
    assert (set(unpacked(blocks.keys()).tolist()), blocks.state) == ({key_of(1)}, "approx")


async def test_a_batch_that_can_not_be_read_drops_what_was_known(context: zmq.asyncio.Context) -> None:
    engine = Engine(context)
    followed = Followed(context, engine)
    await engine.stored(1)
    await followed.knows(1, state="exact")
    await engine.publish(b"\xc1")
    await engine.stored(2)
    await followed.knows(2, state="approx")


def test_numbers() -> None:
    sequence = KvSequence()
    assert sequence.judge(5, b"a") == "gap"
    sequence.restart(5)
    assert sequence.judge(5, b"a") == "next"
    sequence.took(5, b"a", replayed=False)
    assert [sequence.judge(number, b"a") for number in (5, 6, 7, 4)] == ["again", "next", "gap", "back"]
    assert sequence.judge(5, b"b") == "back"  # the same number with other content


@pytest.mark.parametrize("edge", [2**63, 2**64])
def test_numbers_go_on_over_the_edge(edge: int) -> None:
    sequence = KvSequence()
    sequence.restart(edge - 1)
    sequence.took(edge - 1, b"a", replayed=False)
    assert sequence.judge(edge % 2**64, b"b") == "next"
    assert sequence.judge((edge + 3) % 2**64, b"b") == "gap"
    assert sequence.judge(edge - 1, b"a") == "again"


def test_replayed_batches_are_remembered_until_a_live_one_passes_them() -> None:
    sequence = KvSequence()
    sequence.restart(0)
    for number in range(2 * RECENT_KEPT):
        sequence.took(number, b"%d" % number, replayed=True)
    assert sequence.judge(0, b"0") == "again"
    sequence.took(2 * RECENT_KEPT, b"live", replayed=False)
    assert sequence.judge(2 * RECENT_KEPT, b"live") == "again"
    assert sequence.judge(0, b"0") == "back"
