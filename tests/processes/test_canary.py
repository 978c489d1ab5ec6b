"""A canary on a real broker: judged by the goodput process, killed in the middle, and as its operator sees it."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.kafka_server import OwnKafka
from tests.processes.children import Child
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.topics import OUTCOMES, partition_of
from tokenfleet.client.policies import arms_table, publish, read_log, revision_in, roll_back, status_lines
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent
from tokenfleet.core.revisions import PolicyLog, renumbered

pytestmark = pytest.mark.integration

SITES = ("b",)


def worker(kafka: OwnKafka, folder: Path) -> Child:
    settings = {"KAFKA": kafka.bootstrap, "SITES": ",".join(SITES), "STATE_DIR": str(folder / "state")}
    return Child("tokenfleet.processes.goodput", settings, log_path=folder / "goodput.log")


def file(folder: Path, number: int) -> Path:
    path = folder / f"policy-{number}.toml"
    path.write_text(renumbered(policy_text(), number))
    return path


def finished(request: str, *, revision: int, ttft_s: float) -> OutcomeEvent:
    return OutcomeEvent(
        request=request,
        attempt=0,
        kind="finished",
        decision=request,
        tenant="acme",
        request_class="chat",
        model="small-chat",
        origin="b",
        site="b",
        instance="i",
        pool="small-chat@b",
        at_wall_s=wall_s(),
        elapsed_s=0.1,
        ttft_s=ttft_s,
        tpot_s=0.01,
        prompt_tokens=100,
        output_tokens=10,
        policy_revision=revision,
    )


async def tell(kafka: Kafka, *, first: int, count: int, canary: int, canary_ttft_s: float) -> None:
    """`count` requests of each arm; those of revision 1 get their first token after 0.5 s."""
    arms = ((1, 0.5), (canary, canary_ttft_s))
    for number in range(first, first + count):
        events = [finished(f"{number}-{revision}", revision=revision, ttft_s=ttft_s) for revision, ttft_s in arms]
        for event in events:
            envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=wall_s(), events=(event,))
            partition = partition_of(event.request, OUTCOMES.partitions)
            await kafka.send(OUTCOMES, "b", [envelope], partition=partition, timeout_s=10.0)


async def until(
    kafka: OwnKafka, true: Callable[[PolicyLog], bool], *, child: Child, wait_max_s: float = 90.0
) -> PolicyLog:
    give_up_s = monotonic_s() + wait_max_s
    while not true(log := await read_log(kafka.bootstrap)):
        if not child.running or monotonic_s() > give_up_s:
            pytest.fail(f"not so: {log.report} {log.in_force}\n{child.said()[-3000:]}")
        await asyncio.sleep(0.5)
    return log


def shown(log: PolicyLog) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        for line in status_lines(log, now_wall_s=log.canary_at_s):
            console.print(line, soft_wrap=True)
        console.print(arms_table(log) or "")
    return captured.get()


@pytest.mark.timeout(240)
async def test_a_worse_canary_is_rolled_back_by_the_judge_who_was_killed_in_the_middle(
    own_kafka: OwnKafka, tmp_path: Path
) -> None:
    await apply(own_kafka.bootstrap, SITES)
    await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 2), share=0.1, for_s=600.0))
    child = worker(own_kafka, tmp_path)
    child.start()
    async with Kafka(own_kafka.bootstrap, client_id="test") as kafka:
        await asyncio.sleep(1.0)
        await tell(kafka, first=0, count=60, canary=2, canary_ttft_s=4.0)
        log = await until(
            own_kafka, lambda log: log.report is not None and log.report.canary.requests == 60, child=child
        )
        assert log.report is not None
        assert (log.report.verdict, log.report.base.requests) == ("running", 60)
        assert "canary revision 2 running: 60 requests beside 60" in shown(log)
        child.kill()
        await tell(kafka, first=60, count=60, canary=2, canary_ttft_s=4.0)
        child.start()
        log = await until(own_kafka, lambda log: log.in_force is not None, child=child)
        log = await until(
            own_kafka, lambda log: log.report is not None and log.report.verdict != "running", child=child
        )
        assert log.in_force is not None
        assert (log.in_force.revision, log.in_force.by, log.canary) == (3, "automatic rollback", None)
        assert log.in_force.toml == renumbered(policy_text(), 3)
        assert "chat within service level 0.0% of 120, 100.0% of 120" in log.in_force.reason
        text = shown(log)
        assert "in force: revision 3 by automatic rollback: canary revision 2 rolled back: chat within" in text
        assert "100.0% of 120" in text
        child.kill()
        child.start()
        await asyncio.sleep(6.0)
        assert (await read_log(own_kafka.bootstrap)).greatest == 3, "another life publishes nothing more"
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


@pytest.mark.timeout(240)
async def test_one_no_worse_is_in_force_when_its_time_is_over(own_kafka: OwnKafka, tmp_path: Path) -> None:
    await apply(own_kafka.bootstrap, SITES)
    child = worker(own_kafka, tmp_path)
    child.start()
    async with Kafka(own_kafka.bootstrap, client_id="test") as kafka:
        await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 4), share=0.5, for_s=20.0))
        with pytest.raises(PolicyError, match="canary revision 4 is open"):
            await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 5), share=0.1, for_s=20.0))
        await asyncio.sleep(1.0)
        await tell(kafka, first=0, count=110, canary=4, canary_ttft_s=0.5)
        log = await until(own_kafka, lambda log: log.in_force is not None, child=child)
        assert log.in_force is not None
        assert (log.in_force.revision, log.in_force.by) == (4, "automatic promotion")
        assert log.in_force.reason == "canary revision 4 promoted: no worse over 110 requests beside 110 in 20 s"
        with pytest.raises(PolicyError, match="not above 4"):
            await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 4)))
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


async def test_an_operator_ends_a_canary_by_hand(own_kafka: OwnKafka, tmp_path: Path) -> None:
    await apply(own_kafka.bootstrap, SITES)
    with pytest.raises(PolicyError, match="no canary is open"):
        await roll_back(own_kafka.bootstrap, to=None, reason="")
    assert "the file each process was started with" in shown(await read_log(own_kafka.bootstrap))
    await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 2), share=0.1, for_s=600.0))
    assert "10.0% of requests, since 0 s for 600 s" in shown(await read_log(own_kafka.bootstrap))
    assert "does it run?" in shown(await read_log(own_kafka.bootstrap))
    with pytest.raises(PolicyError, match="by --to"):
        await roll_back(own_kafka.bootstrap, to=None, reason="")
    await roll_back(own_kafka.bootstrap, to=file(tmp_path, 1), reason="a hunch")
    log = await read_log(own_kafka.bootstrap)
    assert log.in_force is not None
    assert (log.in_force.revision, log.canary) == (3, None)
    assert log.in_force.reason == "canary revision 2 rolled back: a hunch"
    await publish(own_kafka.bootstrap, revision_in(file(tmp_path, 4), share=0.1, for_s=600.0))
    assert (await roll_back(own_kafka.bootstrap, to=None, reason="")).toml == renumbered(policy_text(), 5)
