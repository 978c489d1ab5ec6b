"""PostgreSQL: migrations from checkout and wheel, rows that can't sink a batch, bounded waits."""

import asyncio
import math
import subprocess
import venv
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from tests.postgres_server import execute
from tokenfleet.adapters.audit_rows import DECISION_ROWS, Item, decision_items, goodput_items, outcome_items
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Postgres, PostgresAwayError, migrate, migrations_dir
from tokenfleet.adapters.safe_text import KEY_BYTES_MAX, from_json, safe_json, safe_key, safe_moment
from tokenfleet.adapters.topics import DECISIONS, GOODPUT, OUTCOMES
from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.decision import Candidate, Decision
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope, OutcomeEvent

ROOT = Path(__file__).parents[2]
TODAY = date(2026, 11, 29)
NOON_S = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
MIDNIGHT_S = datetime(2026, 11, 29, tzinfo=UTC).timestamp()


def decision(id: str = "d", *, request: str = "r", **fields: Any) -> Decision:
    values: dict[str, Any] = {
        "attempt": 0,
        "verdict": "admit",
        "tenant": "acme",
        "model": "m",
        "request_class": "chat",
        "origin": "b",
        "prompt_tokens": 10,
        "at_wall_s": NOON_S,
    }
    return Decision(id=id, request=request, **{**values, **fields})


def outcome(request: str = "r", kind: str = "finished", *, attempt: int = 0, **fields: Any) -> OutcomeEvent:
    values: dict[str, Any] = {
        "decision": "d",
        "tenant": "acme",
        "request_class": "chat",
        "model": "m",
        "origin": "b",
        "elapsed_s": 1.0,
        "at_wall_s": NOON_S,
    }
    return OutcomeEvent(request=request, kind=kind, attempt=attempt, **{**values, **fields})  # type: ignore[arg-type]


def decided(*decisions: Decision, offset: int = 0) -> list[Item]:
    message = DecisionEnvelope(site="b", replica="0", decisions=decisions)
    return decision_items(
        [Record(topic=DECISIONS, site="b", cluster="k", partition=0, offset=offset, message=message, live=True)]
    )


def ended(*events: OutcomeEvent, site: str = "b") -> list[Item]:
    message = OutcomeEnvelope(site=site, replica="0", sent_wall_s=NOON_S, events=events)
    return outcome_items(
        [Record(topic=OUTCOMES, site=site, cluster="k", partition=0, offset=0, message=message, live=True)]
    )


def summed(*rows: GoodputRow, partition: int = 0) -> list[Item]:
    message = GoodputPartial(site="fleet", partition=partition, watermark_s=NOON_S, rows=rows, cluster="k")
    return goodput_items(
        [Record(topic=GOODPUT, site="", cluster="k", partition=0, offset=0, message=message, live=True)]
    )


@asynccontextmanager
async def opened(database: str) -> AsyncGenerator[AuditStore]:
    await migrate(database)
    async with Postgres(database) as postgres:
        yield AuditStore(postgres)


async def column(database: str, query: str) -> list[Any]:
    connection = await asyncpg.connect(database)
    try:
        return [row[0] for row in await connection.fetch(query)]
    finally:
        await connection.close()


@pytest.mark.integration
async def test_migrations_go_up_twice_and_down_again(database: str) -> None:
    await asyncio.gather(migrate(database), migrate(database))
    assert await column(database, "select count(*) from decisions") == [0]
    for migration in sorted((ROOT / "migrations").glob("*.sql"), reverse=True):
        await execute(database, migration.read_text().partition("-- migrate:down")[2])
    assert await column(database, "select relname from pg_class where relname in ('decisions', 'goodput')") == []


def test_every_migration_and_schema_is_linked_into_the_package() -> None:
    done = subprocess.run([ROOT / "tools" / "links", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in migrations_dir().glob("*.sql")} == {
        p.name for p in (ROOT / "migrations").glob("*.sql")
    }


def test_a_wheel_carries_the_migrations(tmp_path: Path) -> None:
    built = subprocess.run(
        ["uv", "build", "--offline", "--quiet", "--wheel", "--out-dir", tmp_path, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    if built.returncode != 0:
        pytest.skip(f"no build backend without a network: {built.stderr[-300:]}")
    venv.create(tmp_path / "venv", symlinks=True)
    [wheel] = tmp_path.glob("*.whl")
    interpreter = tmp_path / "venv" / "bin" / "python"
    subprocess.run(
        ["uv", "pip", "install", "--offline", "--quiet", "--no-deps", "--python", interpreter, wheel], check=True
    )
    script = (
        "from importlib.resources import files; print((files('tokenfleet') / 'migrations/0001_audit.sql').read_text())"
    )
    said = subprocess.run([interpreter, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert said.stdout.strip() == (ROOT / "migrations" / "0001_audit.sql").read_text().strip()


@pytest.mark.integration
async def test_rows_come_twice_and_stand_once(database: str) -> None:
    async with opened(database) as store:
        for _ in range(2):
            await store.add_decisions(decided(decision("one"), decision("two"), decision("two")), today=TODAY)
            await store.add_outcomes(ended(outcome(), outcome(kind="started"), outcome()), today=TODAY)
    assert await column(database, "select id from decisions order by id") == ["one", "two"]
    assert await column(database, "select kind from outcomes order by kind") == ["finished", "started"]
    assert await column(database, "select tableoid::regclass::text from decisions") == ["decisions_20261129"] * 2


@pytest.mark.integration
async def test_the_origins_and_the_serving_sites_word_both_stand(database: str) -> None:
    async with opened(database) as store:
        await store.add_outcomes([*ended(outcome()), *ended(outcome(), site="c")], today=TODAY)
    assert await column(database, "select at_origin from outcomes order by at_origin") == [False, True]


@pytest.mark.integration
async def test_one_event_labelled_on_both_sides_of_midnight_stands_once(database: str) -> None:
    before, after = outcome(at_wall_s=MIDNIGHT_S - 2), outcome(at_wall_s=MIDNIGHT_S + 2)
    async with opened(database) as store:
        await store.add_outcomes(ended(before), today=TODAY)
        await store.add_outcomes(ended(after), today=TODAY)
        await store.add_outcomes(
            ended(outcome("other", at_wall_s=MIDNIGHT_S - 1), outcome("other", at_wall_s=MIDNIGHT_S)), today=TODAY
        )
    assert await column(database, "select request from outcomes order by request") == ["other", "r"]


@pytest.mark.integration
async def test_labels_of_clocks_far_off_are_kept_apart(database: str) -> None:
    labels = (0.0, -5.0, math.nan, math.inf, NOON_S + 50 * 365 * 86400.0)
    async with opened(database) as store:
        await store.add_decisions(
            decided(*(decision(str(n), at_wall_s=at) for n, at in enumerate(labels))), today=TODAY
        )
        found = await store.decisions_like(filters=("", "", "", "", ""), since_s=None, until_s=None, limit=10)
    assert await column(database, "select count(*) from decisions_other") == [len(labels)]
    assert len(found) == len(labels)


@pytest.mark.integration
async def test_what_postgresql_refuses_is_made_harmless(database: str) -> None:
    nasty = decision(
        "nul\0",
        request="k" * 9000,
        tenant="t\0",
        sentence="a\0b",
        candidates=(Candidate(instance="i", cost_s=math.nan, ttft_s=math.inf, wait_s=0.0, work_s=0.0),),
    )
    async with opened(database) as store:
        await store.add_decisions(decided(nasty, decision("plain")), today=TODAY)
        [body], _ = await store.told_of("k" * 9000)
    read = from_json(body, Decision)
    assert read.sentence == "a\ufffdb"
    assert math.isnan(read.candidates[0].cost_s)
    assert await column(database, "select count(*) from quarantine") == [0]
    assert await column(database, "select tenant from decisions where id <> 'plain'") == ["t\ufffd"]


@pytest.mark.integration
async def test_a_row_that_is_refused_after_all_is_quarantined_and_the_rest_kept(database: str) -> None:
    items = decided(*(decision(f"d{n:03}") for n in range(100)), offset=7)
    attempt = DECISION_ROWS.columns.index("attempt")
    for number in (13, 64):
        row = list(items[number].row)
        row[attempt] = 2**80
        items[number] = items[number]._replace(row=tuple(row))
    async with opened(database) as store:
        await store.add_decisions(items, today=TODAY)
        await store.add_decisions(items, today=TODAY)
    assert await column(database, "select count(*) from decisions") == [98]
    assert await column(database, "select item from quarantine order by item") == [13, 64]
    assert await column(database, 'select distinct "offset" from quarantine') == [7]


@pytest.mark.integration
async def test_goodput_keeps_the_greatest_version_and_adds_partitions_up(database: str) -> None:
    def row(version: int, met: int, **sums: Any) -> GoodputRow:
        key: dict[str, Any] = {
            "start_s": NOON_S,
            "width_s": 10.0,
            "request_class": "chat",
            "tenant": "acme",
            "pool": "m@b",
        }
        return GoodputRow(version=version, met=met, **{**key, **sums})

    cost = row(1, 0, request_class="", tenant="", gpu_seconds=40.0, cost=8.0)
    async with opened(database) as store:
        await store.add_goodput(summed(row(1, 1), row(3, 3, goodput_tokens=100, output_tokens=200, missed=1), cost))
        await store.add_goodput(summed(row(2, 2)))
        await store.add_goodput(summed(row(1, 4, goodput_tokens=100, output_tokens=200, rejected=2), partition=1))
        [window] = await store.goodput_windows(
            width_s=10.0, request_class="chat", tenant="", since_s=None, until_s=None
        )
    assert (window["met"], window["goodput_tokens"], window["cost"]) == (7, 200, 8.0)
    assert window["attainment_admitted"] == pytest.approx(7 / 8)
    assert window["attainment_offered"] == pytest.approx(7 / 10)
    assert window["cost_per_million_goodput_tokens"] == pytest.approx(8.0 * 1e6 / 200)
    [idle] = await column(database, "select count(*) from goodput_windows where request_class = ''")
    assert idle == 0, "the pool had output, so its rows bear the cost"
    assert await column(database, "select cost from goodput_classes") == [8.0]


@pytest.mark.integration
async def test_days_are_dropped_whole(database: str) -> None:
    async with opened(database) as store:
        old = decision("old", at_wall_s=NOON_S - 10 * 86400)
        await store.add_decisions(decided(old, decision("new")), today=TODAY)
        assert await store.drop_before(date(2026, 11, 25)) == 2
        await store.add_decisions(decided(old), today=TODAY)
    assert await column(database, "select id from decisions order by id") == ["new", "old"]


@pytest.mark.integration
async def test_the_writers_role_can_add_and_read_and_nothing_else(database: str) -> None:
    async with opened(database) as store:
        await store.add_decisions(decided(decision()), today=TODAY)
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("set role tokenfleet_audit")
        assert await connection.fetchval("select count(*) from decisions") == 1
        await connection.execute("select audit_ensure_day('2026-11-20')")
        await connection.execute("insert into quarantine values ('t', 0, 0, 0, 'r')")
        for statement in (
            "delete from decisions",
            "update decisions set tenant = ''",
            "drop table decisions",
            "delete from goodput",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.integration
async def test_a_migration_under_open_connections_breaks_no_statement(database: str) -> None:
    async with opened(database) as store:
        for number in range(3):
            await store.add_decisions(decided(decision(f"before{number}")), today=TODAY)
            await store.decisions_like(filters=("", "", "", "", ""), since_s=None, until_s=None, limit=10)
        await execute(database, "alter table decisions add column more text")
        await store.add_decisions(decided(decision("after")), today=TODAY)
        bodies = await store.decisions_like(filters=("", "", "", "", ""), since_s=None, until_s=None, limit=10)
    assert len(bodies) == 4


async def test_nobody_there_is_away() -> None:
    async with Postgres("postgres://postgres@127.0.0.1:1/none") as postgres:
        with pytest.raises(PostgresAwayError):
            await postgres.fetch("select 1")


async def test_a_statement_between_the_servers_farewell_and_its_end_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ending:
        """A pool whose connection has read the server's farewell and not yet the end of the stream."""

        def acquire(self, *, timeout: float) -> None:
            raise asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")

    async def opened(postgres: Postgres) -> Ending:
        return Ending()

    monkeypatch.setattr(Postgres, "_opened", opened)
    with pytest.raises(PostgresAwayError, match="cannot switch"):
        await Postgres("postgres://nobody@127.0.0.1/nothing").fetch("select 1")


@pytest.mark.integration
async def test_missing_tables_are_away_and_not_the_rows_fault(database: str) -> None:
    async with Postgres(database) as postgres:
        with pytest.raises(PostgresAwayError):
            await AuditStore(postgres).add_decisions(decided(decision()), today=TODAY)


def test_text_is_made_safe() -> None:
    assert safe_key("x" * KEY_BYTES_MAX) == "x" * KEY_BYTES_MAX
    longer = [safe_key("é" * 300 + end) for end in ("a", "b", "a")]
    assert longer[0] == longer[2] != longer[1]
    assert all(len(text.encode()) <= KEY_BYTES_MAX for text in longer)
    assert safe_moment(math.nan) == safe_moment(-1.0) == datetime(1970, 1, 1, tzinfo=UTC)
    plain = decision(sentence="back\\u0000slash")
    assert from_json(safe_json(plain), Decision) == plain
    lone = msgspec.structs.replace(plain, sentence="\ud800")
    assert from_json(safe_json(lone), Decision).sentence == "\ufffd"
