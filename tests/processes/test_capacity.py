"""The capacity process: no kill and no bad record ever shows a reader an empty, younger or wrong table."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.builders import beat, keys, placed, placements, row, shard, stored
from tests.kafka_server import KafkaServer
from tests.loops import running
from tests.processes.children import Child
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.kafka_reading import BEGINNING, Record
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.topics import (
    CAPACITY,
    DEADLETTER,
    KVCACHE,
    PLACEMENTS,
    SKETCH,
    SUMMARY,
    TELEMETRY,
    Topic,
    partition_of,
)
from tokenfleet.core.capacity import CapacityTable, InstanceRow, liveness
from tokenfleet.core.deadletters import DeadLetter
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import AgentClaim, CapacityShard, Order, TelemetryEnvelope
from tokenfleet.core.sketch import Sketches

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

WAIT_MAX_S = 60.0
PERIOD_S = 0.25


class Agent:
    """An agent of two instances; each heartbeat tells its own number as `waiting`."""

    def __init__(self, kafka: Kafka, site: str, partition: int) -> None:
        self.instances = (f"i{partition}-a", f"i{partition}-b")
        self._kafka, self._site, self._partition = kafka, site, partition
        self.n = 0

    async def run(self) -> None:
        name = f"agent-{self._partition}"
        claim = await self._send(AgentClaim(agent=name, site=self._site))
        while True:
            self.n += 1
            of = Order(cluster=self._kafka.cluster_id, claim=claim, n=self.n)
            beats = tuple(beat(instance, waiting=float(self.n)) for instance in self.instances)
            await self._send(TelemetryEnvelope(agent=name, site=self._site, order=of, period_s=PERIOD_S, beats=beats))
            await asyncio.sleep(PERIOD_S)

    async def _send(self, record: Any) -> int:
        return await self._kafka.send(TELEMETRY, self._site, [record], partition=self._partition)


class Reader:
    """What any decide replica reads of the site's capacity, and everything that it was ever told."""

    def __init__(self) -> None:
        self.table = CapacityTable()
        self.told: list[CapacityShard] = []
        self.sizes: list[int] = []
        self.went_back: list[str] = []
        self._newest: dict[str, int] = {}

    def __call__(self, record: Record[CapacityShard]) -> None:
        message = record.message
        if not self.table.apply(message, offset=record.offset, now_s=monotonic_s(), live=record.live).accepted:
            return
        self.told.append(message)
        self.sizes.append(len(self.table))
        for each in message.rows:
            if each.order.n < self._newest.get(each.beat.instance, 0) or each.beat.waiting != each.order.n:
                self.went_back.append(f"{each.beat.instance} at {each.order.n}")
            self._newest[each.beat.instance] = each.order.n

    def unsuspected(self) -> list[str]:
        return [each.beat.instance for each in self.table.rows() if not suspect(each)]

    def epochs(self) -> dict[int, int]:
        return {number: epoch for number, (_, epoch, _) in self.table.orders().items()}


def suspect(of: InstanceRow) -> bool:
    return liveness(of, monotonic_s(), LivenessPolicy()).suspect


async def until(true: Callable[[], bool], what: str) -> None:
    give_up_s = monotonic_s() + WAIT_MAX_S
    while not true():
        assert monotonic_s() < give_up_s, f"not within {WAIT_MAX_S} s: {what}"
        await asyncio.sleep(0.05)


@asynccontextmanager
async def fleet(server: KafkaServer, site: str, folder: Path) -> AsyncGenerator[tuple[Kafka, Callable[[int], Child]]]:
    """A site of the test's own on the shared broker: its topics, a policy that names it, and workers for it."""
    await apply(server.bootstrap, [site], recreate_wrong=server.kind == "tansu")
    policy = folder / "policy.toml"
    policy.write_text(policy_text() + f'\n[sites.{site}]\njurisdiction = "eu"\n')
    workers: list[Child] = []

    def worker(number: int) -> Child:
        settings = {
            "KAFKA": server.bootstrap,
            "SITES": site,
            "POLICY": str(policy),
            "STATE_DIR": str(folder / f"state-{number}"),
            "SKETCH_PERIOD_S": "0.5",
            "GATEWAYS": f'{{"{site}": ["127.0.0.1:1"]}}',
        }
        workers.append(Child("tokenfleet.processes.capacity", settings, log_path=folder / f"capacity-{number}.log"))
        return workers[-1]

    try:
        async with Kafka(server.bootstrap, client_id="test") as kafka:
            yield kafka, worker
    finally:
        for each in workers:
            each.kill()


def collect(kafka: Kafka, topic: Topic[Any], site: str, into: list[Any]) -> Any:
    return kafka.follower(topic, site, lambda record: into.append(record.message), start=BEGINNING).run()


async def test_a_killed_worker_is_followed_by_one_that_shows_no_wrong_and_no_empty_row(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    async with fleet(kafka, "cap-kill", tmp_path) as (link, worker):
        agents = [Agent(link, "cap-kill", partition) for partition in range(TELEMETRY.partitions)]
        everybody = sorted(instance for agent in agents for instance in agent.instances)
        reader = Reader()
        follower = link.follower(CAPACITY, "cap-kill", reader, start=BEGINNING)
        async with running(follower.run(), *(agent.run() for agent in agents)):
            first, second = worker(1), worker(2)
            first.start()
            second.start()
            await until(lambda: reader.unsuspected() == everybody, f"all rows\n{first.said()}")
            await asyncio.sleep(5.0)  # the group settles; both own shards
            full = len(reader.sizes)
            before = reader.epochs()
            first.kill()
            killed_at_n = [agent.n for agent in agents]
            await until(lambda: reader.epochs() != before, f"a takeover\n{second.said()}")
            await until(
                lambda: (
                    reader.unsuspected() == everybody
                    and all(
                        (found := reader.table.row(agent.instances[0])) is not None and found.order.n > n + 4
                        for agent, n in zip(agents, killed_at_n, strict=True)
                    )
                ),
                f"fresh rows after the kill\n{second.said()}",
            )
            assert second.running
            assert set(reader.sizes[full:]) == {len(everybody)}
            assert all(message.rows for message in reader.told[full:])
            assert all(epoch >= before[number] for number, epoch in reader.epochs().items())
            assert reader.went_back == []
            assert await asyncio.to_thread(second.stop, signal.SIGTERM) == 0


async def test_a_worker_that_was_paused_does_not_speak_from_the_past(kafka: KafkaServer, tmp_path: Path) -> None:
    site = "cap-pause"
    async with fleet(kafka, site, tmp_path) as (link, worker):
        agents = [Agent(link, site, partition) for partition in range(TELEMETRY.partitions)]
        everybody = sorted(instance for agent in agents for instance in agent.instances)
        reader = Reader()
        follower = link.follower(CAPACITY, site, reader, start=BEGINNING)
        async with running(follower.run(), *(agent.run() for agent in agents)):
            first, second = worker(1), worker(2)
            first.start()
            await until(lambda: reader.unsuspected() == everybody, f"all rows\n{first.said()}")
            full, before = len(reader.sizes), reader.epochs()
            pid = first.pid
            os.kill(pid, signal.SIGSTOP)
            second.start()
            await until(
                lambda: all(epoch != before[number] for number, epoch in reader.epochs().items()),
                f"a takeover of all shards\n{second.said()}",
            )
            os.kill(pid, signal.SIGCONT)
            n = [agent.n for agent in agents]
            await asyncio.sleep(3.0)
            await until(
                lambda: all(newest(reader, agent) > at + 20 for agent, at in zip(agents, n, strict=True)),
                f"fresh rows from whoever owns the shards now\n{first.said()}\n{second.said()}",
            )
            await until(lambda: reader.unsuspected() == everybody, "no suspect left")
            assert set(reader.sizes[full:]) == {len(everybody)}
            assert reader.went_back == []
            assert first.running
            assert second.running


async def test_a_new_owner_starts_from_the_last_message_and_a_bad_record_stops_nobody(
    kafka: KafkaServer, tmp_path: Path
) -> None:
    site = "cap-seed"
    async with fleet(kafka, site, tmp_path) as (link, worker):
        left = shard(row(beat("left-over", waiting=1.0), agent="agent-gone"), shard=1)
        await link.send(CAPACITY, site, [left], partition=1, key="1")
        agents = [Agent(link, site, partition) for partition in range(TELEMETRY.partitions)]
        reader, letters = Reader(), list[DeadLetter]()
        follower = link.follower(CAPACITY, site, reader, start=BEGINNING)
        async with running(follower.run(), collect(link, DEADLETTER, "", letters), *(agent.run() for agent in agents)):
            process = worker(1)
            process.start()
            await until(lambda: len(reader.unsuspected()) == 2 * len(agents), f"all rows\n{process.said()}")
            assert (found := reader.table.row("left-over")) is not None
            assert suspect(found)
            seeded = [message for message in reader.told if message.shard == 1 and message.epoch != 0]
            assert all("left-over" in [each.beat.instance for each in message.rows] for message in seeded)
            n = agents[1].n
            await link.send_values(TELEMETRY, site, [b"\xc1 no msgpack"], partition=1)
            await until(lambda: agents[1].n > n + 4, "more telemetry")
            await until(lambda: newest(reader, agents[1]) > n + 4, f"rows behind the bad record\n{process.said()}")
            await until(lambda: any(each.topic == TELEMETRY.at(site) for each in letters), "a dead letter")
            assert process.running


def newest(reader: Reader, agent: Agent) -> int:
    found = reader.table.row(agent.instances[0])
    return found.order.n if found else 0


async def test_the_owner_of_shard_0_tells_the_sites_capacity_and_blocks(kafka: KafkaServer, tmp_path: Path) -> None:
    site = "cap-face"
    async with fleet(kafka, site, tmp_path) as (link, worker):
        agents = [Agent(link, site, 0)]
        blocks = list(range(1, 300))
        kv = stored("i0-a", blocks)
        await link.send(KVCACHE, site, [kv], key="i0-a")
        where = partition_of("i0-a", PLACEMENTS.partitions)
        event = placed("d1", "i0-a", uncached_tokens=700)
        await link.send(PLACEMENTS, site, [placements(event)], partition=where)
        summaries: list[Any] = []
        chunks: list[Any] = []
        async with running(
            collect(link, SUMMARY, site, summaries),
            collect(link, SKETCH, site, chunks),
            *(agent.run() for agent in agents),
        ):
            process = worker(1)
            process.start()
            await until(lambda: bool(summaries and summaries[-1].pools), f"a summary\n{process.said()}")
            await until(lambda: told_blocks(chunks, site, blocks) == len(blocks), f"a sketch\n{process.said()}")
            pool = summaries[-1].pools[0]
            assert (pool.pool, pool.endpoints, pool.ready) == (f"small-chat@{site}", 2, 2)
            assert pool.prefill.queued >= 700
            assert summaries[-1].gateways == ("127.0.0.1:1",)
            assert [each.n for each in summaries] == sorted({each.n for each in summaries})


def told_blocks(chunks: Sequence[Any], site: str, blocks: list[int]) -> int:
    sketches = Sketches()
    for chunk in chunks:
        sketches.heard(chunk)
    return sketches.prefix_hits(site, f"small-chat@{site}", keys(*blocks))


def test_a_site_that_the_policy_lacks_is_refused_with_one_line(tmp_path: Path) -> None:
    process = Child("tokenfleet.processes.capacity", {"SITES": "nowhere"}, log_path=tmp_path / "log")
    process.start()
    assert process.wait(60.0) == 2
    assert "no site 'nowhere' in the policy" in process.said()
    assert len(process.said().splitlines()) == 1
