"""The agent against simulated engines and a real broker: what its sites hear, through deaths on either side."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests.kafka_server import Can, KafkaServer, OwnKafka
from tests.ports import free_port
from tokenfleet.adapters import kafka_admin
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import BEGINNING, Record
from tokenfleet.adapters.settings import AgentSettings
from tokenfleet.adapters.topics import KVCACHE, TELEMETRY
from tokenfleet.core.blocks import block_keys, chain_seed
from tokenfleet.core.errors import SetupError
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import AgentClaim, Heartbeat, KvRecord, Telemetry, TelemetryEnvelope
from tokenfleet.local.engine_api import Fault
from tokenfleet.local.engine_instance import InstanceConfig
from tokenfleet.local.engines import Engines, EnginesConfig
from tokenfleet.processes import agent as process
from tokenfleet.processes.agent import site_secret
from tokenfleet.sim.profiles import profiles

MODEL = "tiny"
PROMPT = list(range(1, 1025))  # 4 canonical blocks


def keys_of(prompt: list[int], *, salt: str = "") -> bytes:
    seed = chain_seed(b"secret", model=MODEL, cache_salt=salt)
    return block_keys(np.asarray(prompt, dtype=np.uint32), seed=seed, block_tokens=256)


class Site:
    """What a replica of one site makes of what it hears."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.index = PrefixIndex()
        self.claims: list[int] = []
        self.envelopes: list[TelemetryEnvelope] = []

    @property
    def beats(self) -> dict[str, Heartbeat]:
        return {beat.instance: beat for beat in self.envelopes[-1].beats} if self.envelopes else {}

    def hear(self, record: Record[Telemetry | KvRecord]) -> None:
        match record.message:
            case AgentClaim():
                self.claims.append(record.offset)
            case TelemetryEnvelope() as envelope:
                self.envelopes.append(envelope)
                for beat in envelope.beats:
                    self.index.verify(beat.instance, beat.digest, boot=beat.boot, now_s=monotonic_s())
            case kv:
                self.index.apply(kv)

    async def until(self, fact: Callable[["Site"], bool]) -> None:
        async with asyncio.timeout(30):
            while not fact(self):
                await asyncio.sleep(0.02)


class Fleet:
    """Simulated engines, an agent on them, and the sites that hear it."""

    def __init__(self, folder: Path, bootstrap: str, *, sites: dict[str, str], block_sizes: dict[str, int]) -> None:
        self.sites = {name: Site(name) for name in dict.fromkeys(sites.values())}
        self.discovery = folder / "engines.toml"
        self.bootstrap = bootstrap
        self._site_of = sites
        self._configs = {
            name: InstanceConfig(
                id=name,
                http_port=free_port(),
                kv_port=free_port(),
                kv_replay_port=free_port(),
                model=MODEL,
                profile=next(iter(profiles())),
                block_size=block_sizes.get(name, 32),
            )
            for name in sites
        }
        self.engines = Engines(EnginesConfig(instances=list(self._configs.values())))

    def list_engines(self, *, without: str = "", **fields: str) -> None:
        """Write the discovery file, whole."""
        text = ""
        for name, config in self._configs.items():
            if name != without:
                listing = self._listing(name, config) | fields
                text += "[[engine]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in listing.items())
        new = self.discovery.with_suffix(".new")
        new.write_text(text)
        new.replace(self.discovery)

    def _listing(self, name: str, config: InstanceConfig) -> dict[str, Any]:
        return {
            "id": name,
            "site": self._site_of[name],
            "address": f"127.0.0.1:{config.http_port}",
            "kv_endpoint": f"tcp://127.0.0.1:{config.kv_port}",
            "kv_replay_endpoint": f"tcp://127.0.0.1:{config.kv_replay_port}",
            "model": MODEL,
        }

    async def complete(self, name: str, prompt: list[int], *, salt: str = "") -> None:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": salt}
        url = f"http://127.0.0.1:{self._configs[name].http_port}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()

    @contextlib.asynccontextmanager
    async def watched(self, **settings: Any) -> AsyncGenerator[None]:
        """An agent at work."""
        values: dict[str, Any] = {"scrape_period_s": 0.2, "kv_snapshot_period_s": 1.0} | settings
        told = AgentSettings(kafka=self.bootstrap, engines=str(self.discovery), site_secret="secret", **values)
        task = asyncio.create_task(process.run(told))
        try:
            yield
            assert not task.done(), task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def running(fleet: Fleet) -> AsyncGenerator[Fleet]:
    """The engines, the topics and the sites' readers."""
    await kafka_admin.apply(fleet.bootstrap, fleet.sites)
    await fleet.engines.start()
    try:
        async with Kafka(fleet.bootstrap, client_id="reader") as kafka:
            tasks = [
                asyncio.create_task(kafka.follower(topic, site.name, site.hear, start=BEGINNING).run())
                for site in fleet.sites.values()
                for topic in (TELEMETRY, KVCACHE)
            ]
            yield fleet
            for task in tasks:
                assert not task.done(), task
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        await fleet.engines.stop()


@pytest.mark.integration
async def test_each_site_hears_its_instances_and_their_blocks(kafka: KafkaServer, tmp_path: Path) -> None:
    sites = {"i1": "agent-a", "i2": "agent-a", "i3": "agent-b"}
    fleet = Fleet(tmp_path, kafka.bootstrap, sites=sites, block_sizes={"i2": 64})
    fleet.list_engines()
    async with running(fleet), fleet.watched():
        a, b = fleet.sites["agent-a"], fleet.sites["agent-b"]
        await a.until(lambda site: {name for name, beat in site.beats.items() if beat.boot} == {"i1", "i2"})
        await b.until(lambda site: site.beats.keys() == {"i3"})
        assert [a.beats["i1"].block_size, a.beats["i2"].block_size] == [32, 64]
        orders = [envelope.order for envelope in a.envelopes]
        assert {order.claim for order in orders} == set(a.claims)
        assert [order.n for order in orders] == list(range(1, len(orders) + 1))

        await fleet.complete("i1", PROMPT)
        await fleet.complete("i2", PROMPT[:512], salt="tenant")
        await fleet.complete("i3", PROMPT)
        await a.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})
        await a.until(lambda site: site.index.hits(keys_of(PROMPT, salt="tenant")) == {"i2": 2})
        await b.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i3": 4})
        await a.until(lambda site: site.beats["i1"].digest.blocks == 4 and site.index.state("i1") == "exact")

        fleet.list_engines(state="draining")
        await a.until(lambda site: site.beats["i1"].state == "draining")
        assert a.index.hits(keys_of(PROMPT)) == {"i1": 4}  # an operator's word forgets no block
        fleet.list_engines(without="i2")
        await a.until(lambda site: site.beats.keys() == {"i1"})


@pytest.mark.integration
async def test_an_engine_that_dies_comes_back_as_another_boot_without_its_blocks(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, kafka.bootstrap, sites={"i1": "agent-c"}, block_sizes={})
    fleet.list_engines()
    async with running(fleet), fleet.watched():
        site = fleet.sites["agent-c"]
        await site.until(lambda site: "i1" in site.beats and site.beats["i1"].boot != "")
        first = site.beats["i1"].boot
        await fleet.complete("i1", PROMPT)
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})
        await fleet.engines.instances["i1"].apply(Fault(kind="restart", for_s=1.0, block_size=64))
        await site.until(lambda site: site.beats["i1"].refused and site.beats["i1"].scrape_failed_for_s > 0)
        assert site.beats["i1"].boot == first
        await site.until(lambda site: not site.beats["i1"].refused and site.beats["i1"].boot != first)
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {} and site.index.state("i1") == "exact")
        await fleet.complete("i1", PROMPT[:512])
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 2})
        assert site.beats["i1"].block_size == 64


@pytest.mark.integration
async def test_an_agent_that_comes_back_knows_all_that_the_engine_kept(kafka: KafkaServer, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, kafka.bootstrap, sites={"i1": "agent-d"}, block_sizes={})
    fleet.list_engines()
    async with running(fleet):
        site = fleet.sites["agent-d"]
        async with fleet.watched():
            await site.until(lambda site: len(site.claims) == 1)
            await fleet.complete("i1", PROMPT)
            await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})
        await fleet.complete("i1", PROMPT[::-1])
        async with fleet.watched():
            await site.until(lambda site: len(site.claims) == 2)
            await site.until(lambda site: site.index.hits(keys_of(PROMPT[::-1])) == {"i1": 4})
            await site.until(lambda site: site.index.state("i1") == "exact" and site.beats["i1"].digest.blocks == 8)


@pytest.mark.integration
async def test_a_broker_that_freezes_costs_telemetry_and_no_block(own_kafka: OwnKafka, tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, own_kafka.bootstrap, sites={"i1": "agent-e"}, block_sizes={})
    fleet.list_engines()
    async with running(fleet), fleet.watched(kv_snapshot_period_s=600.0):
        site = fleet.sites["agent-e"]
        await fleet.complete("i1", PROMPT[:512])
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 2})
        own_kafka.freeze()
        await fleet.complete("i1", PROMPT)
        await asyncio.sleep(4.0)  # beyond the timeout of a record on its way
        own_kafka.thaw()
        heard = len(site.envelopes)
        await site.until(lambda site: len(site.envelopes) > heard + 3)
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})
        assert site.beats["i1"].age_s < 2.0


@pytest.mark.integration
async def test_a_broker_that_dies_hears_all_again(own_kafka: OwnKafka, tmp_path: Path) -> None:
    """The embedded broker comes back empty and as another cluster: the agent claims again and tells all blocks."""
    fleet = Fleet(tmp_path, own_kafka.bootstrap, sites={"i1": "agent-f"}, block_sizes={})
    fleet.list_engines()
    async with running(fleet), fleet.watched(kv_snapshot_period_s=600.0):
        site = fleet.sites["agent-f"]
        await fleet.complete("i1", PROMPT[:512])
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 2})
        await site.until(lambda site: bool(site.envelopes))  # telemetry is another topic than the blocks
        cluster = site.envelopes[-1].order.cluster
        own_kafka.kill9()
        await fleet.complete("i1", PROMPT)
        await own_kafka.start()
        await kafka_admin.apply(fleet.bootstrap, fleet.sites, recreate_wrong=True)
        heard = len(site.envelopes)
        await site.until(lambda site: len(site.envelopes) > heard + 3)
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})
        another = Can.KEEP not in own_kafka.server.capabilities
        await site.until(lambda site: (site.envelopes[-1].order.cluster != cluster) == another)
        await site.until(lambda site: site.envelopes[-1].order.claim == site.claims[-1])
        await site.until(lambda site: site.index.hits(keys_of(PROMPT)) == {"i1": 4})


def test_the_site_secret_comes_from_a_file_or_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    with pytest.raises(SetupError, match="SITE_SECRET_FILE"):
        site_secret(AgentSettings(site_secret_file=str(path)))
    path.write_text(" \n")
    with pytest.raises(SetupError, match="is empty"):
        site_secret(AgentSettings(site_secret_file=str(path)))
    path.write_text("key\n")
    assert site_secret(AgentSettings(site_secret_file=str(path), site_secret="other")) == b"key"
    assert site_secret(AgentSettings(site_secret="other")) == b"other"
