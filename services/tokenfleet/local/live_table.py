"""Live table: the summary on a terminal, and in one line where there is none."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from tokenfleet.local.live_rows import WINDOW_S, LiveRow, LiveRows

UNKNOWN = "–"
MODELS_WIDTH_MIN = 120  # columns; a narrower terminal sees sums over models
LINES_BESIDE = 8  # title, three of the head, the total and a line above it, two of the foot
FIGURES = (
    *("arrived", "admit", "queue", "reject", "re-\ndirect", "TTFT\np50", "TTFT\np95"),
    *("goodput\ntokens/s", "SLO\nmet", "telemetry\nage"),
)


def live_table(
    rows: LiveRows, ages_s: Mapping[str, float], foot: str, *, policy: str, width: int, height: int
) -> Table:
    """Under the name of the policy in force, in as much detail as a terminal of so many columns and lines has room for.

    `ages_s` are the ages of each site's youngest telemetry at its last decision.
    """
    names, shown = _shown(rows, width=width, height=height)
    table = Table(
        title=f"the last {WINDOW_S:.0f} s, policy {policy or UNKNOWN}",
        caption=foot,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    for name in names:
        table.add_column(name.removeprefix("request_"), no_wrap=True)
    for name in FIGURES:
        table.add_column(name, justify="right", no_wrap=True)
    for row in shown:
        table.add_row(*(getattr(row, name) or UNKNOWN for name in names), *_figures(row, ages_s.get(row.site or "")))
    table.add_section()
    table.add_row("total", *[""] * (len(names) - 1), *_figures(rows.total, max(ages_s.values(), default=None)))
    return table


def live_line(rows: LiveRows, ages_s: Mapping[str, float], foot: str, *, policy: str) -> str:
    """The same, summed over the fleet."""
    total = rows.total
    ttft = f"p50 {seconds(total.ttft_p50_s)}, p95 {seconds(total.ttft_p95_s)}"
    return (
        f"last {WINDOW_S:.0f} s, policy {policy or UNKNOWN}: "
        f"{total.arrivals} arrived, {total.admitted} admitted, {total.queued} queued, "
        f"{total.rejected} rejected, {total.redirected} redirected; "
        f"TTFT {ttft}; goodput {total.goodput_tokens_per_s:,.0f} tokens/s; "
        f"attained {share(total.attainment)}; "
        f"telemetry {seconds(max(ages_s.values(), default=None))} old; {foot}"
    )


def seconds(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s:.2f} s" if value_s < 10.0 else f"{value_s:.1f} s"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _shown(rows: LiveRows, *, width: int, height: int) -> tuple[tuple[str, ...], Sequence[LiveRow]]:
    """The columns that name a row, and the rows."""
    room = height - LINES_BESIDE
    if width >= MODELS_WIDTH_MIN and len(rows.by_model) <= room:
        return ("site", "model", "request_class"), rows.by_model
    if len(rows.by_class) <= room:
        return ("site", "request_class"), rows.by_class
    return ("site",), rows.by_site


def _figures(row: LiveRow, age_s: float | None) -> tuple[str, ...]:
    return (
        *(str(n) for n in (row.arrivals, row.admitted, row.queued, row.rejected, row.redirected)),
        seconds(row.ttft_p50_s),
        seconds(row.ttft_p95_s),
        f"{row.goodput_tokens_per_s:,.0f}",
        share(row.attainment),
        seconds(age_s),
    )
