"""Replay command: from a file and from PostgreSQL, what is reproduced, what differs, and what other weights change."""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.test_cli import complaint, tokenfleet
from tokenfleet.adapters.audit_rows import decision_items
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.safe_text import safe_json
from tokenfleet.adapters.topics import DECISIONS
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.decision import Decision
from tokenfleet.core.records import DecisionEnvelope


def decided(count: int = 6) -> list[Decision]:
    """Decisions of a site of three instances."""
    town = Town("b", small=3)
    return [town.place(asked(f"r{n}", prompt_tokens=4000), steps=ROUTE) for n in range(count)]


def forged(decision: Decision) -> Decision:
    """One whose target its own evidence does not give."""
    first, second, *others = decision.candidates
    dear = replace(second, kv_s=9.0 + second.kv_s, cost_s=9.0 + second.cost_s)
    return replace(decision, target=second.instance, runner_up="", candidates=(dear, first, *others))


def written(folder: Path, decisions: Sequence[Decision]) -> str:
    file = folder / "decisions.jsonl"
    file.write_text("".join(safe_json(each) + "\n" for each in decisions))
    return str(file)


def test_a_file_of_decisions_is_replayed_and_a_forged_one_is_told(tmp_path: Path) -> None:
    decisions = decided()
    good = tokenfleet("replay", "--file", written(tmp_path, decisions))
    assert (good.returncode, good.stderr) == (0, "")
    assert "6 decisions, 6 of them chose" in good.stdout
    assert "0 differ" in good.stdout
    file = written(tmp_path, [*decisions[:5], forged(decisions[5])])
    bad = tokenfleet("replay", "--file", file)
    assert bad.returncode == 1
    assert "1 differ" in bad.stdout
    assert f"r5 [{decisions[5].id}]: recorded" in bad.stdout
    assert tokenfleet("replay", "r1", "--file", file).stdout.startswith("1 decisions")
    figures = json.loads(tokenfleet("replay", "--file", file, "--json").stdout)
    assert [each["request"] for each in figures["different"]] == ["r5"]
    assert figures["decisions"] == 6


def test_other_weights_tell_how_many_choices_change(tmp_path: Path) -> None:
    town = Town("b", small=2)
    decisions: list[Decision] = []
    for n in range(12):
        decisions.append(town.place(asked(f"r{n}", prompt_tokens=4000, session="s"), steps=ROUTE))
        town.now_s += 0.01
    told = tokenfleet(
        *("replay", "--file", written(tmp_path, decisions)),
        *("--weights", "session_gain_min_s=0", "--weights", "session_gain_min_share=0"),
    )
    assert (told.returncode, told.stderr) == (0, "")  # a change is what was asked for, no failure
    assert "under session_gain_min_s = 0, session_gain_min_share = 0:" in told.stdout
    assert "0 would choose otherwise" not in told.stdout


def test_what_can_not_be_replayed_is_told_in_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, decided(1))
    assert "no decision is recorded of 'nobody'" in complaint("replay", "nobody", "--file", file)
    assert "'1x' is not a number with s, m, h or d" in complaint(
        "replay", "--since", "1x", "--postgres", "postgres://x"
    )
    assert "'reuse' is not NAME=NUMBER" in complaint("replay", "--file", file, "--weights", "reuse")
    assert "there is: decode_price_s" in complaint("replay", "--file", file, "--weights", "kv_knee=0.5")
    assert "can't be read" in complaint("replay", "--file", str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    assert "no decision is recorded in" in complaint("replay", "--file", str(tmp_path / "empty"))
    (tmp_path / "bad").write_text(Path(file).read_text() + "{}\n")
    assert f"{tmp_path / 'bad'}:2: no decision" in complaint("replay", "--file", str(tmp_path / "bad"))


def test_decisions_under_another_policy_are_said_to_be(tmp_path: Path) -> None:
    told = tokenfleet("replay", "--file", written(tmp_path, [replace(each, policy_revision=7) for each in decided(2)]))
    assert "2 were made under policy revision 7, replayed with the limits of 1" in told.stdout


@pytest.mark.integration
async def test_recorded_decisions_are_read_from_postgresql(database: str) -> None:
    await migrate(database)
    now_s = time.time()
    decisions = [replace(each, at_wall_s=now_s - 100 * n) for n, each in enumerate(decided(4))]
    envelope = DecisionEnvelope(site="b", replica="0", decisions=tuple(decisions))
    record = Record(topic=DECISIONS, site="b", cluster="c", partition=0, offset=0, message=envelope, live=True)
    async with Postgres(database) as postgres:
        await AuditStore(postgres).add_decisions(decision_items([record]), today=datetime.now(UTC).date())

    async def said(*words: str) -> str:
        done = await asyncio.to_thread(tokenfleet, "replay", *words, "--postgres", database)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert "4 decisions" in await said()
    assert "2 decisions" in await said("--since", "150s")
    assert "1 decisions" in await said("r2")
    assert "only the newest 3 were read" in await said("--limit", "3")
