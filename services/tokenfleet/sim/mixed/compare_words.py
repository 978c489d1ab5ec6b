"""Compare words: a comparison of designs as people read it in a terminal or a document."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tokenfleet.sim.compare_words import marked, seconds, spanned
from tokenfleet.sim.compared import Span
from tokenfleet.sim.mixed.compared import Compared, Line

HEADINGS = (
    "met %",
    "chat",
    "long",
    "batch",
    "goodput",
    "Δ %",
    "of output %",
    "output Δ %",
    "to the end Δ %",
    "cost Δ %",
    "chat TTFT p95 s",
    "TPOT p95 ms",
    "batch s",
    "Δ %",
    "refused",
)
HEADINGS_NARROW = 6  # the first so many fit into 80 columns
COLUMNS_FOR_ALL = 150
CAPTION = (
    "Mean over seeds, the worst seed in brackets. Of all offered requests those that met their service level; goodput, "
    "output and cost of the window, output also to the last end; batch is the mean time of a job."
)


def compared_table(of: Compared, *, columns: int) -> Table:
    """One load; fewer figures where the terminal has few `columns`."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title=about(of),
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
    )
    shown = len(HEADINGS) if columns >= COLUMNS_FOR_ALL else HEADINGS_NARROW
    table.add_column("design", no_wrap=True)
    for heading in HEADINGS[:shown]:
        table.add_column(heading, justify="right")
    for line in of.lines:
        table.add_row(line.design, *texts(line)[:shown])
    return table


def markdown(of: Compared) -> str:
    """The same table for a document."""
    lines = [f"{about(of)}.", "", marked(("design", *HEADINGS)), "|---|" + "--:|" * len(HEADINGS)]
    return "\n".join([*lines, *(marked((line.design, *texts(line))) for line in of.lines)])


def about(of: Compared) -> str:
    """Fleet, load, seeds, and what the changes are against."""
    seeds = f"{'seeds' if len(of.seeds) > 1 else 'seed'} {', '.join(str(seed) for seed in of.seeds)}"
    return (
        f"N = {of.instances}, load {of.load:g}, chat {of.chat}: {seeds}; {of.offered:,.0f} requests a seed; "
        f"ρ {of.rho:.2f}; changes against {of.baseline}"
    )


def texts(line: Line) -> tuple[str, ...]:
    """A line's figures as texts, one for each of HEADINGS."""
    return (
        *(_share(line.attained[name]) for name in ("all", "chat", "long", "batch")),
        spanned(line.goodput, lambda value: f"{value:,.0f}"),
        _change(line.goodput_change),
        _share(line.goodput_share),
        _change(line.output_change),
        _change(line.output_to_end_change),
        _change(line.cost_change),
        seconds(line.ttft_p95_s["chat"]),
        seconds(line.tpot_p95_s["chat"], scale=1e3),
        seconds(line.batch_s),
        _change(line.batch_change),
        f"{line.rejected:g}",
    )


def _share(of: Span) -> str:
    return spanned(of, lambda value: f"{100 * value:.2f}".removesuffix(".00"))


def _change(of: Span) -> str:
    """In percent, three digits, and two decimals at most."""

    def words(value: float) -> str:
        return f"{100 * value:+.{2 if abs(value) < 0.1 else 1 if abs(value) < 1.0 else 0}f}"

    return spanned(of, words)
