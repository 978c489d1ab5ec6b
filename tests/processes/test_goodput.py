"""The goodput process: killed anywhere, heard twice, read again; the sums are those of a plain count."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.kafka_server import Can, OwnKafka
from tests.loops import running
from tests.processes.children import Child
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.kafka_reading import BEGINNING
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.topics import FEEDBACK, GOODPUT, OUTCOMES, POLICY, SUMMARY, partition_of
from tokenfleet.core.accounts import Feedback
from tokenfleet.core.goodput.table import SUMMED, GoodputTable
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent, PoolSummary, SiteSummary, Vector
from tokenfleet.core.revisions import PolicyRevision

pytestmark = pytest.mark.integration

SITES = ("b", "c")
NONE = Vector(capacity=0.0, used=0.0)


class Reader:
    """What anybody reads of the worker's topics."""

    def __init__(self) -> None:
        self.table = GoodputTable()
        self.feedback: list[Feedback] = []
        self.cluster = ""

    def sums(self) -> Counter[str]:
        """Sums over all partitions of the 10 s windows."""
        rows = [
            row
            for partition in range(OUTCOMES.partitions)
            for row in self.table.published(cluster=self.cluster, site="fleet", partition=partition)
            if row.width_s == 10.0
        ]
        return Counter({column: total for column in SUMMED if (total := sum(getattr(row, column) for row in rows))})


@asynccontextmanager
async def reading(kafka: Kafka) -> AsyncGenerator[Reader]:
    reader = Reader()
    reader.cluster = kafka.cluster_id
    followers = [
        kafka.follower(GOODPUT, "", lambda record: reader.table.hear(record.message), start=BEGINNING),
        kafka.follower(FEEDBACK, "", lambda record: reader.feedback.append(record.message), start=BEGINNING),
    ]
    async with running(*(follower.run() for follower in followers)):
        yield reader


def worker(kafka: OwnKafka, folder: Path) -> Child:
    settings = {"KAFKA": kafka.bootstrap, "SITES": ",".join(SITES), "STATE_DIR": str(folder / "state")}
    return Child("tokenfleet.processes.goodput", settings, log_path=folder / "goodput.log")


def told(request: str, rng: Random) -> list[OutcomeEvent]:
    common: dict[str, Any] = {
        "request": request,
        "decision": request,
        "tenant": "acme",
        "request_class": "chat",
        "model": "small-chat",
        "origin": "b",
        "site": "b",
        "instance": "i",
        "pool": "small-chat@b",
        "prompt_tokens": 100,
    }
    tokens, ttft_s = rng.randint(0, 300), rng.choice([0.5, 3.0])
    end: dict[str, Any] = {"elapsed_s": 4.0, "ttft_s": ttft_s, "tpot_s": 0.01, "output_tokens": tokens}
    failed: dict[str, Any] = {**end, "output_tokens": 5}
    return [
        OutcomeEvent(kind="failed", attempt=0, at_wall_s=wall_s(), **common, **failed),
        OutcomeEvent(kind="started", attempt=1, at_wall_s=wall_s(), elapsed_s=0.1, **common),
        OutcomeEvent(kind="finished", attempt=1, at_wall_s=wall_s(), **common, **end),
    ]


def counted(requests: list[list[OutcomeEvent]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for _, _, end in requests:
        tokens, met = end.output_tokens or 0, (end.ttft_s or 0.0) <= 2.0
        sums += Counter(output_tokens=tokens + 5, waste_tokens=5, offered_arrived=1)
        sums += Counter(goodput_tokens=tokens, met=1, met_arrived=1) if met else Counter(waste_tokens=tokens, missed=1)
    return sums


async def tell(kafka: Kafka, events: list[OutcomeEvent]) -> None:
    for partition in range(OUTCOMES.partitions):
        ours = tuple(event for event in events if partition_of(event.request, OUTCOMES.partitions) == partition)
        if ours:
            envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=wall_s(), events=ours)
            await kafka.send(OUTCOMES, "b", [envelope], partition=partition, timeout_s=10.0)


async def until(true: Callable[[], bool], *, child: Child, wait_max_s: float = 60.0) -> None:
    give_up_s = monotonic_s() + wait_max_s
    while not true():
        if not child.running or monotonic_s() > give_up_s:
            pytest.fail(f"not so: {child.said()[-3000:]}")
        await asyncio.sleep(0.1)


@pytest.mark.timeout(240)
async def test_killed_between_everything_the_sums_are_exact(own_kafka: OwnKafka, tmp_path: Path) -> None:
    await apply(own_kafka.bootstrap, SITES)
    rng = Random(7)
    requests = [told(f"r{number}", rng) for number in range(300)]
    events = [event for request in requests for event in request]
    log = [*events, *rng.choices(events, k=90)]
    rng.shuffle(log)
    child = worker(own_kafka, tmp_path)
    async with Kafka(own_kafka.bootstrap, client_id="test") as kafka, reading(kafka) as reader:
        for start in range(0, len(log), 330):
            child.start()
            for first in range(start, min(start + 330, len(log)), 30):
                await tell(kafka, log[first : first + 30])
            if start == 0:
                await until(lambda: bool(reader.sums()), child=child)
            await asyncio.sleep(rng.uniform(0.0, 4.0))
            child.kill()
        child.start()
        expected = counted(requests)
        await until(lambda: reader.sums() == expected and len(reader.feedback) > 2, child=child)
        await tell(kafka, events[:90])
        await asyncio.sleep(3.0)
        assert reader.sums() == expected, "all of it again changes nothing"
        numbers = [feedback.revision for feedback in reader.feedback]
        assert numbers == sorted(set(numbers)), "no revision is handed out twice"
        assert reader.feedback[-1].outputs
        assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


@pytest.mark.timeout(120)
async def test_ready_replicas_become_cost_at_the_price_in_force(own_kafka: OwnKafka, tmp_path: Path) -> None:
    await apply(own_kafka.bootstrap, SITES)
    child = worker(own_kafka, tmp_path)
    child.start()
    pool = PoolSummary(
        pool="small-chat@b",
        model="small-chat",
        model_digest="",
        endpoints=3,
        ready=3,
        prefill=NONE,
        kv=NONE,
        seats=NONE,
    )
    async with Kafka(own_kafka.bootstrap, client_id="test") as kafka, reading(kafka) as reader:
        await tell(kafka, [event for number in range(8) for event in told(f"r{number}", Random(1))])

        async def summaries() -> None:
            for number in range(1000):
                summary = SiteSummary(
                    site="b", cluster="k", epoch=0, n=number, period_s=0.5, age_s=0.0, gateways=(), pools=(pool,)
                )
                await kafka.send(SUMMARY, "b", [summary], key="b", timeout_s=10.0)
                await asyncio.sleep(0.5)

        sending = asyncio.create_task(summaries())
        await until(lambda: reader.sums()["gpu_seconds"] > 3.0, child=child)
        sums = reader.sums()
        assert sums["cost"] == pytest.approx(sums["gpu_seconds"] * 2.0 / 3600)
        dearer = policy_text().replace("price_per_instance_hour = 2.0", "price_per_instance_hour = 7200.0")
        dearer = dearer.replace("revision = 1", "revision = 2")
        await kafka.send(POLICY, "", [PolicyRevision(revision=2, toml=dearer, sha256="")], key="policy", timeout_s=10.0)
        await until(lambda: reader.sums()["cost"] > 6.0, child=child)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


async def test_a_missing_topic_is_one_line(own_kafka: OwnKafka, tmp_path: Path) -> None:
    own_kafka.needs(Can.REFUSE_UNKNOWN_TOPICS)
    child = worker(own_kafka, tmp_path)
    child.start()
    assert await asyncio.to_thread(child.wait, 60.0) == 2
    assert "tokenfleet topics apply" in child.said()
    assert "Traceback" not in child.said()
