"""The controller of shares on a real broker: the goodput process moves them, is killed, is switched off, waits."""

import asyncio
import signal
from itertools import count, pairwise
from pathlib import Path

import pytest

from tests.core.sites import pool_summary
from tests.kafka_server import OwnKafka
from tests.loops import running
from tests.processes.children import Child
from tests.processes.test_canary import until
from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.topics import OUTCOMES, SUMMARY, partition_of
from tokenfleet.client.policies import publish_next, read_log, revision_in, roll_back
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent, SiteSummary
from tokenfleet.core.revisions import PolicyRevision, renumbered

pytestmark = pytest.mark.integration

POOL = "large-chat@b"
REQUESTS = 40  # a half second: enough outcomes in each window of two
# Windows of 2 s instead of 10, and what follows from them as fast.
FILE = (
    policy_text()
    + """
[goodput]
windows_s = [2.0, 60.0]
watermark_lag_s = 0.5
idle_partition_s = 1.0
[slomax.controller]
enabled = true
classes = { chat = { share = 0.5 }, long = { share = 0.3 }, batch = { share = 0.2 } }
"""
)


def written(folder: Path, toml: str) -> Path:
    path = folder / "policy.toml"
    path.write_text(toml)
    return path


def finished(request: str) -> OutcomeEvent:
    """A chat request whose first token came too late."""
    return OutcomeEvent(
        request=request,
        attempt=0,
        kind="finished",
        decision=request,
        tenant="acme",
        request_class="chat",
        model="large-chat",
        origin="b",
        site="b",
        instance="i",
        pool=POOL,
        at_wall_s=wall_s(),
        elapsed_s=3.0,
        ttft_s=2.5,
        tpot_s=0.01,
        prompt_tokens=100,
        output_tokens=10,
    )


async def serves(kafka: Kafka) -> None:
    """Chat misses its level, again and again."""
    for number in count(1):
        site = SiteSummary(
            site="b", cluster="k", epoch=0, n=number, period_s=0.5, age_s=0.1, gateways=(), pools=(pool_summary("b"),)
        )
        await kafka.send(SUMMARY, "b", [site], partition=0, key="b", timeout_s=10.0)
        partitions: dict[int, list[OutcomeEvent]] = {}
        for each in range(REQUESTS):
            event = finished(f"{number}-{each}")
            partitions.setdefault(partition_of(event.request, OUTCOMES.partitions), []).append(event)
        for partition, events in partitions.items():
            envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=wall_s(), events=tuple(events))
            await kafka.send(OUTCOMES, "b", [envelope], partition=partition, timeout_s=10.0)
        await asyncio.sleep(0.5)


async def controlled(kafka: OwnKafka) -> list[PolicyRevision]:
    """The controller's revisions, oldest first."""
    return [each.revision for each in (await read_log(kafka.bootstrap)).published if each.revision.by == "controller"]


def number(revision: PolicyRevision | None) -> int:
    return 0 if revision is None else revision.revision


@pytest.mark.timeout(240)
async def test_windows_in_revisions_out_once_through_kills_canaries_and_the_kill_switch(
    own_kafka: OwnKafka, tmp_path: Path
) -> None:
    await apply(own_kafka.bootstrap, ("b",))
    file = written(tmp_path, FILE)
    settings = {"KAFKA": own_kafka.bootstrap, "SITES": "b", "STATE_DIR": str(tmp_path / "state"), "POLICY": str(file)}
    child = Child("tokenfleet.processes.goodput", settings, log_path=tmp_path / "goodput.log")
    child.start()
    async with Kafka(own_kafka.bootstrap, client_id="test") as kafka, running(serves(kafka)):
        log = await until(own_kafka, lambda log: number(log.in_force) >= 2, child=child)
        child.kill()
        child.start()
        log = await until(own_kafka, lambda log: number(log.in_force) >= 4, child=child)
        changes = [revision.shares[0] for revision in await controlled(own_kafka)]
        assert changes[0].why.startswith("chat 0.0% of 98.0%; admitted work is 98.0% under its target")
        assert changes[0].old.shares == {"chat": 0.5, "long": 0.3, "batch": 0.2}
        assert [each.number for each in changes] == list(range(1, len(changes) + 1)), "no step was made twice"
        assert all(later.old == earlier.new for earlier, later in pairwise(changes))
        assert log.in_force is not None
        assert log.in_force.reason == f"{POOL}: {changes[-1].why}"

        canary = await publish_next(own_kafka.bootstrap, revision_in(file, share=0.1, for_s=600.0))
        changes = [revision.shares[0] for revision in await controlled(own_kafka)]
        await asyncio.sleep(8.0)  # four windows
        assert (await read_log(own_kafka.bootstrap)).canary == canary, "it is on trial still"
        assert len(await controlled(own_kafka)) == len(changes)
        back = await roll_back(own_kafka.bootstrap, to=None, reason="enough")
        log = await until(own_kafka, lambda log: number(log.in_force) > back.revision, child=child)
        assert log.in_force is not None
        assert log.in_force.shares[0].old == changes[-1].new, "the file from before the canary is the base"

        off = written(tmp_path, renumbered(FILE, 2).replace("enabled = true", "enabled = false"))
        switched = await publish_next(own_kafka.bootstrap, revision_in(off))
        log = await until(own_kafka, lambda log: number(log.in_force) > switched.revision, child=child)
        assert log.in_force is not None
        (change,) = log.in_force.shares
        assert (change.kind, change.new.shares) == ("static", {"chat": 0.5, "long": 0.3, "batch": 0.2})
        assert parse_policy(log.in_force.toml, source="test").slomax.controller.pools == {}
        await asyncio.sleep(6.0)
        assert (await read_log(own_kafka.bootstrap)).greatest == log.in_force.revision, "and nothing more"
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]
