"""Words: a run over several sites as people read it in a terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tokenfleet.sim.mixed.words import three
from tokenfleet.sim.sites.measure import Result


def result_words(result: Result) -> Group:
    """The figures of one run."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for heading in ("p50", "p95", "p99"):
        table.add_column(heading, justify="right")
    table.add_row("TTFT s", *three(result.ttft_s, scale=1.0, digits=2))
    table.add_row("TPOT ms", *three(result.tpot_s, scale=1e3, digits=0))
    table.add_row("E2E s", *three(result.e2e_s, scale=1.0, digits=1))
    return Group(Text(_title(result)), table, *(Text(line) for line in _notes(result)))


def _title(result: Result) -> str:
    return (
        f"{result.design}: conversation × {result.copies:g}, {result.residency:.0%} of conversations stay, summaries "
        f"each {result.summary_age_s:g} s, {result.ingresses} × {result.replicas} replicas, seed {result.seed}"
    )


def _notes(result: Result) -> list[str]:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in result.share.items())
    return [
        f"{result.completed:,} of {result.measured:,} completed; {result.rejected} rejected and {result.unfinished} "
        f"unfinished count as never; {result.sent_back} were sent back by a site",
        f"first token within 2 s: {result.ttft_within_2s:.2%}; hits {result.hit_ratio:.1%}; they ran at {shares}",
        f"{result.residency_violations} ran where they may not; {result.requests_per_cpu_s:,.0f} requests simulated a "
        "second of the processor",
    ]
