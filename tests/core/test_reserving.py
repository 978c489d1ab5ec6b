"""Reserving: what batch and long work must leave free where classes have no queues."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.paced_towns import PACED, town
from tokenfleet.core.asked import Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.policy import ClassQueue

HERE = Steps(admission=True, routing=True)  # FleetMind has a ceiling of its own
BATCH: dict[str, Any] = {"declared_class": "batch", "prompt_tokens": 4_000}


def full(b: Town, most: int = 200) -> list[Decision]:
    """Batch jobs until one is told to come later; each that runs has begun to decode."""
    running: list[Decision] = []
    for number in range(most):
        decision = b.place(asked(f"batch-{number}", **BATCH), steps=HERE)
        if decision.verdict != "admit":
            return [*running, decision]
        b.hears_outcome(decision, "first_token", ttft_s=0.2)
        running.append(decision)
    raise AssertionError("batch takes the whole pool")


def roomy(small: int = 2) -> Town:
    """No class is bounded in numbers."""
    b = Town("b", small=small)
    classes = {
        name: replace(terms, running_max_per_instance=10_000, backlog_max_s=1e6)
        for name, terms in b.site.policy.classes.items()
    }
    b.site.adopt(replace(b.site.policy, classes=classes))
    b.site.returns.sign_with(b"key", issuer="0/1")
    return b


def test_batch_leaves_a_part_of_the_pool_to_interactive_requests_and_is_told_when_to_come() -> None:
    b = roomy()
    *running, later = full(b)
    assert len(running) > 10
    assert (later.verdict, later.reason) in {("defer", "all_busy"), ("reject", "all_busy")}
    assert "kept for interactive requests" in later.detail
    assert later.return_ticket
    assert b.place(asked("chat"), steps=HERE).verdict == "admit"


def test_what_ends_leaves_room_for_the_next() -> None:
    b = roomy()
    *running, _ = full(b)
    for each in running[:5]:
        b.hears_outcome(each, "finished", output_tokens=10)
    b.hears_telemetry()
    assert b.place(asked("next", **BATCH), steps=HERE).verdict == "admit"


def test_one_of_theirs_runs_at_any_time_and_what_is_larger_than_the_rest_is_not_shut_out() -> None:
    b = roomy(small=1)
    assert b.place(asked("first", declared_class="long", prompt_tokens=100_000)).verdict == "admit"


@pytest.mark.parametrize("off", ["switch", "queues"])
def test_nothing_is_kept_free_where_it_is_off_or_classes_have_queues(off: str) -> None:
    if off == "queues":
        b = town(small=2, pacing=PACED)
        assert b.place(asked("batch", wait_max_s=60.0, **BATCH)).verdict in ("admit", "queue")
        assert "kept for interactive" not in b.place(asked("b2", wait_max_s=60.0, **BATCH)).detail
        return
    b = roomy()
    reserve = replace(b.site.policy.slomax.reserve, enabled=False)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, reserve=reserve)))
    with pytest.raises(AssertionError, match="batch takes the whole pool"):
        full(b, most=60)


def test_without_a_guarded_class_nobody_is_kept_from_anything() -> None:
    b = roomy()
    classes = {name: replace(terms, queue=ClassQueue(role="filling")) for name, terms in b.site.policy.classes.items()}
    b.site.adopt(replace(b.site.policy, classes=classes))
    with pytest.raises(AssertionError, match="batch takes the whole pool"):
        full(b, most=60)
