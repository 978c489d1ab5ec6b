"""Compare words: a comparison as people read it in a terminal."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tokenfleet.sim.compare import BOUNDS, Cell
from tokenfleet.sim.compared import Compared, Line, Span
from tokenfleet.sim.tuned import Tried

POINTS_SHOWN = 3  # of each grid


@contextmanager
def cells_bar(total: int) -> Generator[Callable[[Cell], None]]:
    """Takes each cell and shows how many there are on standard error, if that is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda cell: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=total)

        def made(cell: Cell) -> None:
            bar.update(task, advance=1, description=f"{cell.scenario}, {cell.policy}, seed {cell.seed}")

        yield made


def compared_table(of: Compared, *, columns: int) -> Table:
    """One scenario; a mean with its worst seed in brackets, under it where the terminal has few `columns`."""
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),  # fits 80 columns
        title=f"{of.scenario}: {about(of)}",
        title_justify="left",
        caption=CAPTION,
        caption_justify="left",
    )
    narrow = columns < COLUMNS_FOR_A_ROW
    table.add_column("policy", overflow="fold", width=16 if narrow else None)
    shown = HEADINGS if any(line.lost for line in of.lines) else HEADINGS[:-1]
    for heading in shown:
        table.add_column(heading, justify="right", width=NARROW.get(heading, 8) if narrow else None)
    for line in of.lines:
        table.add_row(line.policy, *texts(line)[: len(shown)], style="dim" if line.policy in BOUNDS else "")
    return table


def markdown(of: Compared, tried: Mapping[str, Sequence[Tried]], tune_seeds: Sequence[int]) -> str:
    """The same table for a document, and which point of each peer's grid won."""
    lines = [f"**{of.scenario}**: {about(of)}.", "", _marked(("policy", *HEADINGS)), "|---|" + "--:|" * len(HEADINGS)]
    lines += [_marked((line.policy, *texts(line))) for line in of.lines]
    if tried:
        won = ", ".join(f"`{points[0].policy}` (of {len(points)})" for points in tried.values())
        lines += ["", f"Tuned on seeds {', '.join(str(seed) for seed in tune_seeds)}: {won}."]
    return "\n".join(lines)


def _marked(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def about(of: Compared) -> str:
    """Seeds, load and what the percentages are of."""
    seeds = f"{'seeds' if len(of.seeds) > 1 else 'seed'} {', '.join(str(seed) for seed in of.seeds)}"
    return (
        f"{seeds}; {of.measured:,.0f} requests measured a "
        f"seed; ρ {of.rho:.2f} without caches; changes against {of.baseline}"
    )


COLUMNS_FOR_A_ROW = 118
NARROW = {"TTFT p50 s": 9, "hits": 6, "lost": 5}  # columns, one of them empty
HEADINGS = ("TTFT p50 s", "p95 s", "Δ p50 %", "Δ p95 %", "hits", "TPOT p95 ms", "E2E p50 s", "lost")
CAPTION = "Mean over seeds, the worst seed in brackets. Bounds wait for nothing: each request alone on an idle engine."


def texts(line: Line) -> tuple[str, ...]:
    """A line's figures as texts, one for each of HEADINGS."""
    return (
        seconds(line.ttft_p50_s),
        seconds(line.ttft_p95_s),
        percent(line.change_p50),
        percent(line.change_p95),
        f"{line.hit_ratio:.3f}",
        seconds(line.tpot_p95_s, scale=1e3),
        seconds(line.e2e_p50_s),
        f"{line.lost}",
    )


def seconds(span: Span, *, scale: float = 1.0) -> str:
    """Three significant digits; `never` where too many were lost."""
    return _spanned(span, lambda value: _digits(value * scale))


def percent(span: Span) -> str:
    """A share as a signed percentage, three digits."""
    return _spanned(span, lambda value: f"{100 * value:+.{0 if abs(value) >= 1 else 1}f}")


def grid_table(scenario: str, tried: Mapping[str, Sequence[Tried]], seeds: Sequence[int]) -> Table:
    """The best points of each peer's grid, the winner first."""
    table = Table(
        title=f"{scenario}: peers tuned on seeds {', '.join(str(seed) for seed in seeds)}, by TTFT p50 × p95",
        title_justify="left",
    )
    table.add_column("policy", overflow="fold")
    for heading in ("TTFT p50 s", "p95 s", "points tried"):
        table.add_column(heading, justify="right", no_wrap=True)
    for points in tried.values():
        for place, point in enumerate(points[:POINTS_SHOWN]):
            size = str(len(points)) if not place else ""
            table.add_row(point.policy, _digits(point.ttft_p50_s), _digits(point.ttft_p95_s), size)
    return table


def _spanned(span: Span, words: Callable[[float], str]) -> str:
    mean, worst = ("never" if value is None else words(value) for value in (span.mean, span.worst))
    return mean if mean == worst else f"{mean} ({worst})"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")
