"""The audit process: exactly one row each through kills and outages of PostgreSQL, and its answers over gRPC."""

import asyncio
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import asyncpg
import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace
from rich.console import Console

from tests.kafka_server import KafkaServer
from tests.ports import free_port
from tests.postgres_proxy import Proxy
from tests.processes.children import Child
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_admin import apply
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.safe_text import from_json
from tokenfleet.adapters.topics import DECISIONS, GOODPUT, OUTCOMES, POLICY, partition_of
from tokenfleet.client.policy_history import changes_table, history_rows
from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.decision import Decision
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope, OutcomeEvent, OutcomeKind
from tokenfleet.core.revisions import ArmFigures, CanaryReport, PolicyRecord, PolicyRevision, promotion_of
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import Setting
from tokenfleet.processes.audit import Writer
from tokenfleet.wire.v1 import audit_pb2, audit_pb2_grpc

pytestmark = pytest.mark.integration


def decision(request: str, site: str, *, attempt: int = 0) -> Decision:
    return Decision(
        id=f"{request}.{attempt}",
        request=request,
        attempt=attempt,
        verdict="admit",
        tenant="acme",
        model="m",
        request_class="chat",
        origin=site,
        site=site,
        target="i",
        prompt_tokens=10,
        sentence="because",
        at_wall_s=wall_s(),
    )


def outcome(request: str, site: str, kind: OutcomeKind, *, attempt: int = 0) -> OutcomeEvent:
    common: dict[str, Any] = {"tenant": "acme", "request_class": "chat", "model": "m", "origin": site}
    return OutcomeEvent(
        request=request,
        attempt=attempt,
        kind=kind,
        decision=f"{request}.{attempt}",
        at_wall_s=wall_s(),
        elapsed_s=1.0,
        **common,
    )


KINDS: tuple[OutcomeKind, ...] = ("started", "finished")


async def tell(kafka: Kafka, site: str, requests: list[str]) -> None:
    """A decision and two events of each request."""
    decisions = tuple(decision(request, site) for request in requests)
    await kafka.send(
        DECISIONS, site, [DecisionEnvelope(site=site, replica="0", decisions=decisions)], partition=0, timeout_s=10.0
    )
    for partition in range(OUTCOMES.partitions):
        ours = [request for request in requests if partition_of(request, OUTCOMES.partitions) == partition]
        events = tuple(outcome(request, site, kind) for request in ours for kind in KINDS)
        if events:
            envelope = OutcomeEnvelope(site=site, replica="0", sent_wall_s=wall_s(), events=events)
            await kafka.send(OUTCOMES, site, [envelope], partition=partition, timeout_s=10.0)


def worker(kafka: KafkaServer, dsn: str, folder: Path, sites: tuple[str, ...], *, port: int) -> Child:
    settings = {
        "KAFKA": kafka.bootstrap,
        "POSTGRES": dsn,
        "SITES": ",".join(sites),
        "STATE_DIR": str(folder / "state"),
        "LISTEN": f"127.0.0.1:{port}",
    }
    return Child("tokenfleet.processes.audit", settings, log_path=folder / "audit.log")


@asynccontextmanager
async def asking(database: str) -> AsyncGenerator[Callable[[str], Any]]:
    connection = await asyncpg.connect(database)
    try:
        yield connection.fetchval
    finally:
        await connection.close()


async def until(child: Child, count: Callable[[], Any], expected: int, *, wait_max_s: float = 60.0) -> None:
    give_up_s = monotonic_s() + wait_max_s
    while (found := await count()) != expected:
        if not child.running or monotonic_s() > give_up_s:
            pytest.fail(f"{found} instead of {expected}: {child.said()[-3000:]}")
        await asyncio.sleep(0.1)


def new_sites() -> tuple[str, str]:
    return f"x{uuid4().hex[:8]}", f"y{uuid4().hex[:8]}"


@pytest.mark.timeout(180)
async def test_killed_in_the_middle_every_row_stands_once(kafka: KafkaServer, database: str, tmp_path: Path) -> None:
    sites, rng = new_sites(), Random(3)
    await apply(kafka.bootstrap, sites)
    await migrate(database)
    child = worker(kafka, database, tmp_path, sites, port=free_port())
    async with Kafka(kafka.bootstrap, client_id="test") as link, asking(database) as ask:
        for life in range(4):
            child.start()
            for batch in range(20):
                await tell(link, sites[batch % 2], [f"{life}-{batch}-{n}" for n in range(10)])
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            child.kill()
        child.start()
        await until(child, lambda: ask("select count(*) from decisions"), 800)
        await until(child, lambda: ask("select count(*) from outcomes"), 1600)
        await asyncio.sleep(1.0)
        assert await ask("select count(*) from decisions") == 800
        assert await ask("select count(*) from (select distinct request, attempt, kind from outcomes)") == 1600
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


@pytest.mark.timeout(180)
async def test_postgresql_away_loses_nothing_and_is_said(kafka: KafkaServer, database: str, tmp_path: Path) -> None:
    sites = new_sites()
    await apply(kafka.bootstrap, sites)
    await migrate(database)
    proxy, port = Proxy(database), free_port()
    await proxy.join()
    child = worker(kafka, proxy.dsn, tmp_path, sites, port=port)
    child.start()
    async with Kafka(kafka.bootstrap, client_id="test") as link, asking(database) as ask:
        await tell(link, sites[0], ["before"])
        await until(child, lambda: ask("select count(*) from outcomes"), 2)
        await proxy.cut()
        for number in range(50):
            await tell(link, sites[number % 2], [f"{number}-{n}" for n in range(10)])
        await until(child, lambda: is_serving(port), False)
        assert "PostgreSQL is away" in child.said()
        assert await ask("select count(*) from decisions") == 1
        await proxy.join()
        await until(child, lambda: ask("select count(*) from decisions"), 501)
        await until(child, lambda: ask("select count(*) from outcomes"), 1002)
        await until(child, lambda: is_serving(port), True)
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]
    await proxy.cut()


async def is_serving(port: int) -> bool:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(
            health_pb2.HealthCheckRequest(service="tokenfleet.wire.v1.Audit"), timeout=10.0, wait_for_ready=True
        )
    return answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.timeout(120)
async def test_find_explain_and_goodput_answer_from_postgresql(
    kafka: KafkaServer, database: str, tmp_path: Path
) -> None:
    sites = new_sites()
    await apply(kafka.bootstrap, sites)
    await migrate(database)
    port = free_port()
    child = worker(kafka, database, tmp_path, sites, port=port)
    child.start()
    row = GoodputRow(
        start_s=600.0,
        width_s=60.0,
        request_class="chat",
        tenant=sites[0],
        pool="p",
        version=1,
        goodput_tokens=30,
        output_tokens=60,
        met=1,
        missed=1,
    )
    async with Kafka(kafka.bootstrap, client_id="test") as link, asking(database) as ask:
        await tell(link, sites[0], ["one", "two"])
        partial = GoodputPartial(site=sites[0], partition=0, watermark_s=700.0, rows=(row,))
        await link.send(GOODPUT, "", [partial], partition=0, timeout_s=10.0)
        await until(child, lambda: ask("select count(*) from outcomes"), 4)
        await until(child, lambda: ask(f"select count(*) from goodput where tenant = '{sites[0]}'"), 1)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            audit: Any = audit_pb2_grpc.AuditStub(channel)
            explained = await audit.Explain(audit_pb2.ExplainRequest(request_id="one"))
            found = await audit.Find(audit_pb2.FindRequest(tenant="acme", site=sites[0], limit=1))
            nothing = await audit.Find(audit_pb2.FindRequest(tenant="globex"))
            summed = await audit.Goodput(audit_pb2.GoodputRequest(window_s=60.0, tenant=sites[0]))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await audit.Explain(audit_pb2.ExplainRequest(request_id="three"))
            with pytest.raises(grpc.aio.AioRpcError) as too_many:
                await audit.Find(audit_pb2.FindRequest(limit=1001))
    assert [d.sentence for d in explained.decisions] == ["because"]
    assert [o.kind for o in explained.outcomes] == sorted(o.kind for o in explained.outcomes)
    assert len(explained.outcomes) == 2
    assert len(found.decisions) == 1
    assert not nothing.decisions
    [window] = summed.windows
    assert (window.goodput_tokens, window.attainment_admitted, window.goodput_tokens_per_s) == (30, 0.5, 0.5)
    assert not window.HasField("cost_per_million_goodput_tokens") or window.cost_per_million_goodput_tokens == 0.0
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert too_many.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert child.stop(signal.SIGTERM) == 0, child.said()[-3000:]


async def test_a_batch_waits_for_the_migration(database: str) -> None:
    async with Postgres(database) as postgres:
        writer = Writer(AuditStore(postgres))
        message = DecisionEnvelope(site="b", replica="0", decisions=(decision("r", "b"),))
        record = Record(topic=DECISIONS, site="b", cluster="k", partition=0, offset=0, message=message, live=True)
        writing = asyncio.create_task(writer.decisions([record]))
        await asyncio.sleep(0.3)
        assert not writing.done()
        assert not writer.state()[0]
        await migrate(database)
        await asyncio.wait_for(writing, 20.0)
        assert writer.state()[0]


async def test_every_published_policy_is_a_row_however_often_it_is_read(database: str) -> None:
    await migrate(database)
    tried = PolicyRevision(
        revision=2, toml="revision = 2", sha256="ab" * 32, by="ann", canary_share=0.1, canary_for_s=60.0, reason="new\0"
    )
    report = CanaryReport(
        base=ArmFigures(revision=1),
        canary=ArmFigures(revision=2),
        elapsed_s=60.0,
        for_s=60.0,
        verdict="promoted",
        reason="no worse",
    )
    promoted = promotion_of(tried, by="automatic promotion", reason="no worse", at_wall_s=wall_s())
    told: tuple[PolicyRecord, ...] = (tried, report, promoted)
    records = [
        Record(topic=POLICY, site="", cluster="c", partition=0, offset=offset, message=message, live=True)
        for offset, message in enumerate(told)
    ]
    async with Postgres(database) as postgres:
        store = AuditStore(postgres)
        for _ in range(2):
            await Writer(store).revisions(records)
        assert store.quarantined == 0
        rows = await postgres.fetch("select * from policy_revisions order by canary desc")
    assert [(row["revision"], row["canary"], row["published_by"], row["canary_share"]) for row in rows] == [
        (2, True, "ann", 0.1),
        (2, False, "automatic promotion", 1.0),
    ]
    assert rows[1]["reason"] == "canary revision 2 promoted: no worse"
    assert {row["toml"] for row in rows} == {"revision = 2"}


async def test_every_change_of_shares_is_a_row_with_old_new_and_why_and_is_told(database: str) -> None:
    await migrate(database)
    change = ShareRevision(
        pool="small-chat@b",
        number=1,
        at_s=1.8e9,
        kind="step",
        old=Setting(shares={"chat": 0.5, "batch": 0.5}, ceiling=0.95),
        new=Setting(shares={"chat": 0.53, "batch": 0.47}, ceiling=0.855),
        why="chat 70.0% of 98.0%",
    )
    by_hand = PolicyRevision(
        revision=2, toml="revision = 2", sha256="ab" * 32, by="ann", reason="a guess", at_wall_s=1.8e9
    )
    other = replace(change, pool="large-chat@b", kind="static", new=change.old, old=change.new, why="switched off")
    stepped = PolicyRevision(
        revision=3, toml="revision = 3", sha256="cd" * 32, by="controller", shares=(change, other), at_wall_s=1.8e9
    )
    records = [
        Record(topic=POLICY, site="", cluster="c", partition=0, offset=offset, message=message, live=True)
        for offset, message in enumerate((by_hand, stepped))
    ]
    async with Postgres(database) as postgres:
        store = AuditStore(postgres)
        for _ in range(2):
            await Writer(store).revisions(records)
        assert store.quarantined == 0
        rows = await postgres.fetch("select * from share_changes where kind = 'step'")
    (row,) = rows
    assert (row["revision"], row["pool"], row["why"]) == (3, "small-chat@b", "chat 70.0% of 98.0%")
    assert (from_json(row["before"], Setting), from_json(row["after"], Setting)) == (change.old, change.new)
    assert row["window_end"].timestamp() == 1.8e9
    console = Console(width=160)
    with console.capture() as captured:
        console.print(changes_table(await history_rows(database)))
    first, second, third = [line for line in captured.get().splitlines() if "2027-01-15" in line]
    assert first.split()[0] == second.split()[0] == "3"
    assert "large-chat@b" in first
    assert "static: switched off" in first
    assert "chat 50.0% → 53.0%, batch 50.0% → 47.0%, ceiling 95.0% → 85.5%" in second
    assert "a guess" in third
    assert "ann" in third
