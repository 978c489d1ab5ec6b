"""EngineWatch: one instance as its agent sees it: scrapes, KV events, and the heartbeat made of both."""

import asyncio
import logging

import aiohttp
import zmq
import zmq.asyncio
from prometheus_client import Counter

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.engines.discovery import EngineSpec
from tokenfleet.adapters.engines.kv_follow import KvFollower
from tokenfleet.adapters.engines.kv_log import KvLog
from tokenfleet.adapters.engines.mapping import engine_mappings
from tokenfleet.adapters.engines.scrape import PageReader, Readings, ScrapeError, fetch_page
from tokenfleet.core.blocks import CANONICAL_TOKENS_MIN
from tokenfleet.core.kvstate import EngineBlocks
from tokenfleet.core.records import Heartbeat

SCRAPE_TIMEOUT_S = 2.0
FOLLOW_AGAIN_S = 1.0  # between two attempts at an endpoint that can't be used

SCRAPES = Counter("tokenfleet_agent_scrapes_total", "Metrics pages asked for, by what came", ["result"])

logger = logging.getLogger(__name__)


class EngineWatch:
    """One instance. `run` watches until cancelled; `ask` has a page scraped, `beat` tells what is known now.

    `log` outlives the watch: its numbers must go on when an instance is watched anew. `life` differs between starts of
    the agent (for boots that engines don't name). `boot` is empty until the first page. `idle` is set while no page is
    being asked for.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        secret: bytes,
        log: KvLog,
        life: str,
    ) -> None:
        self.spec = spec
        self.log = log
        self.readings: Readings | None = None
        self.blocks = EngineBlocks(secret=secret, model=spec.model, block_tokens=CANONICAL_TOKENS_MIN)
        self._session = session
        self._context = context
        self._secret = secret
        self._reader = PageReader(engine_mappings()[spec.engine], life=life)
        self._read_at_s = monotonic_s()  # when the last page was asked for; before the first, when the watch began
        self._read_wall_s = 0.0  # the same by the wall clock, a label
        self._failing = True
        self._refused = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._asked = asyncio.Event()
        self._problem = ""
        self._follow_anew = asyncio.Event()

    @property
    def boot(self) -> str:
        return self.readings.boot if self.readings else ""

    @property
    def block_size(self) -> int | None:
        """Tokens of an engine block, None until a page has told."""
        return self.readings.block_size if self.readings else None

    @property
    def answers(self) -> bool:
        return not self._failing

    async def run(self) -> None:
        self.log.tell_whole()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._scrape_forever())
            if self.spec.kv_endpoint:
                tasks.create_task(self._follow_forever())

    def use_block_tokens(self, block_tokens: int) -> None:
        """Make canonical blocks of another size; what the engine still has is read again."""
        if block_tokens == self.blocks.block_tokens:
            return
        self.blocks = EngineBlocks(secret=self._secret, model=self.spec.model, block_tokens=block_tokens)
        self.log.tell_whole()
        self._follow_anew.set()

    def ask(self) -> None:
        """Have a page scraped now, unless the last one is still being asked for."""
        if self.idle.is_set():
            self.idle.clear()
            self._asked.set()

    def beat(self, now_s: float) -> Heartbeat:
        """The heartbeat at `now_s`; after failed scrapes the last values with their age."""
        spec, readings = self.spec, self.readings or Readings(state="starting")
        age_s = max(0.0, now_s - self._read_at_s)
        return Heartbeat(
            instance=spec.id,
            boot=readings.boot,
            age_s=age_s,
            address=spec.address,
            model=spec.model,
            model_digest=spec.model_digest,
            engine=spec.engine,
            accelerator=spec.accelerator,
            context_max_tokens=spec.context_max_tokens,
            ranks=readings.ranks,
            running=readings.running,
            waiting=readings.waiting,
            kv_used_blocks=readings.kv_used_blocks,
            kv_total_blocks=readings.kv_total_blocks,
            block_size=readings.block_size,
            in_flight_tokens=readings.in_flight_tokens,
            in_flight_source=readings.in_flight_source,
            prompt_tokens_total=readings.prompt_tokens_total,
            generation_tokens_total=readings.generation_tokens_total,
            cached_tokens_total=readings.cached_tokens_total,
            ttft=readings.ttft,
            prefill=readings.prefill,
            queue=readings.queue,
            iterations_total=readings.iterations_total,
            preemptions_total=readings.preemptions_total,
            state=readings.state if spec.state == "ready" else spec.state,
            scrape_failed_for_s=age_s if self._failing else 0.0,
            refused=self._refused,
            scraped_wall_s=self._read_wall_s,
            digest=self.log.told,
        )

    async def _scrape_forever(self) -> None:
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._scrape()
            self.idle.set()

    async def _scrape(self) -> None:
        asked_at_s = monotonic_s()
        try:
            page = await fetch_page(self._session, self.spec.metrics_url, timeout_s=SCRAPE_TIMEOUT_S)
        except ScrapeError as error:
            SCRAPES.labels("refused" if error.refused else "no_answer").inc()
            self._failing, self._refused = True, error.refused
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("%s: %s", self.spec.id, error)
            return
        SCRAPES.labels("ok").inc()
        self._read_at_s, self._failing, self._refused, self._problem = asked_at_s, False, False, ""
        self._read_wall_s = wall_s() - (monotonic_s() - asked_at_s)
        self._take(self._reader.read(page))

    def _take(self, readings: Readings) -> None:
        before, self.readings = self.readings, readings
        self.blocks.blocks_max = readings.kv_total_blocks or 0
        if before is None:
            return
        if before.boot != readings.boot:
            logger.info("%s: another boot: %s after %s", self.spec.id, readings.boot, before.boot)
            self._drop_blocks()
            self._follow_anew.set()
        elif before.state != readings.state and "sleeping" in (before.state, readings.state):
            self._drop_blocks()  # sleep discards the cache, and the engine says so only in its next step

    def _drop_blocks(self) -> None:
        if self.spec.kv_endpoint:
            for rank in range(self.spec.ranks):
                self.blocks.lost(rank)

    async def _follow_forever(self) -> None:
        while True:
            self._follow_anew.clear()
            followers = [self._follower(rank) for rank in range(self.spec.ranks)]
            tasks = [asyncio.create_task(follower.run()) for follower in followers]
            anew = asyncio.create_task(self._follow_anew.wait())
            try:
                await asyncio.wait([*tasks, anew], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*tasks, anew):
                    task.cancel()
                ended = await asyncio.gather(*tasks, return_exceptions=True)
            for error in ended:
                if isinstance(error, zmq.ZMQError):
                    logger.warning("%s: KV events of %s: %s", self.spec.id, self.spec.kv_endpoint, error)
                    await asyncio.sleep(FOLLOW_AGAIN_S)
                elif isinstance(error, Exception):
                    raise error

    def _follower(self, rank: int) -> KvFollower:
        return KvFollower(
            self.blocks,
            self._context,
            name=self.spec.id,
            endpoint=self.spec.kv_endpoint,
            replay_endpoint=self.spec.kv_replay_endpoint,
            rank=rank,
            restarted=self._reader.restarted,
        )
