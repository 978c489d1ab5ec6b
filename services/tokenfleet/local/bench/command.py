"""Bench command: what decisions cost on this machine, beside the goals."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.core.errors import BadRequestError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokenfleet.local.bench.run import Figure, Report


def bench(
    only: Annotated[list[str] | None, typer.Option(help="choose, kv, memory or calls; again for more.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Alternating rounds; the medians are shown.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Only show that everything runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure what decisions cost on this machine.

    CPU time of one choice, KV events, memory, and gRPC calls against an empty echo of the same server. Takes minutes.
    """
    import msgspec
    from rich.console import Console

    from tokenfleet.local.bench.run import PARTS, Part, run

    parts: list[Part] = [part for part in PARTS if not only or only.count(part)]
    if unknown := sorted(set(only or ()) - set(PARTS)):
        raise BadRequestError("--only", f"{unknown[0]!r} is none of {', '.join(PARTS)}")
    report = run(parts, rounds=rounds, quick=quick)
    if as_json:
        figures = [msgspec.to_builtins(each) | {"met": each.met} for each in report.figures]
        typer.echo(json.dumps(msgspec.to_builtins(report) | {"figures": figures}, indent=2))
    else:
        Console().print(bench_table(report, quick=quick))


def bench_table(report: "Report", *, quick: bool = False) -> "RenderableType":
    """The figures, a line each; `quick` ones are too few to be judged."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("measured", "value", "goal", "target", ""):
        table.add_column(name, justify="left" if name in ("measured", "") else "right")
    for each in report.figures:
        met = "missed" if each.met is False and not quick else ""
        table.add_row(each.name, _told(each, each.value), _told(each, each.goal), _told(each, each.target), met)
    table.caption = ("--quick asks too little to judge by; " if quick else "") + (
        f"large pools by {'compiled loops' if report.compiled else 'arrays: numba (the extra fast) is not installed'}; "
        f"medians; CPU time is the process's own. Python {report.python}, {report.cpus} CPUs, load "
        f"{report.load_before:.1f} before: a busy machine makes all of it dearer"
    )
    table.caption_justify = "left"
    return table


def _told(figure: "Figure", value: float | None) -> str:
    if value is None:
        return ""
    number = f"{value:,.2f}" if value < 10 else f"{value:,.0f}"
    sign = "" if value is figure.value else ("≤ " if figure.at_most else "≥ ")
    return f"{sign}{number} {figure.unit}"
