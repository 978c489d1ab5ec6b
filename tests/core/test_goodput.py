"""The accounting table row by row, and its sums under duplicates, reordering, lateness and replay."""

import math
from collections.abc import Iterable
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.core.accounts import GoodputPartial
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.table import SUMMED, GoodputTable
from tokenfleet.core.policy import GoodputPolicy, Policy, RequestClass, Tenant
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent

T0 = 1_800_000_000.0  # a multiple of every window
POLICY = Policy(
    classes={
        "chat": RequestClass(ttft_s=2.0, tpot_s=0.05),
        "long": RequestClass(ttft_s=6.0, ttft_per_token_s=0.001, tpot_s=0.15),
        "batch": RequestClass(deadline_s=100.0),
        "free": RequestClass(),
    },
    tenants={"acme": Tenant()},
    models={},
    sites={},
)
SOURCES = ("b", "c")


def event(kind: str, *, at_s: float = 1.0, request: str = "r", attempt: int = 0, **fields: Any) -> OutcomeEvent:
    values: dict[str, Any] = {
        "request_class": "chat",
        "tenant": "acme",
        "model": "m",
        "origin": "b",
        "decision": f"{request}.{attempt}",
        "instance": "" if kind == "rejected" else "i",
        "pool": "m@b",
        "elapsed_s": 1.0,
    }
    return OutcomeEvent(request=request, attempt=attempt, kind=kind, at_wall_s=T0 + at_s, **{**values, **fields})  # type: ignore[arg-type]


def finished(**fields: Any) -> OutcomeEvent:
    values: dict[str, Any] = {
        "output_tokens": 100,
        "ttft_s": 0.5,
        "tpot_s": 0.03,
        "prompt_tokens": 1000,
        "cached_tokens": 200,
    }
    return event("finished", **{**values, **fields})


class Fleet:
    """One partition's goodput and a reader of what it publishes. Broker time is event time plus `delay_s`."""

    def __init__(self, **options: Any) -> None:
        self.partition = PartitionGoodput(POLICY, sources=SOURCES, **options)
        self.table = GoodputTable()
        self.published: list[GoodputPartial] = []
        self.now_s = 0.0
        for source in SOURCES:
            self.partition.caught_up(source)

    def hear(self, *events: OutcomeEvent, source: str = "b", appended_s: float | None = None) -> "Fleet":
        for one in events:
            appended_wall_s = one.at_wall_s if appended_s is None else T0 + appended_s
            envelope = OutcomeEnvelope(site=source, replica="0", sent_wall_s=appended_wall_s, events=(one,))
            self.partition.hear(source, envelope, appended_wall_s=appended_wall_s, now_s=self.now_s)
        return self

    def publish(self, after_s: float = 0.0) -> "Fleet":
        self.now_s += after_s
        for partial in self.partition.partials(site="b", partition=0, cluster="k", now_s=self.now_s):
            self.published.append(partial)
            self.table.hear(partial)
        return self

    def sums(self, request_class: str | None = None, *, width_s: float = 10.0) -> dict[str, int]:
        """All non-zero sums that a reader sees, of one class or all."""
        self.publish()
        rows = [row for row in self.table.published(cluster="k", site="b", partition=0) if row.width_s == width_s]
        rows = [row for row in rows if request_class in (None, row.request_class)]
        totals = {column: sum(getattr(row, column) for row in rows) for column in SUMMED}
        return {column: total for column, total in totals.items() if total}


MET = {"met": 1, "goodput_tokens": 100, "output_tokens": 100, "met_arrived": 1, "offered_arrived": 1}
MISSED = {"missed": 1, "waste_tokens": 100, "output_tokens": 100, "offered_arrived": 1}
CANCELLED_EARLY: dict[str, Any] = {"output_tokens": 0, "prompt_tokens": 1000, "cached_tokens": 200}


@pytest.mark.parametrize(
    ("heard", "counted"),
    [
        pytest.param([finished()], MET, id="met its SLO"),
        pytest.param([finished(ttft_s=2.1)], MISSED, id="completed late: first token"),
        pytest.param([finished(tpot_s=0.051)], MISSED, id="completed late: tokens"),
        pytest.param(
            [finished(tpot_s=9.0, output_tokens=7)],
            {**MET, "goodput_tokens": 7, "output_tokens": 7},
            id="below 8 tokens only the first counts",
        ),
        pytest.param([finished(request_class="long", ttft_s=6.9)], MET, id="long: the prompt's length gives time"),
        pytest.param([finished(request_class="long", ttft_s=7.1)], MISSED, id="long: but no more than that"),
        pytest.param([finished(request_class="batch", ttft_s=None, elapsed_s=99.0)], MET, id="batch: in time"),
        pytest.param([finished(request_class="batch", ttft_s=None, elapsed_s=101.0)], MISSED, id="batch: too late"),
        pytest.param([finished(ttft_s=None, elapsed_s=1.9)], MET, id="not streamed, all of it in time"),
        pytest.param(
            [finished(ttft_s=None, tpot_s=None, elapsed_s=1.9)], MISSED, id="a term that can't be shown is missed"
        ),
        pytest.param([finished(ttft_s=math.nan)], MISSED, id="NaN meets nothing"),
        pytest.param(
            [event("cancelled", elapsed_s=1.9, **CANCELLED_EARLY)],
            {"excluded": 1, "prefill_waste_tokens": 800},
            id="cancelled before the first token, in time",
        ),
        pytest.param(
            [event("cancelled", elapsed_s=2.0, **CANCELLED_EARLY)],
            {"missed": 1, "prefill_waste_tokens": 800, "offered_arrived": 1},
            id="cancelled before the first token, too late",
        ),
        pytest.param(
            [event("cancelled", instance="", elapsed_s=1.0)],
            {"excluded": 1},
            id="cancelled in the queue: nothing ran",
        ),
        pytest.param(
            [event("cancelled", ttft_s=0.5, tpot_s=0.03, output_tokens=100)],
            {"excluded": 1, "waste_tokens": 100, "output_tokens": 100},
            id="cancelled mid-stream, being met",
        ),
        pytest.param(
            [event("first_token", elapsed_s=2.5), event("cancelled", at_s=2, tpot_s=0.03, output_tokens=100)],
            MISSED,
            id="cancelled mid-stream, already missed by the first token's own event",
        ),
        pytest.param([event("timed_out", ttft_s=0.5, tpot_s=0.03, output_tokens=100)], MISSED, id="timeout"),
        pytest.param([finished(stop="length")], MET, id="stopped by max_tokens"),
        pytest.param([event("failed", ttft_s=0.5, tpot_s=0.03, output_tokens=100)], MISSED, id="engine error"),
        pytest.param(
            [
                event("failed", ttft_s=0.4, output_tokens=7),
                event("failed", attempt=1, at_s=2, ttft_s=0.5, output_tokens=93),
            ],
            MISSED,
            id="two attempts fail: missed once",
        ),
        pytest.param(
            [event("failed", ttft_s=0.4, output_tokens=30), finished(attempt=1, at_s=3)],
            {**MET, "waste_tokens": 30, "output_tokens": 130},
            id="retried, then succeeded",
        ),
        pytest.param(
            [event("failed", ttft_s=0.4, output_tokens=30), finished(attempt=1, at_s=3, ttft_s=2.5)],
            {**MISSED, "waste_tokens": 130, "output_tokens": 130},
            id="retried, then succeeded past the logical clock",
        ),
        pytest.param(
            [finished(at_s=2), finished(attempt=1, at_s=3, output_tokens=40)],
            {**MET, "waste_tokens": 40, "output_tokens": 140},
            id="duplicate execution",
        ),
        pytest.param(
            [finished(attempt=1, at_s=3, output_tokens=40), finished(at_s=2)],
            {**MET, "waste_tokens": 40, "output_tokens": 140},
            id="the first success is the first in event time, whichever came first",
        ),
        pytest.param([event("rejected", instance="")], {"rejected": 1, "offered_arrived": 1}, id="early reject"),
        pytest.param([event("rejected"), finished(attempt=1, at_s=3)], MET, id="rejected, came back, met"),
        pytest.param(
            [finished(request_class="free", ttft_s=99.0)],
            {"excluded": 1, "goodput_tokens": 100, "output_tokens": 100},
            id="no SLO agreed",
        ),
        pytest.param(
            [finished(output_tokens=0)],
            {"met": 1, "met_arrived": 1, "offered_arrived": 1},
            id="zero tokens are zero",
        ),
        pytest.param(
            [finished(output_tokens=None)],
            {"met": 1, "unknown_tokens_requests": 1, "met_arrived": 1, "offered_arrived": 1},
            id="no count is unknown",
        ),
        pytest.param([event("started"), event("first_token")], {"offered_arrived": 1}, id="still running"),
    ],
)
def test_each_row_of_the_accounting_table(heard: list[OutcomeEvent], counted: dict[str, int]) -> None:
    assert Fleet().hear(*heard).sums() == counted
    assert Fleet().hear(*heard, *heard).sums() == counted, "said twice, counted once"
    assert Fleet().hear(*reversed(heard), appended_s=50).sums() == counted, "in any order"


def test_without_a_level_the_class_is_its_own_and_no_goodput_of_the_fleet() -> None:
    fleet = Fleet().hear(finished(request_class="free"), finished(request="other"))
    assert fleet.sums("no_slo") == {"excluded": 1, "goodput_tokens": 100, "output_tokens": 100}
    total = fleet.table.total(10.0, T0)
    assert (total.goodput_tokens, total.output_tokens) == (100, 200)


def test_the_origin_counts_goodput_and_the_serving_site_counts_waste() -> None:
    lost_on_the_way = event("failed", origin="b", ttft_s=0.3, output_tokens=60)
    generated = event("finished", origin="b", at_s=1.2, ttft_s=0.3, tpot_s=0.02, output_tokens=80)
    retried = finished(origin="b", attempt=1, at_s=4)
    fleet = Fleet().hear(lost_on_the_way, retried).hear(generated, source="c")
    assert fleet.sums() == {**MET, "waste_tokens": 80, "output_tokens": 180}


def test_the_serving_sites_word_is_taken_when_the_origin_says_nothing() -> None:
    first_token = event("first_token", origin="a", elapsed_s=0.4)
    end = finished(origin="a", at_s=9.0, elapsed_s=9.0, ttft_s=None)
    assert Fleet().hear(first_token, end).sums() == MET


def test_an_attempt_without_an_end_is_missed_after_the_sweep_and_a_later_end_takes_it_back() -> None:
    sweep_s = POLICY.goodput.open_sweep_s
    fleet = Fleet().hear(event("first_token"), event("progress", at_s=5, output_tokens=40))
    assert fleet.sums() == {"offered_arrived": 1}
    fleet.publish(after_s=sweep_s + 20)
    assert fleet.sums() == {"missed": 1, "waste_tokens": 40, "output_tokens": 40, "offered_arrived": 1}
    fleet.hear(finished(at_s=6), source="c")
    assert fleet.sums() == MET


def test_the_sweep_finds_unknown_tokens_unknown() -> None:
    fleet = Fleet().hear(event("started")).publish(after_s=POLICY.goodput.open_sweep_s + 20)
    assert fleet.sums() == {"missed": 1, "unknown_tokens_requests": 1, "offered_arrived": 1}


def test_a_late_event_updates_its_row_under_a_new_version_and_a_later_one_is_only_counted() -> None:
    fleet = Fleet().hear(finished(), finished(request="other", at_s=130)).publish()
    fleet.hear(finished(request="late", at_s=6))
    assert fleet.sums()["met"] == 3
    assert {row.version for partial in fleet.published for row in partial.rows if row.start_s == T0} == {1, 2}
    fleet.hear(finished(request="too late", at_s=4))
    assert fleet.sums() == {column: 3 * n for column, n in MET.items()} | {"late_dropped": 1}


def test_repeats_after_the_request_was_forgotten_are_dropped_as_late() -> None:
    keep_s = POLICY.goodput.settled_keep_s
    fleet = Fleet().hear(finished(), finished(request="other", at_s=keep_s + 20)).publish()
    assert fleet.partition.requests == 1
    assert fleet.hear(finished()).sums() == {column: 2 * n for column, n in MET.items()} | {"late_dropped": 1}


def test_a_long_request_keeps_its_arrival_row_alive() -> None:
    late_finish = finished(request_class="batch", ttft_s=None, at_s=2000, elapsed_s=1999.0)
    beats = [
        event("progress", request_class="batch", at_s=at_s, elapsed_s=at_s - 1.0) for at_s in range(400, 2000, 400)
    ]
    fleet = Fleet().hear(event("started", request_class="batch", elapsed_s=0.0)).publish()
    for beat in beats:
        fleet.hear(beat).publish()
    fleet.hear(late_finish)
    assert fleet.sums() == MISSED
    arrived = [row for row in fleet.table.published(cluster="k", site="b", partition=0) if row.offered_arrived]
    assert {row.start_s for row in arrived} == {T0}


def test_windows_of_every_width_hold_the_same() -> None:
    events = [finished(request=str(n), at_s=float(n)) for n in range(0, 100, 7)]
    sums = [Fleet().hear(*events).sums(width_s=width_s) for width_s in POLICY.goodput.windows_s]
    assert sums[0] == sums[1] == sums[2]


def test_a_restart_goes_on_from_what_was_published() -> None:
    first = Fleet().hear(finished(), finished(request="two", at_s=400)).publish()
    rows = first.table.published(cluster="k", site="b", partition=0)
    again = Fleet(published=rows, from_s=T0 + 300)
    again.table, again.published = first.table, []
    again.hear(finished(request="two", at_s=400)).publish()
    assert [row for partial in again.published for row in partial.rows] == [], "the replay found nothing new"
    again.hear(finished(request="three", at_s=401))
    assert again.sums()["met"] == 3
    assert {row.version for partial in again.published for row in partial.rows} == {2}


Attempt = tuple[str, int | None, float, float]
attempts = st.tuples(
    st.sampled_from(["finished", "failed", "cancelled", "timed_out", "rejected"]),
    st.none() | st.integers(0, 500),
    st.floats(0.0, 4.0),
    st.integers(0, 60_000).map(lambda ms: ms / 1000),
)
fleets = st.lists(st.lists(attempts, min_size=1, max_size=3), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(fleets, st.randoms(use_true_random=False))
def test_sums_are_exact_under_duplicates_reordering_and_replay(requests: list[list[Attempt]], rng: Random) -> None:
    events = [one for number, tries in enumerate(requests) for one in _told(f"r{number}", tries)]
    log = [*events, *rng.choices(events, k=len(events) // 5)]
    rng.shuffle(log)
    fleet = Fleet()
    for one in log:
        fleet.hear(one, source=rng.choice(SOURCES), appended_s=65.0)
        if rng.random() < 0.2:
            fleet.publish(after_s=1.0)
    expected = _oracle(requests)
    assert {column: fleet.sums().get(column, 0) for column in expected} == expected
    again = Fleet(published=fleet.table.published(cluster="k", site="b", partition=0))
    for one in log:
        again.hear(one, source="b", appended_s=65.0)
    again.publish()
    assert [row for partial in again.published for row in partial.rows] == [], "a replay has nothing to add"


def _told(request: str, tries: list[Attempt]) -> Iterable[OutcomeEvent]:
    for attempt, (kind, tokens, ttft_s, at_s) in enumerate(tries):
        common: dict[str, Any] = {"request": request, "attempt": attempt, "origin": "x"}
        if kind != "rejected":
            yield event("started", at_s=at_s, **common)
        yield event(kind, at_s=at_s, ttft_s=ttft_s, tpot_s=0.01, output_tokens=tokens, **common)


def _oracle(requests: list[list[Attempt]]) -> dict[str, int]:
    """Token sums and requests by a second, plain reading of the accounting table."""
    goodput = output = met = missed = rejected = unknown = 0
    for tries in requests:
        ran = [one for one in tries if one[0] != "rejected"]
        output += sum(tokens or 0 for _, tokens, _, _ in ran)
        unknown += sum(tokens is None for _, tokens, _, _ in ran)
        successes = sorted(
            (at_s, n, tokens, ttft_s) for n, (kind, tokens, ttft_s, at_s) in enumerate(tries) if kind == "finished"
        )
        if successes:
            _, _, tokens, ttft_s = successes[0]
            fine = ttft_s <= 2.0
            goodput += (tokens or 0) if fine else 0
            met += fine
            missed += not fine
        elif ran:
            last = max((at_s, n, kind, ttft_s) for n, (kind, _, ttft_s, at_s) in enumerate(tries) if kind != "rejected")
            missed += not (last[2] == "cancelled" and last[3] <= 2.0)
        else:
            rejected += 1
    return {
        "goodput_tokens": goodput,
        "output_tokens": output,
        "waste_tokens": output - goodput,
        "met": met,
        "missed": missed,
        "rejected": rejected,
        "unknown_tokens_requests": unknown,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"at_wall_s": math.nan},
        {"at_wall_s": math.inf},
        {"elapsed_s": math.nan},
        {"elapsed_s": 1e300},
        {"output_tokens": 2**40},
    ],
)
def test_events_that_are_no_numbers_are_left_out(fields: dict[str, Any]) -> None:
    assert Fleet().hear(msgspec.structs.replace(finished(), **fields), appended_s=5.0).sums() == {}


def test_lateness_is_a_matter_of_one_log() -> None:
    fleet = Fleet().hear(finished(request="ahead", at_s=1000))
    assert "late_dropped" not in fleet.hear(finished(at_s=10), source="c").sums()


def test_terms_may_be_tuned() -> None:
    quick = msgspec.structs.replace(POLICY, goodput=GoodputPolicy(windows_s=(1.0,)))
    partition = PartitionGoodput(quick, sources=("b",))
    partition.caught_up("b")
    one = finished()
    envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=one.at_wall_s, events=(one,))
    partition.hear("b", envelope, appended_wall_s=one.at_wall_s, now_s=0.0)
    [partial] = partition.partials(site="b", partition=0, cluster="k", now_s=0.0)
    assert {(row.start_s, row.width_s) for row in partial.rows} == {(T0 + 1.0, 1.0), (T0, 1.0)}
