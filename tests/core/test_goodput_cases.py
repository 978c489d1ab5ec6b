"""The table of cases, row by row: what each case gives in goodput, in waste and in attainment.

`test_goodput` has the terms and the sums under disorder; here each row of the table stands once, in its words.
"""

from typing import Any, Literal

import pytest

from tests.core.test_goodput import POLICY, Fleet, event, finished
from tokenfleet.core.records import OutcomeEvent, PlacedOn

Counts = Literal["met", "missed", "excluded", "offered only"]

PREFILLED: dict[str, Any] = {"output_tokens": 0, "prompt_tokens": 1000, "cached_tokens": 200}
STREAMED: dict[str, Any] = {"ttft_s": 0.5, "tpot_s": 0.03, "output_tokens": 40}
LATE: dict[str, Any] = {**STREAMED, "ttft_s": 2.5}
FAILED = event("failed", **STREAMED)
EXPIRED = event("timed_out", instance="", elapsed_s=1.0)

# case, what is heard of one logical request, goodput tokens, wasted tokens (prefill), attainment
CASES: tuple[tuple[str, list[OutcomeEvent], int, int, Counts], ...] = (
    ("met its SLO", [finished()], 100, 0, "met"),
    ("completed late", [finished(ttft_s=2.1)], 0, 100, "missed"),
    ("cancels before the first token, early", [event("cancelled", elapsed_s=1.9, **PREFILLED)], 0, 800, "excluded"),
    ("cancels before the first token, late", [event("cancelled", elapsed_s=2.1, **PREFILLED)], 0, 800, "missed"),
    ("cancels mid-stream, being met", [event("cancelled", **STREAMED)], 0, 40, "excluded"),
    ("cancels mid-stream, not being met", [event("cancelled", **LATE)], 0, 40, "missed"),
    ("timeout", [event("timed_out", **STREAMED)], 0, 40, "missed"),
    ("timeout before the first token", [event("timed_out", elapsed_s=9.0, **PREFILLED)], 0, 800, "missed"),
    ("deadline", [finished(request_class="batch", elapsed_s=101.0)], 0, 100, "missed"),
    ("stopped by max_tokens", [finished(stop="length")], 100, 0, "met"),
    ("engine error", [FAILED], 0, 40, "missed"),
    ("lost stream, twice", [FAILED, event("failed", attempt=1, at_s=2.0, **STREAMED)], 0, 80, "missed"),
    ("retried, then succeeded in time", [FAILED, finished(attempt=1, at_s=2.0)], 100, 40, "met"),
    ("retried, then succeeded late", [FAILED, finished(attempt=1, at_s=3.0, ttft_s=2.2)], 0, 140, "missed"),
    ("duplicate execution", [finished(), finished(attempt=1, at_s=2.0, output_tokens=60)], 100, 60, "met"),
    ("early reject", [event("rejected")], 0, 0, "offered only"),
    ("queue expiry", [EXPIRED], 0, 0, "offered only"),
    ("queue expiry, then an error", [EXPIRED, event("failed", attempt=1, **STREAMED)], 0, 40, "missed"),
    ("no SLO agreed", [finished(request_class="free")], 100, 0, "excluded"),
    ("zero tokens reported", [finished(output_tokens=0)], 0, 0, "met"),
    ("token count missing", [finished(output_tokens=None)], 0, 0, "met"),
)  # fmt: skip


def counted(sums: dict[str, int]) -> tuple[int, int, Counts]:
    """Goodput, waste and attainment; the logical request counts once."""
    kinds: dict[str, Counts] = {
        "met": "met", "missed": "missed", "excluded": "excluded", "rejected": "offered only"
    }  # fmt: skip
    [kind] = [kind for kind in kinds if sums.get(kind)]
    assert sums[kind] == 1
    assert sums.get("offered_arrived", 0) == (kind != "excluded")
    return sums.get("goodput_tokens", 0), sums.get("waste_tokens", 0) + sums.get("prefill_waste_tokens", 0), kinds[kind]


@pytest.mark.parametrize(("case", "heard", "goodput", "waste", "attainment"), CASES, ids=[case[0] for case in CASES])
def test_each_row_of_the_table(
    case: str, heard: list[OutcomeEvent], goodput: int, waste: int, attainment: Counts
) -> None:
    sums = Fleet().hear(*heard).sums()
    assert counted(sums) == (goodput, waste, attainment), case
    assert Fleet().hear(*heard, *reversed(heard)).sums() == sums, "said twice"


def test_no_terminal_event_is_missed_after_the_sweep_with_what_it_last_told_and_a_late_end_takes_it_back() -> None:
    fleet = Fleet().hear(event("first_token"), event("progress", at_s=5.0, output_tokens=40))
    assert "missed" not in fleet.sums()
    fleet.publish(after_s=POLICY.goodput.open_sweep_s + 20)
    assert counted(fleet.sums()) == (0, 40, "missed")
    fleet.hear(finished(at_s=6.0), source="c")
    assert counted(fleet.sums()) == (100, 0, "met")


def test_a_missing_token_count_is_told_as_unknown_and_never_as_zero() -> None:
    assert Fleet().hear(finished(output_tokens=None)).sums()["unknown_tokens_requests"] == 1
    assert "unknown_tokens_requests" not in Fleet().hear(finished(output_tokens=0)).sums()


def test_a_request_that_was_placed_did_not_expire_in_the_queue_though_nobody_named_its_instance() -> None:
    ran = event("timed_out", instance="", placed=PlacedOn(uncached_tokens=1000), **STREAMED)
    assert counted(Fleet().hear(ran).sums()) == (0, 40, "missed")
    started = event("started", instance="")
    assert counted(Fleet().hear(started, event("timed_out", instance="", **STREAMED)).sums()) == (0, 40, "missed")


def test_tokens_that_are_reported_twice_count_once_whatever_the_second_report_says() -> None:
    end = finished()
    assert counted(Fleet().hear(end, finished(at_s=1.5, output_tokens=900)).sums()) == (100, 0, "met")


def test_an_outcome_that_is_heard_before_its_decision_counts_like_any_other() -> None:
    """Goodput waits for no decision: the decisions topic is for people."""
    assert counted(Fleet().hear(finished(decision="")).sums()) == (100, 0, "met")
