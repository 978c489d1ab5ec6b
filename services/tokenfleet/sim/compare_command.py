"""The command `sim compare`: all policies on the same requests, several seeds, a table and a report."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.fleet_options import Copies, EventDelay, Gateways, Instances, Length, ProfileName, Trace, Warm

if TYPE_CHECKING:
    from tokenfleet.sim.compare import Cell, Job
    from tokenfleet.sim.run import RunOptions
    from tokenfleet.sim.tuned import Tried

PEERS = "round_robin,random,power_of_two,least_requests,least_stale,sglang,dynamo,llmd,tokenpilot"


def compare(
    scenarios: Annotated[list[str] | None, typer.Argument(help="Scenarios; `sim list` names them.")] = None,
    trace: Trace = None,
    copies: Copies = None,
    instances: Instances = None,
    gateways: Gateways = None,
    event_delay: EventDelay = None,
    profile: ProfileName = None,
    length: Length = None,
    warm: Warm = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out lines that can't be used.")] = False,
    policies: Annotated[str, typer.Option(help="Names with commas; also sglang:balance_abs=8 and the like.")] = PEERS,
    seeds: Annotated[str, typer.Option(help="As 1,2,5 or 1-4.")] = "1-4",
    baseline: Annotated[str, typer.Option(help="Policy that changes are given against.")] = "least_requests",
    tuned: Annotated[bool, typer.Option("--tuned", help="Also each peer at the best of a grid of settings.")] = False,
    tune_seeds: Annotated[str, typer.Option(help="Seeds that the grids are run on.")] = "5-6",
    bounds: Annotated[bool, typer.Option(help="Also what no policy can pass.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for finished runs: a broken-off comparison goes on.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures to this file.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print tables for a document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare routing policies on the same requests.

    What stands in {} is taken where neither an option nor the scenario tells.
    """
    import msgspec
    from rich.console import Console

    from tokenfleet.sim.compare import BOUNDS, routing_runs
    from tokenfleet.sim.compare_words import compared_table, grid_table, markdown
    from tokenfleet.sim.compared import compared
    from tokenfleet.sim.made import made_of
    from tokenfleet.sim.page import check_report, write_report
    from tokenfleet.sim.policies import policy_named
    from tokenfleet.sim.report import report
    from tokenfleet.sim.scenarios import options_of

    changes: dict[str, object] = {
        "trace": trace,
        "copies": copies,
        "instances": instances,
        "gateways": gateways,
        "event_delay_s": event_delay,
        "profile": profile,
        "len_s": length,
        "warm_s": warm,
        "skip_bad": skip_bad or None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    bases = {name or "custom": options_of(name, given) for name in scenarios or [""]}
    names = policies_of(policies)
    for name in names:
        policy_named(name)
    if baseline not in names:
        raise PolicyError(f"--baseline {baseline!r} is none of --policies {policies}")
    run_seeds, grid_seeds = seeds_of("--seeds", seeds), seeds_of("--tune-seeds", tune_seeds)
    if html is not None:
        check_report(html)
    runs = routing_runs(keep)
    for scenario, base in bases.items():
        _check(scenario, base, [*run_seeds, *(grid_seeds if tuned else ())])

    def make(wanted: Sequence["Job"]) -> list["Cell"]:
        return made_of(runs, wanted, processes=jobs, what=wanted[0].scenario, keep=keep)

    grids: dict[str, dict[str, tuple[Tried, ...]]] = {}
    every: list[Cell] = []
    for scenario, base in bases.items():
        its = names + (list(BOUNDS) if bounds else [])
        if tuned:
            grids[scenario] = _tune(scenario, base, names, grid_seeds, make)
            its[len(names) : len(names)] = [points[0].policy for points in grids[scenario].values()]
        every += make(jobs_of(scenario, base, dict.fromkeys(its), run_seeds))
    tables = [compared(every, scenario=scenario, baseline=baseline) for scenario in bases]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"scenarios": tables, "grids": grids})).decode())
    elif as_markdown:
        typer.echo("\n\n".join(markdown(table, grids.get(table.scenario, {}), grid_seeds) for table in tables))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH_OF_FILES)
        for table in tables:
            if table.scenario in grids:
                console.print(grid_table(table.scenario, grids[table.scenario], grid_seeds))
            console.print(compared_table(table, columns=console.width))
    if html is not None:  # last: a full disk costs the page, not the figures
        write_report(html, report(tables, every, grids))


def _check(scenario: str, base: "RunOptions", seeds: Iterable[int]) -> None:
    """Raises PolicyError for a run that would be refused after hours: of a later scenario, or on a later seed."""
    from msgspec.structs import replace

    from tokenfleet.sim.run import ready

    for seed in seeds:
        try:
            ready(replace(base, seed=seed))
        except PolicyError as error:
            raise PolicyError(f"{scenario}: {error}") from error


def _tune(
    scenario: str,
    base: "RunOptions",
    names: Sequence[str],
    seeds: Sequence[int],
    make: Callable[[Sequence["Job"]], list["Cell"]],
) -> dict[str, tuple["Tried", ...]]:
    from tokenfleet.sim.tuned import grid_of, tried

    return tried(make(jobs_of(scenario, base, grid_of(names), seeds)))


def jobs_of(scenario: str, base: "RunOptions", policies: Iterable[str], seeds: Sequence[int]) -> list["Job"]:
    """Each policy on each seed."""
    from msgspec.structs import replace

    from tokenfleet.sim.compare import Job

    return [
        Job(scenario=scenario, options=replace(base, policy=policy, seed=seed)) for policy in policies for seed in seeds
    ]


def policies_of(text: str) -> list[str]:
    """Names with commas, each once; a part with `=` and no `:` goes on with the settings of the one before."""
    names: list[str] = []
    for part in _split(text):
        if names and "=" in part and ":" not in part:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return list(dict.fromkeys(names))


def seeds_of(option: str, text: str) -> list[int]:
    """Numbers with commas and ranges, in order, each once. Raises PolicyError for anything else."""
    seeds: dict[int, None] = {}
    for part in _split(text):
        found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if found is None:
            raise PolicyError(f"{option} {text!r}: {part!r} is neither a number nor a range such as 1-4")
        first, last = found[1], found[2] or found[1]
        seeds.update(dict.fromkeys(range(int(first), int(last) + 1)[: SEEDS_MAX + 1]))
    if not 0 < len(seeds) <= SEEDS_MAX:
        raise PolicyError(f"{option} {text!r}: 1 to {SEEDS_MAX} seeds, got {len(seeds)}")
    return list(seeds)


SEEDS_MAX = 1_000
WIDTH_OF_FILES = 150  # columns where the output is no terminal: a row a line


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
