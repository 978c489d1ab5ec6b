"""Export: what stands in PostgreSQL about a fleet's requests becomes a trace that the simulator reads."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec import Struct

from tests.builders import keys
from tokenfleet.adapters.audit_rows import decision_items, outcome_items
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.topics import DECISIONS, OUTCOMES
from tokenfleet.client import export_trace as module
from tokenfleet.client.export_command import moment_s
from tokenfleet.client.export_trace import Exported, Window, export_trace
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import BadRequestError, NotFoundError, SetupError
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope, OutcomeEvent
from tokenfleet.core.trace_line import TraceLine
from tokenfleet.sim.traces.read import read_trace

MIDNIGHT_S = datetime(2026, 1, 31, tzinfo=UTC).timestamp()
ALL = Window(since_s=MIDNIGHT_S - 3600.0, until_s=MIDNIGHT_S + 3600.0)

M = TypeVar("M", bound=Struct)


def decided(request: str, at_s: float, *, attempt: int = 0, verdict: Any = "admit", **facts: Any) -> Decision:
    known: dict[str, Any] = {"tenant": "acme", "model": "m", "request_class": "chat", "origin": "a", "site": "b"}
    return Decision(
        id=f"{request}.{attempt}.{verdict}",
        request=request,
        attempt=attempt,
        verdict=verdict,
        prompt_tokens=100,
        at_wall_s=MIDNIGHT_S + at_s,
        **(known | facts),
    )


def ended(request: str, *, attempt: int = 0, kind: Any = "finished", **facts: Any) -> OutcomeEvent:
    known: dict[str, Any] = {"output_tokens": 7, "instance": "b-0", "ttft_s": 0.5, "tpot_s": 0.02, "cached_tokens": 64}
    return OutcomeEvent(
        request=request,
        attempt=attempt,
        kind=kind,
        decision=f"{request}.{attempt}.admit",
        tenant="acme",
        request_class="chat",
        model="m",
        origin="a",
        site="b",
        at_wall_s=MIDNIGHT_S + 1.0,
        elapsed_s=1.0,
        **(known | facts),
    )


def record(topic: Any, message: M) -> Record[M]:
    return Record(topic=topic, site="a", partition=0, offset=0, cluster="k", live=True, message=message)


async def told(database: str, decisions: list[Decision], outcomes: list[OutcomeEvent], *, by: str = "a") -> None:
    """Into PostgreSQL by the audit process's own writer."""
    today = datetime.fromtimestamp(MIDNIGHT_S, UTC).date()
    async with Postgres(database) as postgres:
        store = AuditStore(postgres)
        envelope = DecisionEnvelope(site=by, replica="0", decisions=tuple(decisions))
        await store.add_decisions(decision_items([record(DECISIONS, envelope)]), today=today)
        events = OutcomeEnvelope(site=by, replica="0", sent_wall_s=MIDNIGHT_S, events=tuple(outcomes))
        await store.add_outcomes(outcome_items([record(OUTCOMES, events)]), today=today)
        assert store.quarantined == 0


def lines(path: Path) -> list[TraceLine]:
    return [msgspec.json.decode(line, type=TraceLine) for line in path.read_bytes().splitlines()]


@pytest.mark.integration
async def test_a_fleet_s_requests_come_back_as_the_rows_of_a_trace(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_ROWS", 3)  # several pages, across midnight
    await migrate(database)
    await told(
        database,
        [
            decided("late", 20.0),
            decided("early", -20.0, tenant="umbrella", request_class="batch"),
            decided("retried", 0.0),
            decided("retried", 5.0, attempt=1),
            decided("before", -4000.0),
            decided("before", 1.0, attempt=1),
            decided("moved", 6.0, verdict="redirect"),
            decided("moved", 6.1),
            decided("refused", 7.0, verdict="reject"),
            decided("open", 8.0),
            decided("silent", 9.0),
            decided("broken", 9.5),
            decided("other", 10.0, model="n"),
        ],
        [
            ended("late", kind="first_token", output_tokens=None),
            ended("late", prompt_tokens=120),
            ended("early"),
            ended("retried", kind="failed", output_tokens=4),
            ended("before", attempt=1),
            ended("retried", attempt=1, output_tokens=9),
            ended("moved", kind="cancelled", output_tokens=3),
            ended("refused", kind="rejected", output_tokens=0),
            ended("silent", output_tokens=None),
            ended("broken", kind="failed", output_tokens=0),
            ended("other"),
        ],
    )
    path = tmp_path / "own.jsonl"
    exported = await export_trace(database, msgspec.structs.replace(ALL, model="m"), path)
    assert exported == Exported(rows=4, refused=1, open=1, uncounted=2, without_keys=4)
    trace = read_trace(path)
    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in trace.rows] == [
        (0.0, 100, 7),
        (20.0, 100, 9),
        (26.0, 100, 3),
        (40.0, 120, 7),
    ]
    assert (trace.rows[0].tenant, trace.rows[0].request_class) == ("umbrella", "batch")
    early, retried, moved, _ = lines(path)
    assert (early.ttft_s, early.tpot_s, early.cached_tokens, early.instance) == (0.5, 0.02, 64, "b-0")
    assert retried.ttft_s is None, "its first token is not its second engine's alone"
    assert moved.id == "moved"


@pytest.mark.integration
async def test_block_keys_come_with_the_request_and_all_of_one_block_size(database: str, tmp_path: Path) -> None:
    await migrate(database)
    await told(database, [decided(name, at) for at, name in enumerate("abc")], [ended(name) for name in "abc"])
    async with Postgres(database) as postgres:  # as later versions write it
        for name, size in (("a", 32), ("b", 16)):
            body = msgspec.json.encode({"block_keys": keys(1, 2**64 - 1), "block_tokens": size}).decode()
            await postgres.fetch("update decisions set body = body || $1::jsonb where request = $2", body, name)
    path = tmp_path / "own.jsonl"
    assert (await export_trace(database, ALL, path)).without_keys == 2
    rows = read_trace(path).rows
    assert [row.hash_ids for row in rows] == [(1, 2**64 - 1), (), ()]
    assert {row.block_tokens for row in rows} == {32}


@pytest.mark.integration
async def test_the_origin_s_word_on_an_end_stands_before_the_serving_site_s(database: str, tmp_path: Path) -> None:
    await migrate(database)
    await told(database, [decided("r", 0.0)], [ended("r", output_tokens=5)])
    await told(database, [], [ended("r", output_tokens=6)], by="b")
    await export_trace(database, ALL, tmp_path / "t")
    assert [row.output_tokens for row in read_trace(tmp_path / "t").rows] == [5]


@pytest.mark.integration
async def test_where_nothing_can_be_exported_no_file_is_left(database: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(SetupError, match="UndefinedTableError"):
        await export_trace(database, ALL, path)
    await migrate(database)
    await told(database, [decided("r", 0.0, verdict="reject")], [])
    with pytest.raises(NotFoundError, match="1 refused"):
        await export_trace(database, ALL, path)
    with pytest.raises(SetupError, match="can't be written: No such file"):
        await export_trace(database, ALL, tmp_path / "no" / "t")
    assert not list(tmp_path.iterdir())


async def test_a_database_that_is_no_address_is_said(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="the database can't be read"):
        await export_trace("nonsense", ALL, tmp_path / "t")


@pytest.mark.parametrize(
    ("text", "at_s"),
    [
        ("30m", 8_200.0),
        ("1.5h", 4_600.0),
        ("2d", 0.0),
        ("1970-01-01T01:00Z", 3_600.0),
        ("1970-01-01", 0.0),
        ("1970-01-01T02:00+01:00", 3_600.0),
    ],
)
def test_a_moment_is_so_long_ago_or_a_time(text: str, at_s: float) -> None:
    assert moment_s("--since", text, now_s=10_000.0) == at_s


@pytest.mark.parametrize("text", ["", "h", "1w", "-1h", "yesterday"])
def test_other_moments_are_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match=r"--since: .* is neither like 30m"):
        moment_s("--since", text, now_s=10_000.0)
