"""Shard load: decide replicas of one site under requests, and what the log says of them afterwards."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec

from tests.adapters.desks import event, request
from tests.builders import beat, row, shard
from tests.loops import running
from tests.ports import free_port
from tests.processes.kept import Kept
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import BEGINNING, Record
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.adapters.topics import CAPACITY, PLACEMENTS, TICKETS
from tokenfleet.client.coming_again import come_again
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.records import Order
from tokenfleet.core.shard.fence import Fence
from tokenfleet.core.shard.records import (
    At,
    Grant,
    GrantUnused,
    Lease,
    ShardClaim,
    TicketEnded,
    TicketsWithdrawn,
    pool_book,
)
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

POOL = pool_book("small-chat@b")
KV_BLOCKS = 1600  # of 16 tokens
INSTANCES = 2
CEILING = 0.95
LIMIT = int(CEILING * INSTANCES * KV_BLOCKS * 16)
QUOTA = 60  # requests a minute of globex
CALL_MAX_S = 20.0
RETRIED = (decision_pb2.REASON_ALL_BUSY, decision_pb2.REASON_RETRY_BUDGET)


def policy_at(folder: Path, *, paced: bool) -> Path:
    """The shipped policy with the shard on and a limit for one tenant; `paced`: classes have queues too."""
    text = policy_text().replace("[tenants.globex]", f"[tenants.globex]\nrequests_per_minute_max = {QUOTA}")
    path = folder / "policy.toml"
    pacing = f"\n[slomax.pacing]\nenabled = {str(paced).lower()}\n"
    path.write_text(text + "\n[slomax.shard]\nenabled = true\nlease_share = 0.05\n" + pacing)
    slomax = parse_policy(path.read_text(), source="test").slomax
    assert (slomax.shard.enabled, slomax.pacing.enabled) == (True, paced)
    return path


class Replica(Kept):
    """One decide process of site b."""

    def __init__(self, bootstrap: str, folder: Path, number: int, **further: str) -> None:
        self.name, self.port = str(number), free_port()
        settings = further | {
            "KAFKA": bootstrap,
            "SITE": "b",
            "REPLICA": self.name,
            "LISTEN": f"127.0.0.1:{self.port}",
            "STATE_DIR": str(folder / f"state-{number}"),
            "POLICY": str(folder / "policy.toml"),
            "SHARD_SECRET": "of the test",
        }
        super().__init__("tokenfleet.processes.decide", settings, folder=folder, name=f"decide-{number}")


class Caller:
    """A gateway: it asks any replica, and another when one does not answer; what was answered, and for whom."""

    def __init__(self, replicas: list[Replica]) -> None:
        options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{each.port}", options=options) for each in replicas]
        self._next = 0
        self.answers: dict[str, decision_pb2.Decision] = {}
        self.refused: dict[str, int] = {}
        self.asked_again: set[str] = set()
        self.stops = False
        self.came_again = self.kept = 0  # with a ticket, and those whose place was kept

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def works(self, name: str, *, tenant: str = "acme", for_s: float = 0.6, pause_s: float = 0.0) -> None:
        """One client: request after request until told to stop, each until it is admitted."""
        number = 0
        while not self.stops:
            number += 1
            if (decision := await self.admitted(f"{name}-{number}", tenant)) is None:
                continue
            await asyncio.sleep(for_s)
            await self._ends(decision)
            await asyncio.sleep(pause_s)

    async def admitted(self, name: str, tenant: str) -> decision_pb2.Decision | None:
        """The admission of one logical request; None if a quota refused it."""
        asked = request(name, tenant=tenant, prompt_tokens=1000, max_tokens=200, wait_max_s=CALL_MAX_S - 5.0)
        began_s: float | None = None  # of the first call that is answered: replicas begin to serve late
        while True:
            asked_s = monotonic_s()
            try:
                stub: Any = scheduler_pb2_grpc.SchedulerStub(self._channel())
                reply = await stub.Schedule(scheduler_pb2.ScheduleRequest(request=asked), timeout=CALL_MAX_S)
            except grpc.aio.AioRpcError:
                self.asked_again.add(name)
                await asyncio.sleep(0.05)
                continue  # the same attempt: it keeps its place
            decision: decision_pb2.Decision = reply.decision
            self.kept += decision.returned == "kept"
            if decision.verdict == decision_pb2.VERDICT_ADMIT:
                assert name not in self.answers
                self.answers[name] = decision
                return decision
            reason = decision_pb2.Reason.Name(decision.reason)
            self.refused[reason] = self.refused.get(reason, 0) + 1
            if decision.reason == decision_pb2.REASON_QUOTA:
                await asyncio.sleep(0.5)
                return None
            assert decision.reason in RETRIED, f"{decision.sentence}; ticket {decision.returned}"
            began_s = asked_s if began_s is None else began_s
            await asyncio.sleep(decision.admission.retry_after_s)  # sooner it would use up its tenant's retries
            come_again(asked, decision, elapsed_s=monotonic_s() - began_s)
            self.came_again += bool(asked.return_ticket)

    async def _ends(self, decision: decision_pb2.Decision) -> None:
        told = event(decision.request, attempt=decision.attempt, decision=decision.id, instance=decision.target)
        told.tenant = decision.tenant
        told.kind = outcomes_pb2.OUTCOME_KIND_FINISHED
        while True:
            try:
                stub: Any = outcomes_pb2_grpc.OutcomesStub(self._channel())
                await stub.Report(iter([outcomes_pb2.ReportRequest(events=[told])]), timeout=2.0)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
            else:
                return

    def _channel(self) -> grpc.aio.Channel:
        self._next += 1
        return self._channels[self._next % len(self._channels)]


class Log:
    """All records of tickets and placements, as anybody reads them."""

    def __init__(self) -> None:
        self.tickets: list[Record[Any]] = []
        self.placements: list[Record[Any]] = []
        self.owners: dict[int, str] = {}

    @contextlib.asynccontextmanager
    async def following(self, kafka: Kafka) -> AsyncGenerator[None]:
        readers = [
            kafka.follower(TICKETS, "b", self._ticket, start=BEGINNING),
            kafka.follower(PLACEMENTS, "b", self.placements.append, start=BEGINNING),
        ]
        async with running(*(each.run() for each in readers)):
            yield

    def _ticket(self, record: Record[Any]) -> None:
        self.tickets.append(record)
        if isinstance(record.message, ShardClaim):
            self.owners[record.partition] = record.message.owner.replica

    def standing(self) -> list[Record[Any]]:
        """The records of the tickets topic that no later claim made void, by partition."""
        fences: dict[int, Fence] = {}
        return [
            record
            for record in self.tickets
            if fences.setdefault(record.partition, Fence()).read(
                record.message, At(cluster=record.cluster, offset=record.offset)
            )
        ]

    def owner(self, partition: int) -> str:
        """The replica whose claim was the last."""
        return self.owners.get(partition, "")

    def most_units(self) -> int:
        """The most KV tokens that ever ran, by the placements in the order in which the log took them."""
        ledger, most = Ledger(silent_max_s=1e9), 0
        for record in sorted(self.placements, key=lambda record: (record.appended_wall_s, record.partition)):
            ledger.hear(record.message, partition=record.partition, now_s=record.appended_wall_s)
            most = max(most, sum(entry.kv_tokens for entry in ledger.entries()))
        return most

    def granted_twice(self) -> list[str]:
        """Tickets that got a grant while another grant of theirs was neither given back, withdrawn nor long over: a
        ticket ends unheard after 10 s, its grant after 2."""
        out: dict[str, Order] = {}
        twice: list[str] = []
        for record in self.standing():
            match record.message:
                case Grant(ticket=ticket, grant=grant):
                    if out.setdefault(ticket, grant) != grant:
                        twice.append(ticket)
                case GrantUnused(ticket=ticket) | TicketEnded(ticket=ticket, why="unheard"):
                    out.pop(ticket, None)
                case TicketsWithdrawn(tickets=tickets):
                    for ticket in tickets:
                        out.pop(ticket, None)
                case _:
                    pass
        return twice

    def lends_again_s(self, killed_wall_s: float, partition: int) -> float | None:
        """Seconds from a kill to the first credit of another claim, None if there was none."""
        claimed = False
        for record in self.standing():
            if record.partition != partition or record.appended_wall_s < killed_wall_s:
                continue
            claimed = claimed or isinstance(record.message, ShardClaim)
            credit = record.message
            if claimed and (isinstance(credit, Grant) or (isinstance(credit, Lease) and credit.units)):
                return record.appended_wall_s - killed_wall_s
        return None


async def tells_capacity(kafka: Kafka) -> None:
    """Two idle instances, four times a second."""
    n = 0
    while True:
        n += 1
        order = Order(cluster=kafka.cluster_id, claim=1, n=n)
        beats = [beat(f"b-{i}", model_digest="small-chat@2026-08", kv_total_blocks=KV_BLOCKS) for i in range(INSTANCES)]
        rows = [row(msgspec.structs.replace(each, age_s=0.1), order=order) for each in beats]
        told = shard(*rows, n=n, cluster=kafka.cluster_id, period_s=0.25)
        with contextlib.suppress(ConnectionError):
            await kafka.send(CAPACITY, "b", [told], partition=0, key="0")
        await asyncio.sleep(0.25)
