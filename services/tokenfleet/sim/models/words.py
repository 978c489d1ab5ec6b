"""Words: a run of two models as people read it in a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tokenfleet.sim.mixed.words import HEADINGS, control_words, three
from tokenfleet.sim.models.measure import Result


def result_words(result: Result) -> Group:
    """The figures of one run, a row a model, and each change of its slots."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fits 80 columns
    table.add_column("model")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for name, attained in result.attainment_offered.items():
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
    split = f"{result.split}/{result.instances - result.split}"
    return (
        f"{result.design} from {split}: {result.demand}, load {result.load:g} on {result.instances} × "
        f"{result.profile}, seed {result.seed}, {result.window_s:g} s"
    )


def _notes(result: Result) -> list[str]:
    every, through = result.requests["all"], result.throughput_tokens_per_s
    cost = result.cost_per_million_goodput_tokens
    revisions = [
        f"{each.at_s:5.0f} s {each.kind}: "
        + ", ".join(f"{slots} {name}" for name, slots in each.slots.items())
        + f" ({each.why})"
        for each in result.revisions
    ]
    return [
        f"{every.completed:,} completed; {every.rejected} rejected and {every.unfinished} unfinished count as missed",
        f"{through.window:,.0f} output tokens/s in the window; {result.waste_tokens:,} wasted; "
        f"cost {'-' if cost is None else f'{cost:.3f}'} per million goodput tokens",
        f"ρ {result.rho:.2f}, hits {result.hit_ratio:.1%}; {result.requests_per_cpu_s:,.0f} requests simulated a "
        "second of the processor",
        *revisions,
        *([control_words(result.control, minutes=result.window_s / 60.0)] if result.control else []),
    ]
