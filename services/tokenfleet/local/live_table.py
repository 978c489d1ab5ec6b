"""Live table: the summary on a terminal, and in one line where there is none."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from tokenfleet.local.live_rows import WINDOW_S, LiveRow

UNKNOWN = "–"


def live_table(rows: Sequence[LiveRow], ages_s: Mapping[str, float], foot: str) -> Table:
    """`ages_s` are the ages of each site's youngest telemetry at its last decision."""
    table = Table(title=f"the last {WINDOW_S:.0f} s", caption=foot, title_justify="left", caption_justify="left")
    for name in ("site", "model", "class"):
        table.add_column(name)
    for name in ("arrivals", "admit", "queue", "reject", "redirect", "TTFT p50", "p95", "goodput/s", "attained", "age"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.site,
            row.model,
            row.request_class or UNKNOWN,
            *(str(n) for n in (row.arrivals, row.admitted, row.queued, row.rejected, row.redirected)),
            seconds(row.ttft_p50_s),
            seconds(row.ttft_p95_s),
            f"{row.goodput_tokens_per_s:,.0f}",
            share(row.attainment),
            seconds(ages_s.get(row.site)),
        )
    return table


def live_line(rows: Sequence[LiveRow], ages_s: Mapping[str, float], foot: str) -> str:
    """The same, summed over the fleet."""
    admitted, queued = sum(row.admitted for row in rows), sum(row.queued for row in rows)
    rejected, redirected = sum(row.rejected for row in rows), sum(row.redirected for row in rows)
    met, missed = sum(row.met for row in rows), sum(row.missed for row in rows)
    goodput = sum(row.goodput_tokens_per_s for row in rows)
    p95_s = [row.ttft_p95_s for row in rows if row.ttft_p95_s is not None]
    return (
        f"last {WINDOW_S:.0f} s: {admitted} admitted, {queued} queued, {rejected} rejected, {redirected} redirected; "
        f"worst TTFT p95 {seconds(max(p95_s, default=None))}; goodput {goodput:,.0f} tokens/s; "
        f"attained {share(met / (met + missed) if met + missed else None)}; "
        f"telemetry {seconds(max(ages_s.values(), default=None))} old; {foot}"
    )


def seconds(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s:.2f} s"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"
