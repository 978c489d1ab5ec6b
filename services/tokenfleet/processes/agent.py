"""Agent: watches the engines of a discovery file and tells their sites what they do and what they cache.

Serves several sites at once. Tokens stay here: only keyed block keys leave the node.
"""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path
from random import SystemRandom
from typing import Final

import aiohttp
import uvloop
import zmq
import zmq.asyncio
from prometheus_client import Gauge

from tokenfleet.adapters.engines.discovery import ENGINES_MAX, DiscoveryFile, EngineSpec
from tokenfleet.adapters.engines.kv_log import KvLog
from tokenfleet.adapters.engines.scrape import unknown_readings
from tokenfleet.adapters.engines.site_feed import SiteFeed
from tokenfleet.adapters.engines.watch import EngineWatch
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.running import run_process, watched
from tokenfleet.adapters.settings import AgentSettings, secret_of
from tokenfleet.adapters.status import Status
from tokenfleet.core.blocks import canonical_block_tokens

log = logging.getLogger(__name__)

DISCOVERY_PERIOD_S: Final = 1.0
ENGINE_CONNECTIONS_MAX: Final = 100
SOCKETS_MAX: Final = 4 * ENGINES_MAX  # an engine's rank has one, and another during a replay

INSTANCES = Gauge("tokenfleet_agent_instances", "Instances watched", ["state"])
UNKNOWN = Gauge("tokenfleet_agent_unknown_readings", "Answering instances whose page lacks what is named", ["reading"])


async def run(settings: AgentSettings) -> None:
    """Watch and tell until SIGTERM."""
    discovery = DiscoveryFile(Path(settings.engines))
    status = Status("agent", host=settings.status_host, port=settings.status_port)
    connector = aiohttp.TCPConnector(limit=ENGINE_CONNECTIONS_MAX)
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS_MAX)
    try:
        async with (
            status,
            Kafka(settings.kafka, client_id=settings.agent) as kafka,
            aiohttp.ClientSession(connector=connector, auto_decompress=True) as session,
            asyncio.TaskGroup() as tasks,
        ):
            agent = Agent(settings, kafka=kafka, session=session, context=context, tasks=tasks, status=status)
            status.parts["kafka"] = lambda: (kafka.connected, settings.kafka)
            status.parts["discovery"] = lambda: (not discovery.problem, discovery.problem or settings.engines)
            status.parts["engines"] = agent.engines_state
            watched(tasks, agent.follow(discovery), name="discovery")
    finally:
        context.destroy(linger=0)


class Agent:
    """The watches and feeds of this process, kept in step with a discovery file."""

    def __init__(
        self,
        settings: AgentSettings,
        *,
        kafka: Kafka,
        session: aiohttp.ClientSession,
        context: zmq.asyncio.Context,
        tasks: asyncio.TaskGroup,
        status: Status,
    ) -> None:
        self._settings = settings
        self._secret = site_secret(settings)
        self._kafka = kafka
        self._session = session
        self._context = context
        self._tasks = tasks
        self._status = status
        self._rng = SystemRandom()
        self._life = f"{settings.agent}-{self._rng.getrandbits(48):012x}"
        self._watches: dict[str, tuple[EngineWatch, asyncio.Task[None]]] = {}
        self._logs: dict[tuple[str, str], KvLog] = {}  # by site and instance, for as long as this process lives
        self._feeds: dict[str, SiteFeed] = {}

    async def follow(self, discovery: DiscoveryFile) -> None:
        while True:
            if discovery.refresh():
                log.info("discovery: %d engines", len(discovery.engines))
                await self._watch(discovery.engines)
            self._agree_on_block_tokens()
            self._count()
            await asyncio.sleep(DISCOVERY_PERIOD_S)

    def watches(self, site: str) -> list[EngineWatch]:
        """The watches of one site, in the file's order."""
        return [watch for watch, _ in self._watches.values() if watch.spec.site == site]

    def engines_state(self) -> tuple[bool, str]:
        answering = sum(watch.answers for watch, _ in self._watches.values())
        return True, f"{answering} of {len(self._watches)} answer"

    async def _watch(self, specs: Iterable[EngineSpec]) -> None:
        wanted = {spec.id: spec for spec in specs}
        for name, (watch, task) in list(self._watches.items()):
            if name not in wanted or not _watched_alike(watch.spec, wanted[name]):
                task.cancel()
                await asyncio.wait({task})
                del self._watches[name]
        for name, spec in wanted.items():
            if name in self._watches:
                self._watches[name][0].spec = spec
            else:
                self._watches[name] = self._begin_watch(spec)
            if spec.site not in self._feeds:
                self._begin_feed(spec.site)
        self._watches = {name: self._watches[name] for name in wanted}

    def _begin_watch(self, spec: EngineSpec) -> tuple[EngineWatch, asyncio.Task[None]]:
        kv_log = self._logs.setdefault((spec.site, spec.id), KvLog(spec.id))
        watch = EngineWatch(
            spec,
            session=self._session,
            context=self._context,
            secret=self._secret,
            log=kv_log,
            life=self._life,
        )
        return watch, watched(self._tasks, watch.run(), name=f"watch {spec.id}")

    def _begin_feed(self, site: str) -> None:
        feed = SiteFeed(
            self._kafka,
            agent=self._settings.agent,
            site=site,
            watches=lambda: self.watches(site),
            period_s=self._settings.scrape_period_s,
            kv_snapshot_period_s=self._settings.kv_snapshot_period_s,
            rng=self._rng,
        )
        self._feeds[site] = feed
        self._status.parts[f"feed {site}"] = feed.state
        watched(self._tasks, feed.run(), name=f"feed {site}")

    def _agree_on_block_tokens(self) -> None:
        """All instances of a pool make canonical blocks of one size, whatever their engines' blocks are."""
        pools: dict[tuple[str, str], list[EngineWatch]] = {}
        for watch, _ in self._watches.values():
            pools.setdefault((watch.spec.site, watch.spec.model), []).append(watch)
        for watches in pools.values():
            block_tokens = canonical_block_tokens(watch.block_size for watch in watches if watch.block_size)
            for watch in watches:
                watch.use_block_tokens(block_tokens)

    def _count(self) -> None:
        pages = [watch.readings for watch, _ in self._watches.values() if watch.answers and watch.readings]
        INSTANCES.labels("answering").set(len(pages))
        INSTANCES.labels("silent").set(len(self._watches) - len(pages))
        for field, unknown in unknown_readings(pages).items():
            UNKNOWN.labels(field).set(unknown)


def site_secret(settings: AgentSettings) -> bytes:
    """The key of the block-key seed, from a file or the settings.

    Raises SetupError for a file that can't be read or is empty.
    """
    secret = secret_of(settings, "site_secret")
    if not secret:
        log.warning("no site secret: block keys of guessable prompts can be guessed; set TOKENFLEET_SITE_SECRET_FILE")
    return secret


def _watched_alike(one: EngineSpec, other: EngineSpec) -> bool:
    """Whether both are watched at the same places in the same way; what only labels the heartbeat may differ."""
    fields = ("site", "model", "engine", "metrics_url", "kv_endpoint", "kv_replay_endpoint", "ranks")
    return all(getattr(one, field) == getattr(other, field) for field in fields)


def main() -> None:
    run_process("agent", AgentSettings, run, runner=uvloop.run)


if __name__ == "__main__":
    main()
