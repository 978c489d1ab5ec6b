"""Words: a simulated run as people read it in a terminal."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tokenfleet.sim.measure import Quantiles, Result


class Labelled(Protocol):
    """A run of a comparison that can say which it is."""

    @property
    def label(self) -> str: ...


@contextmanager
def progress_bar(what: str, *, total_s: float) -> Generator[Callable[[float], None] | None]:
    """Takes the virtual time and shows it on standard error; None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_s)
        yield lambda now_s: bar.update(task, completed=min(now_s, total_s))


@contextmanager
def runs_bar(total: int) -> Generator[Callable[[Labelled], None] | None]:
    """Takes each run as it is made and shows how many there are on standard error; None where that is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=total)
        yield lambda made: bar.update(task, advance=1, description=made.label)


def result_words(result: Result) -> Group:
    """All figures of one run, the instances' loads as their span."""
    table = Table("", "p50", "p95", "p99", "mean")
    for name, of in (("TTFT", result.ttft_s), ("TPOT", result.tpot_s), ("E2E", result.e2e_s)):
        table.add_row(name, *(_seconds(value) for value in _values(of)))
    return Group(Text(_title(result)), table, *(Text(line) for line in _notes(result)))


def _title(result: Result) -> str:
    sharing = f", {result.gateways} gateways ({result.event_delay_s:g} s)" if result.gateways > 1 else ""
    return (
        f"{result.policy}: {result.trace} × {result.copies:g} on {result.instances} × {result.profile}{sharing}, "
        f"seed {result.seed}, {result.warm_s:g} to {result.len_s:g} s"
    )


def _notes(result: Result) -> list[str]:
    busy = [load.prefill_s / result.len_s for load in result.loads]
    missed = f"{result.rejected} rejected and {result.unfinished} unfinished count as never served"
    doubtful = f"{result.bad_lines} bad lines of the trace left out; {result.repeated_rows} rows repeat the one before"
    return [
        *([doubtful] if result.bad_lines or result.repeated_rows else []),
        f"{result.completed} of {result.measured} completed"
        + (f"; {missed}" if result.rejected or result.unfinished else ""),
        f"ρ {result.rho:.2f}, with caches {result.rho_cached:.2f} ({min(busy):.2f} to {max(busy):.2f} by instance); "
        f"hits {result.hit_ratio:.1%}; {result.throughput_tokens_per_s:,.0f} output tokens/s",
        f"{result.requests_per_cpu_s:,.0f} requests simulated a second of the processor",
    ]


def _values(of: Quantiles) -> tuple[float | None, ...]:
    return of.p50, of.p95, of.p99, of.mean


def _seconds(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.2f} s"
