"""Batch tickets in decide: replicas are killed and PostgreSQL goes away; each ticket is granted once and runs once."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.adapters.batch_rows import rows
from tests.adapters.desks import event, request
from tests.kafka_server import Can, OwnKafka
from tests.loops import running
from tests.postgres_proxy import Proxy
from tests.processes.shard_load import POOL, Log, Replica, tells_capacity
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.postgres import migrate
from tokenfleet.adapters.topics import POLICY, TICKETS, partition_of
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.revisions import PolicyRevision
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TICKETS_IN_ALL = 200
TAKES_S = 0.3
KILL_EVERY_S = 6.0
QUICK = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
TERMS = """
[slomax.shard]
enabled = true
lease_share = 0.2

[slomax.batch]
enabled = true
poll_min_s = 0.3
poll_max_s = 2.0
grant_s = 4.0
"""


class Gateway:
    """It hands each request in, comes again with its token, and reports how it ended, to whichever replica answers."""

    def __init__(self, replicas: list[Replica]) -> None:
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{each.port}", options=QUICK) for each in replicas]
        self._next = 0
        self.asked_again: set[str] = set()
        self.verdicts: Counter[str] = Counter()
        self.deferred: set[str] = set()

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def works(self, name: str) -> None:
        asked = request(name, task="batch", deadline_s=3_600.0, max_tokens=200)
        while True:
            try:
                stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel())
                reply = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=asked), timeout=5.0)
            except grpc.aio.AioRpcError:
                if asked.ticket:  # else a replica that starts said so
                    self.asked_again.add(name)
                await asyncio.sleep(0.1)
                continue
            decision: decision_pb2.Decision = reply.decision
            self.verdicts[
                f"{decision_pb2.Verdict.Name(decision.verdict)} {decision_pb2.Reason.Name(decision.reason)}"
            ] += 1
            if decision.HasField("ticket"):
                self.deferred.add(name)
                asked.ticket = decision.ticket.token
            if decision.verdict == decision_pb2.VERDICT_ADMIT:
                await asyncio.sleep(TAKES_S)
                await self._ends(decision)
                return
            admission = decision.admission
            await asyncio.sleep(min(2.0, max(admission.not_before_s, admission.retry_after_s)))

    async def _ends(self, decision: decision_pb2.Decision) -> None:
        told = event(decision.request, decision=decision.id, instance=decision.target, request_class="batch")
        while True:
            try:
                stub: Any = outcomes_pb2_grpc.OutcomesStub(self._channel())
                await stub.Report(iter([outcomes_pb2.ReportRequest(events=[told])]), timeout=2.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
            else:
                return

    def _channel(self) -> grpc.aio.Channel:
        self._next += 1
        return self._channels[self._next % len(self._channels)]


async def test_a_replica_that_starts_answers_no_batch_work_before_it_has_looked_for_tickets(
    own_kafka: OwnKafka, database: str, tmp_path: Path
) -> None:
    """It hears from the log that the policy wants tickets. Who has one would be refused as if it had none."""
    await asyncio.gather(apply(own_kafka.bootstrap, ("a", "b", "c", "d")), migrate(database))
    (tmp_path / "policy.toml").write_text(policy_text())
    wanted = policy_text().replace("revision = 1", "revision = 2", 1) + "\n[slomax.batch]\nenabled = true\n"
    assert parse_policy(wanted, source="test").slomax.batch.enabled
    replica = Replica(own_kafka.bootstrap, tmp_path, 0, POSTGRES=database)
    async with (
        Kafka(own_kafka.bootstrap, client_id="test") as kafka,
        running(tells_capacity(kafka)),
        grpc.aio.insecure_channel(f"127.0.0.1:{replica.port}", options=QUICK) as channel,
    ):
        revision = PolicyRevision(revision=2, toml=wanted, sha256="")
        await kafka.send(POLICY, "", [revision], key="policy", timeout_s=10.0)
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        replica.start()
        try:
            while True:
                asked = request("job", task="batch", deadline_s=3_600.0, max_tokens=200, local_only=True)
                try:
                    reply = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=asked), timeout=5.0)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
                    continue
                break
        finally:
            replica.end()
    assert reply.decision.HasField("ticket"), reply.decision.sentence


async def test_kills_of_the_owner_and_an_outage_of_postgresql_lose_no_ticket(
    own_kafka: OwnKafka, database: str, tmp_path: Path
) -> None:
    own_kafka.needs(Can.REBALANCE)
    await asyncio.gather(apply(own_kafka.bootstrap, ("a", "b", "c", "d")), migrate(database))
    proxy = Proxy(database)
    await proxy.join()
    (tmp_path / "policy.toml").write_text(policy_text() + TERMS)
    assert parse_policy(policy_text() + TERMS, source="test").slomax.batch.enabled
    replicas = [Replica(own_kafka.bootstrap, tmp_path, number, POSTGRES=proxy.dsn) for number in range(2)]
    for each in replicas:
        each.start()
    log, gateway = Log(), Gateway(replicas)
    killed: list[str] = []
    try:
        async with Kafka(own_kafka.bootstrap, client_id="test") as kafka, log.following(kafka):
            partition = partition_of(POOL, await kafka.partitions(TICKETS, "b"))
            telling = asyncio.create_task(tells_capacity(kafka))
            working = asyncio.gather(*(gateway.works(f"job-{i}") for i in range(TICKETS_IN_ALL)))
            while not await rows(database, "select from batch_tickets where used_at is not null limit 1"):
                await asyncio.sleep(0.2)
            for number in range(2):
                await asyncio.sleep(KILL_EVERY_S / 2)
                owner = next(each for each in replicas if each.name == log.owner(partition))
                killed.append(owner.name)
                owner.kill()
                if number:
                    await proxy.cut()
                await asyncio.sleep(KILL_EVERY_S / 2)
            await proxy.join()
            await working
            while (left := await rows(database, "select request from batch_tickets where state <> 'done'")) != []:
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
    finally:
        await gateway.close()
        for each in replicas:
            each.end()
        await proxy.cut()
    kept = await rows(database, "select count(*), sum(unused), max(epoch) from batch_tickets")
    print(f"\n{dict(gateway.verdicts)}, {len(gateway.deferred)} had tickets, {len(gateway.asked_again)} asked again")
    print(f"killed {killed}; rows, unused grants, last epoch: {kept}; {len(left)} left")
    placed = Counter(
        placed.request for record in log.placements for placed in record.message.events if placed.kind == "placed"
    )
    twice = {name for name, times in placed.items() if times > 1}
    print(f"{len(twice)} placed twice")
    assert set(placed) == {f"job-{i}" for i in range(TICKETS_IN_ALL)}
    assert twice <= gateway.asked_again  # only whose answer was lost with the replica that gave it
    assert kept[0][0] == len(gateway.deferred)
