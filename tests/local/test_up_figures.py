"""Where the figures of `up` come from: pages of counters, books of the load, /proc."""

import os
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.postgres_server import execute
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.safe_text import safe_json
from tokenfleet.client.gateway import Answer
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.local.books_check import Books, find, read_books
from tokenfleet.local.live_rows import LiveRow, LiveRows, live_rows
from tokenfleet.local.live_table import live_table
from tokenfleet.local.load_books import LoadBooks
from tokenfleet.local.load_stats import read_stats
from tokenfleet.local.metrics import FleetMetrics, parse, quantile
from tokenfleet.local.report import load_time
from tokenfleet.local.run import Run
from tokenfleet.local.run_rows import run_rows
from tokenfleet.local.totals import totals_of_books
from tokenfleet.local.usage import usage_of
from tokenfleet.local.window_goodput import window_of
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2

PAGE = b"""# HELP tokenfleet_decisions_total Decisions answered
# TYPE tokenfleet_decisions_total counter
tokenfleet_decisions_total{mode="fresh",verdict="admit"} 7.0
tokenfleet_decisions_total{mode="stale",verdict="admit"} 2.0
tokenfleet_kv_blocks_indexed 12.0
python_gc_objects_collected_total{generation="0"} 99.0
"""


# --- pages ---


def test_a_page_gives_tokenfleets_own_samples() -> None:
    samples = dict(parse(PAGE))
    assert samples[("tokenfleet_kv_blocks_indexed", ())] == 12.0
    assert samples[("tokenfleet_decisions_total", (("mode", "stale"), ("verdict", "admit")))] == 2.0
    assert len(samples) == 3


def test_what_a_killed_process_had_counted_is_kept() -> None:
    metrics = FleetMetrics({"d": 0})
    for page in (b"tokenfleet_x_total 5\n", b"tokenfleet_x_total 9\n", b"tokenfleet_x_total 2\n"):
        metrics.take("d", page)
    assert sum(metrics.counted("tokenfleet_x_total", "d").values()) == 11.0
    metrics.take("d", b"tokenfleet_x_total 3\n")
    assert sum(metrics.counted("tokenfleet_x_total", "d").values()) == 12.0


def test_a_gauge_that_falls_is_no_new_life() -> None:
    metrics = FleetMetrics({"d": 0})
    metrics.take("d", b"tokenfleet_x_total 5\ntokenfleet_g 8\n")
    metrics.take("d", b"tokenfleet_x_total 5\ntokenfleet_g 1\n")
    assert sum(metrics.counted("tokenfleet_x_total", "d").values()) == 5.0
    assert metrics.gauge("tokenfleet_g", "d") == 1.0
    assert metrics.gauge("tokenfleet_g", "e") is None


def test_counters_are_chosen_by_label() -> None:
    metrics = FleetMetrics({"d": 0})
    metrics.take("d", PAGE)
    assert sum(metrics.counted("tokenfleet_decisions_total", "d", mode="fresh").values()) == 7.0
    assert sum(metrics.counted("tokenfleet_decisions_total", "d").values()) == 9.0


def test_histograms_of_several_processes_add_up() -> None:
    metrics = FleetMetrics({"d": 0, "e": 0})
    for process in ("d", "e"):
        metrics.take(process, b'tokenfleet_h_bucket{le="0.1"} 1\ntokenfleet_h_bucket{le="+Inf"} 2\n')
    assert metrics.histogram("tokenfleet_h", ["d", "e"]) == {0.1: 2.0, float("inf"): 4.0}


@pytest.mark.parametrize(
    ("share", "value"),
    [(0.25, 0.05), (0.5, 0.1), (0.75, 0.15), (0.9, 0.2)],
)
def test_quantiles_are_linear_within_a_bucket_and_end_at_the_last_bound(share: float, value: float) -> None:
    assert quantile({0.1: 4.0, 0.2: 8.0, float("inf"): 8.0}, min(share, 1.0)) == pytest.approx(
        value if share < 0.9 else 0.18
    )
    assert quantile({0.1: 1.0, float("inf"): 10.0}, 0.9) == 0.1


def test_a_histogram_of_nothing_has_no_quantile() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, float("inf"): 0.0}, 0.5) is None


# --- books ---


def answer(*decisions: decision_pb2.Decision) -> Answer:
    return Answer(decision=decisions[-1], trail=decisions, gateways=("127.0.0.1:1",))


def test_the_books_hold_each_decision_and_each_acknowledged_event_once(tmp_path: Path) -> None:
    redirect = decision_pb2.Decision(id="d1", request="r", verdict=decision_pb2.VERDICT_REDIRECT)
    admit = decision_pb2.Decision(id="d2", request="r", verdict=decision_pb2.VERDICT_ADMIT)
    reject = decision_pb2.Decision(id="d3", request="s", attempt=1, verdict=decision_pb2.VERDICT_REJECT)
    progress = outcomes_pb2.OutcomeEvent(request="r", kind=outcomes_pb2.OUTCOME_KIND_PROGRESS)
    with LoadBooks(tmp_path) as books:
        books.answered(answer(redirect, admit), now_s=10.0)
        books.answered(answer(reject), now_s=13.0)
        books.acknowledged(progress)
        books.acknowledged(progress)
        books.save(open_requests=4, reports_lost=0)
    assert read_books(tmp_path) == Books(
        decisions=frozenset({"d1", "d2", "d3"}),
        outcomes=frozenset({("s", 1, "rejected"), ("r", 0, "progress")}),
    )
    stats = read_stats(tmp_path)
    assert stats is not None
    assert (stats.answered, stats.admitted, stats.open, stats.longest_gap_s) == (2, 1, 4, 3.0)
    assert totals_of_books(tmp_path).startswith(
        "3 decisions: 1 admitted, 0 queued, 1 rejected, 1 redirected; 2 outcome events;"
    )


def test_books_that_cannot_be_written_fail_no_request_and_are_not_whole(tmp_path: Path) -> None:
    admit = decision_pb2.Decision(id="d1", request="r", verdict=decision_pb2.VERDICT_ADMIT)
    (tmp_path / "answered.tsv").symlink_to("/dev/full")
    with LoadBooks(tmp_path) as books:
        books.answered(answer(admit), now_s=10.0)
        books.save(open_requests=0, reports_lost=0, last=True)
    stats = read_stats(tmp_path)
    assert stats is not None
    assert (stats.answered, stats.whole) == (1, False)


def test_only_the_last_save_says_that_the_books_are_whole(tmp_path: Path) -> None:
    with LoadBooks(tmp_path) as books:
        books.save(open_requests=0, reports_lost=0)
        assert (before := read_stats(tmp_path)) is not None
        assert not before.whole
        books.save(open_requests=0, reports_lost=0, last=True)
        assert (after := read_stats(tmp_path)) is not None
        assert after.whole


def test_a_line_cut_short_by_a_kill_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "answered.tsv").write_text("decision\td1\noutcome\tr\t0\tstarted\noutcome\tr\t0\tfin")
    assert read_books(tmp_path) == Books(decisions=frozenset({"d1"}), outcomes=frozenset({("r", 0, "started")}))


def test_no_books_are_empty_books(tmp_path: Path) -> None:
    assert read_books(tmp_path) == Books(decisions=frozenset(), outcomes=frozenset())
    assert read_stats(tmp_path) is None


def test_the_loads_time_is_from_its_first_lifes_begin_until_it_was_asked_to_stop(tmp_path: Path) -> None:
    run = Run(id="run", began_s=100.0, began_wall_s=0.0, folder=tmp_path, load_began_s=110.0, load_ended_s=150.0)
    assert load_time(run) == (110.0, 150.0)
    for began_s in (120.0, 140.0):  # killed and restarted in between
        with LoadBooks(tmp_path) as books:
            books.began(now_s=began_s)
            books.save(open_requests=0, reports_lost=0)
    assert load_time(run) == (120.0, 150.0)


# --- rows ---


async def add_decision(dsn: str, id: str, *, request: str = "run-1", verdict: str = "admit", site: str = "b") -> None:
    await execute(
        dsn,
        f"""insert into decisions (day, id, request, attempt, tenant, model, request_class, verdict, reason, mode,
            origin, site, pool, target, replica, policy_revision, at, body)
        values (current_date, '{id}', '{request}', 0, 't', 'm', 'chat', '{verdict}', '', 'fresh', 'a',
            '{site}', 'm@{site}', '', '{site}/0', 1, now(), '{{}}')""",
    )


async def add_outcome(dsn: str, kind: str, *, request: str = "run-1", ttft_s: float = 0.5) -> None:
    await execute(
        dsn,
        f"""insert into outcomes (day, request, attempt, kind, at_origin, decision, tenant, model, request_class,
            origin, site, pool, instance, replica, at, body)
        values (current_date, '{request}', 0, '{kind}', false, 'd', 't', 'm', 'chat', 'a',
            'b', 'm@b', 'i', '0', now(), '{{"ttft_s": {ttft_s}}}')""",
    )


async def add_finished(
    dsn: str, request: str, *, at_wall_s: float, ttft_s: float = 0.1, at_origin: bool = True
) -> None:
    event = OutcomeEvent(
        request=request,
        attempt=0,
        kind="finished",
        decision="d",
        tenant="acme",
        request_class="chat",
        model="m",
        origin="a",
        at_wall_s=at_wall_s,
        elapsed_s=5.0,
        ttft_s=ttft_s,
        tpot_s=0.01,
        output_tokens=100,
    )
    await execute(
        dsn,
        f"""insert into outcomes (day, request, attempt, kind, at_origin, decision, tenant, model, request_class,
            origin, site, pool, instance, replica, at, body)
        values (current_date, '{request}', 0, 'finished', {at_origin}, 'd', 't', 'm', 'chat', 'a',
            'b', 'm@b', 'i', '0', to_timestamp({at_wall_s}), '{safe_json(event)}')""",
    )


async def add_goodput(
    dsn: str,
    *,
    request_class: str = "chat",
    tokens: int = 0,
    met: int = 0,
    cost: float = 0.0,
    start_s: float | None = None,
) -> None:
    start = "floor(extract(epoch from now()) / 10) * 10" if start_s is None else start_s
    await execute(
        dsn,
        f"""insert into goodput (width_s, start_s, request_class, tenant, pool, cluster, site, partition, version,
            goodput_tokens, output_tokens, waste_tokens, prefill_waste_tokens, unknown_tokens_requests, met, missed,
            rejected, excluded, met_arrived, offered_arrived, late_dropped, gpu_seconds, cost)
        values (10, {start}, '{request_class}', 't', 'm@b', 'k', 'fleet', 0, 1,
            {tokens}, {tokens}, 0, 0, 0, {met}, 1, 2, 0, 0, 0, 0, 1.0, {cost})""",
    )


@pytest.mark.integration
async def test_what_has_no_row_is_lost_by_name_and_other_runs_do_not_count(database: str) -> None:
    await migrate(database)
    await add_decision(database, "d1")
    await add_decision(database, "other", request="another-1")
    await add_outcome(database, "started")
    await add_outcome(database, "finished")
    books = Books(
        decisions=frozenset({"d1", "d2"}),
        outcomes=frozenset({("run-1", 0, "started"), ("run-1", 0, "finished"), ("run-1", 1, "finished")}),
    )
    async with Postgres(database) as postgres:
        found = await find(postgres, books, run="run", since_wall_s=time.time() - 60.0)
        later = await find(postgres, books, run="run", since_wall_s=time.time() + 60.0)
        await postgres.fetch("update decisions set at = at - interval '50 years'")  # a replica with a wrong clock
        skewed = await find(postgres, books, run="run", since_wall_s=time.time() - 60.0)
    assert set(found.missing) == {"d2", "run-1 1 finished"}
    assert (found.decisions, found.outcomes, found.ended) == (1, 2, 1)
    assert (len(later.missing), later.decisions) == (5, 0)
    assert (set(skewed.missing), skewed.decisions) == (set(found.missing), 1)


@pytest.mark.integration
async def test_the_figures_of_a_run_are_those_of_its_rows(database: str) -> None:
    await migrate(database)
    since_s = time.time() - 5.0
    await add_decision(database, "d1", verdict="redirect", site="c")
    await add_decision(database, "d2", site="c")
    await add_outcome(database, "first_token", ttft_s=0.25)
    await add_goodput(database, tokens=400, met=3)
    async with Postgres(database) as postgres:
        rows = await run_rows(postgres, run="run", since_wall_s=since_s)
        live = await live_rows(postgres, since_wall_s=since_s)
    assert (rows.count("admit"), rows.count("redirect"), rows.count("reject")) == (1, 1, 0)
    assert (rows.admitted_to("c"), rows.decided_at("c"), rows.decided_at("b")) == (1, 2, 0)
    assert rows.ttft_s == {"chat": (0.25, 0.25)}
    assert rows.sums["chat"].attainment_admitted == 0.75
    assert rows.sums["chat"].attainment_offered == 0.5
    here = {(row.site, row.model): row for row in live.by_model}
    assert (here["c", "m"].admitted, here["c", "m"].redirected) == (1, 1)
    assert here["b", "m"].ttft_p50_s == 0.25
    assert here["b", "m"].attainment == 0.75
    assert [(row.site, row.request_class) for row in live.by_class] == [("b", "chat"), ("c", "chat")]
    assert [row.site for row in live.by_site] == ["b", "c"]
    assert (live.total.admitted, live.total.redirected, live.total.ttft_p95_s) == (1, 1, 0.25)


@pytest.mark.integration
async def test_a_request_arrives_once_and_at_its_origin(database: str) -> None:
    await migrate(database)
    await add_decision(database, "d1", verdict="redirect", site="a")
    await add_decision(database, "d2", verdict="queue", site="c")
    await add_decision(database, "d3", site="c")
    async with Postgres(database) as postgres:
        live = await live_rows(postgres, since_wall_s=time.time() - 60.0)
    assert {row.site: row.arrivals for row in live.by_site} == {"a": 1, "c": 0}
    assert (live.total.arrivals, live.total.queued, live.total.admitted) == (1, 1, 1)


@pytest.mark.integration
async def test_goodput_and_cost_are_those_of_the_loads_own_time_whatever_the_drain_adds(database: str) -> None:
    await migrate(database)
    from_s = time.time() // 10 * 10 + 4.0  # the load's edges cut two windows of 10 s: 6 + 10 + 4
    until_s = from_s + 20.0
    await add_finished(database, "run-1", at_wall_s=from_s + 1.0)
    await add_finished(database, "run-1", at_wall_s=from_s + 1.0, at_origin=False)  # the site's word of the same
    await add_finished(database, "run-2", at_wall_s=until_s - 1.0)
    await add_finished(database, "run-3", at_wall_s=until_s - 1.0, ttft_s=3000.0)  # missed its first token
    await add_finished(database, "run-4", at_wall_s=until_s + 1.0)  # drained
    await add_finished(database, "other-1", at_wall_s=from_s + 1.0)
    for start_s, cost in ((-4.0, 0.7), (6.0, 1.0), (16.0, 1.0), (26.0, 1.0)):  # ready 1 s before the load
        await add_goodput(database, request_class="", cost=cost, start_s=from_s + start_s)
    async with Postgres(database) as postgres:
        window = await window_of(
            postgres,
            load_policy()[0],
            run="run-",
            since_wall_s=time.time() - 60.0,
            from_wall_s=from_s,
            until_wall_s=until_s,
        )
    assert window.goodput_tokens_per_s("chat") == pytest.approx(200 / 20.0)
    assert window.output_tokens_per_s("chat") == pytest.approx(300 / 20.0)  # one was late
    assert window.goodput_tokens_per_s("none") == 0.0
    assert window.cost == pytest.approx(0.6 + 1.0 + 0.4)
    assert window.cost_per_million_goodput_tokens == pytest.approx(2.0 / 200 * 1e6)


# --- the table ---


def live_row(site: str, model: str | None, request_class: str | None) -> LiveRow:
    return LiveRow(
        site=site,
        model=model,
        request_class=request_class,
        arrivals=123,
        redirected=123,
        ttft_p50_s=12.34,
        ttft_p95_s=56.78,
        goodput_tokens=360_000.0,
        met=1.0,
    )


SITES, CLASSES, MODELS = "abcd", ("batch", "chat", "long"), ("large-chat", "small-chat")
LIVE = LiveRows(
    by_model=tuple(live_row(site, model, name) for site in SITES for model in MODELS for name in CLASSES),
    by_class=tuple(live_row(site, None, name) for site in SITES for name in CLASSES),
    by_site=tuple(live_row(site, None, None) for site in SITES),
    total=LiveRow(site=None, model=None, request_class=None, arrivals=492),
)


@pytest.mark.parametrize(
    ("width", "height", "rows"),
    [(120, 40, 24), (119, 40, 12), (120, 24, 12), (100, 24, 12), (100, 16, 4), (80, 12, 4)],
)
def test_the_table_fits_its_terminal_with_whole_cells(width: int, height: int, rows: int) -> None:
    console = Console(width=width, height=height, file=StringIO())
    table = live_table(LIVE, {"a": 1.0, "b": 2.0}, "up 9 s", policy="tokenpilot", width=width, height=height)
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    assert table.row_count == rows + 1
    assert len(lines) <= height
    assert not any("…" in line for line in lines)
    assert "telemetry" in lines[1]
    assert [line.split()[:2] for line in lines if line.startswith("total")] == [["total", "492"]]
    assert sum("56.8 s" in line and "123" in line for line in lines) == rows


# --- memory ---


def test_a_process_counts_with_what_it_started_itself() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        try:
            apart = usage_of({"us": os.getpid(), "child": child.pid})
            together = usage_of({"us": os.getpid()})
        finally:
            child.kill()
    assert apart["child"].rss_bytes > 1_000_000
    assert together["us"].rss_bytes > apart["us"].rss_bytes
    assert usage_of({"gone": child.pid}) == {}


def test_what_processes_share_counts_once_beside_the_plain_sum() -> None:
    mb = 30_000_000
    script = f"import os, time; kept = b'x' * {mb}; child = os.fork(); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline()
            assert parent.stdout.readline()
            usage = usage_of({"both": parent.pid})["both"]
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
    assert usage.rss_sum_bytes > 2 * mb
    assert mb < usage.rss_bytes < usage.rss_sum_bytes - 0.9 * mb
