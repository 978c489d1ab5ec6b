"""One watched instance: what its heartbeat says while pages come, fail, sleep and come back."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
import zmq.asyncio
from aiohttp import web

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.engines.discovery import parse_discovery
from tokenfleet.adapters.engines.kv_log import KvLog
from tokenfleet.adapters.engines.watch import EngineWatch
from tokenfleet.core.kvevents import BlockStored, KvBatch
from tokenfleet.core.records import Heartbeat

PAGE = 'process_start_time_seconds 1\nvllm:num_requests_running 2\nvllm:engine_sleep_state{sleep_state="awake"} 1\n'


class Engine:
    """A metrics page that tests write."""

    def __init__(self) -> None:
        self.page: str | None = PAGE
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text=self.page) if self.page is not None else web.Response(status=500)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.start()
    yield engine
    await engine.stop()


@pytest.fixture
async def watch(engine: Engine) -> AsyncIterator[EngineWatch]:
    toml = f'[[engine]]\nid="i"\nsite="b"\naddress="127.0.0.1:{engine.port}"\nmodel="m"\nkv_endpoint="inproc://none"\n'
    (spec,) = parse_discovery(toml, source="test")
    context = zmq.asyncio.Context()
    async with aiohttp.ClientSession() as session:
        watch = EngineWatch(
            spec,
            session=session,
            context=context,
            secret=b"s",
            log=KvLog("i"),
            life="test",
        )
        tasks = {asyncio.create_task(watch.run()), asyncio.create_task(asking(watch))}
        yield watch
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    context.destroy(linger=0)


async def asking(watch: EngineWatch) -> None:
    """What a site's feed does once a period."""
    while True:
        watch.ask()
        await asyncio.sleep(0.02)


async def heard(watch: EngineWatch, **wanted: object) -> Heartbeat:
    """Wait for a heartbeat that says what is wanted."""
    async with asyncio.timeout(10):
        while True:
            beat = watch.beat(monotonic_s())
            if all(getattr(beat, field) == value for field, value in wanted.items()):
                return beat
            await asyncio.sleep(0.01)


async def test_before_the_first_page_all_is_unknown(watch: EngineWatch) -> None:
    beat = watch.beat(monotonic_s())
    assert (beat.boot, beat.state, beat.running) == ("", "starting", None)
    assert beat.scrape_failed_for_s == beat.age_s


async def test_a_page_is_as_old_as_its_question(watch: EngineWatch) -> None:
    await heard(watch, running=2.0, boot="start-1.0", state="ready")
    now_s = monotonic_s()
    later = watch.beat(now_s + 5.0)
    assert later.scrape_failed_for_s == 0.0
    assert 5.0 <= later.age_s < 10.0


async def test_failures_keep_the_last_values_with_their_age(watch: EngineWatch, engine: Engine) -> None:
    await heard(watch, running=2.0)
    engine.page = None
    async with asyncio.timeout(10):
        while not (beat := watch.beat(monotonic_s())).scrape_failed_for_s > 0.1:
            await asyncio.sleep(0.01)
    assert (beat.running, beat.boot, beat.refused, beat.age_s) == (2.0, "start-1.0", False, beat.scrape_failed_for_s)
    await engine.stop()
    await heard(watch, refused=True)
    engine.page = PAGE.replace("running 2", "running 3")
    await engine.start()
    await heard(watch, running=3.0, refused=False, scrape_failed_for_s=0.0)


async def test_sleep_and_another_boot_drop_the_blocks(watch: EngineWatch, engine: Engine) -> None:
    await heard(watch, running=2.0)
    for page, state, boot in (
        (PAGE.replace('awake"} 1', 'awake"} 0'), "sleeping", "start-1.0"),
        (PAGE, "ready", "start-1.0"),
        (PAGE.replace("seconds 1", "seconds 7"), "ready", "start-7.0"),
    ):
        stored = BlockStored(hashes=(1,), parent=None, tokens=bytes(4 * 256), block_size=256)
        watch.blocks.apply(KvBatch(rank=0, events=(stored,)))
        assert watch.blocks.keys()
        engine.page = page
        await heard(watch, state=state, boot=boot)
        assert watch.blocks.keys() == b""


async def test_another_size_of_canonical_blocks_begins_anew(watch: EngineWatch) -> None:
    before = watch.blocks
    watch.use_block_tokens(256)
    assert watch.blocks is before
    watch.use_block_tokens(288)
    assert (watch.blocks is before, watch.blocks.block_tokens) == (False, 288)
