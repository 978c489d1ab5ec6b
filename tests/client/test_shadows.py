"""Shadows as their operator sees them: from recorded decisions and outcomes, added up by PostgreSQL."""

from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from tokenfleet.adapters.audit_rows import decision_items, outcome_items
from tokenfleet.adapters.audit_store import AuditStore
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.topics import DECISIONS, OUTCOMES
from tokenfleet.client.shadows import shadow_rows, shadows_table
from tokenfleet.core.decision import Decision, Regret, ShadowChoice
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope, OutcomeEvent

pytestmark = pytest.mark.integration

AT_WALL_S = 1.8e9


def decision(request: str, **facts: Any) -> Decision:
    known: dict[str, Any] = {"tenant": "acme", "model": "m", "request_class": "chat", "origin": "b", "verdict": "admit"}
    return Decision(
        id=f"d-{request}",
        request=request,
        attempt=0,
        target="i",
        prompt_tokens=1000,
        sentence="because",
        policy_revision=3,
        at_wall_s=AT_WALL_S,
        **(known | facts),
    )


def shadow(name: str, instance: str, *, regret_s: float, hit_tokens: int) -> ShadowChoice:
    return ShadowChoice(
        shadow=name, instance=instance, cost_s=1.0, ttft_s=0.5, regret_s=regret_s, hit_tokens=hit_tokens
    )


def finished(request: str, cached_tokens: int | None) -> OutcomeEvent:
    return OutcomeEvent(
        request=request,
        attempt=0,
        kind="finished",
        decision=f"d-{request}",
        tenant="acme",
        request_class="chat",
        model="m",
        origin="b",
        at_wall_s=AT_WALL_S,
        elapsed_s=1.0,
        cached_tokens=cached_tokens,
    )


async def test_what_shadows_would_have_done_is_added_up_beside_what_was_delivered(database: str) -> None:
    await migrate(database, wait_max_s=10.0)
    decisions = (
        decision(
            "r1",
            shadows=(
                shadow("greedy", "j", regret_s=-0.2, hit_tokens=0),
                shadow("loyal", "i", regret_s=0.0, hit_tokens=512),
            ),
            regret=Regret(available_tokens=768, captured_tokens=512, ttft_s=0.2),
        ),
        decision(
            "r2",
            shadows=(
                shadow("greedy", "i", regret_s=0.0, hit_tokens=256),
                shadow("loyal", "k", regret_s=0.3, hit_tokens=256),
            ),
            regret=Regret(available_tokens=256, captured_tokens=256, ttft_s=0.0),
        ),
        decision(
            "unreported",
            shadows=(shadow("greedy", "j", regret_s=-0.1, hit_tokens=9999),),
            regret=Regret(available_tokens=9999, captured_tokens=0, ttft_s=0.1),
        ),
        decision("not-sampled"),
        decision("held", shadows=(shadow("greedy", "j", regret_s=9.0, hit_tokens=0),), verdict="queue"),
    )
    outcomes = (finished("r1", 500), finished("r2", 256), finished("unreported", None), finished("not-sampled", 77))
    today = datetime.fromtimestamp(AT_WALL_S, UTC).date()
    async with Postgres(database) as postgres:
        store = AuditStore(postgres)
        told = DecisionEnvelope(site="b", replica="0", decisions=decisions)
        await store.add_decisions(decision_items([_record(DECISIONS, told)]), today=today)
        ended = OutcomeEnvelope(site="b", replica="0", sent_wall_s=AT_WALL_S, events=outcomes)
        await store.add_outcomes(outcome_items([_record(OUTCOMES, ended)]), today=today)
        assert store.quarantined == 0
    greedy, loyal = await shadow_rows(database)
    assert (greedy.shadow, greedy.policy_revision, greedy.decisions, greedy.differing) == ("greedy", 3, 3, 2)
    assert greedy.mean_regret_s == pytest.approx(-0.1)
    assert greedy.mean_decision_regret_s == pytest.approx(0.1)
    assert (greedy.told, greedy.available_tokens, greedy.captured_tokens) == (2, 1024, 768)
    assert (greedy.shadow_captured_tokens, greedy.delivered_tokens) == (256, 756)
    assert (loyal.decisions, loyal.differing, loyal.shadow_captured_tokens) == (2, 1, 768)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(shadows_table([greedy, loyal]))
    lines = [line.split() for line in captured.get().splitlines() if "greedy" in line or "loyal" in line]
    assert lines == [
        ["3", "greedy", "3", "66.7%", "-100.0", "+100.0", "1,024", "75.0%", "25.0%", "73.8%"],
        ["3", "loyal", "2", "50.0%", "+150.0", "+100.0", "1,024", "75.0%", "75.0%", "73.8%"],
    ]


def _record(topic: Any, message: Any) -> Record[Any]:
    return Record(topic=topic, site="b", cluster="k", partition=0, offset=0, message=message, live=True)
