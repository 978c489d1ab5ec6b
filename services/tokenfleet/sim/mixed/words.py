"""Words: a mixed run as people read it in a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tokenfleet.sim.control import Control
from tokenfleet.sim.measure import Quantiles
from tokenfleet.sim.mixed.measure import CLASSES, Result

HEADINGS = ("offered", "met", "goodput/s", "TTFT s", "p95", "p99", "TPOT ms", "p95", "p99")  # medians first


def result_words(result: Result) -> Group:
    """The figures of one run, a row a class."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column("class")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name in CLASSES:
        attained = result.attainment_offered[name]
        table.add_row(
            name,
            f"{result.requests[name].offered:,}",
            "-" if attained is None else f"{attained:.2%}",
            f"{result.goodput_tokens_per_s[name]:,.0f}",
            *three(result.ttft_s[name], scale=1.0, digits=2),
            *three(result.tpot_s[name], scale=1e3, digits=0),
        )
    return Group(Text(_title(result)), table, *(Text(line) for line in _notes(result)))


def _title(result: Result) -> str:
    return (
        f"{result.design}: load {result.load:g} on {result.instances} × {result.profile}, chat {result.chat}, "
        f"seed {result.seed}, {result.window_s:g} s"
    )


def _notes(result: Result) -> list[str]:
    every, through = result.requests["all"], result.throughput_tokens_per_s
    goodput, cost = result.goodput_tokens_per_s["all"], result.cost_per_million_goodput_tokens
    bulks = ", ".join("never" if end_s is None else f"{end_s:.0f}" for end_s in result.bulk_end_s)
    return [
        f"{every.completed:,} completed; {every.rejected} rejected and {every.unfinished} unfinished count as missed",
        f"{through.window:,.0f} output tokens/s in the window, {through.makespan:,.0f} over {result.makespan_s:.0f} s; "
        f"{goodput / through.window if through.window else 0.0:.1%} of them goodput; {result.waste_tokens:,} wasted",
        f"cost {'-' if cost is None else f'{cost:.3f}'} per million goodput tokens; bulks of batch took {bulks} s",
        f"ρ {result.rho:.2f}, hits {result.hit_ratio:.1%}; {result.requests_per_cpu_s:,.0f} requests simulated a "
        "second of the processor",
        *(
            control_words(each, minutes=result.window_s / 60.0)
            for each in (result.allowance, result.share_of_chat)
            if each
        ),
    ]


def control_words(control: Control, *, minutes: float) -> str:
    """How often it turned round and how soon it settled, in a line."""
    settled = ", ".join("never" if settled_s is None else f"{settled_s:.0f} s" for settled_s in control.settled_s)
    return (
        f"{control.what}: {control.changes} changes, {control.reversals / minutes:.2f} reversals a minute, at most "
        f"{control.worst_minute} in one" + (f"; settled after {settled}" if settled else "")
    )


def three(of: Quantiles, *, scale: float, digits: int) -> list[str]:
    """p50, p95 and p99 as texts."""
    return ["never" if value is None else f"{value * scale:.{digits}f}" for value in (of.p50, of.p95, of.p99)]
