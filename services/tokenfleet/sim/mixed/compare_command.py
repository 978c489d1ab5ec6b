"""The command `sim compare mixed`: designs on the same chat, long-context and batch requests, several seeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.compare_command import WIDTH_OF_FILES, seeds_of
from tokenfleet.sim.fleet_options import EventDelay, Gateways, Instances, ProfileName
from tokenfleet.sim.mixed.command import Chat, Learn, Load, OutcomeDelay, PriorFactor, options_of

DESIGNS = "least_requests,priority,pools,slomax"


def compare_mixed(
    instances: Instances = None,
    load: Load = None,
    chat: Chat = None,
    gateways: Gateways = None,
    event_delay: EventDelay = None,
    outcome_delay: OutcomeDelay = None,
    profile: ProfileName = None,
    learn: Learn = False,
    prior_factor: PriorFactor = None,
    designs: Annotated[str, typer.Option(help="Names with commas.")] = DESIGNS,
    seeds: Annotated[str, typer.Option(help="As 1,2,5 or 1-4.")] = "1-4",
    baseline: Annotated[str, typer.Option(help="Design that changes are given against.")] = "least_requests",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for finished runs: a broken-off comparison goes on.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with pictures to this file.")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print a table for a document.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare designs on the same chat, long-context and batch requests.

    What stands in {} is taken where no option tells.
    """
    import msgspec
    from rich.console import Console

    from tokenfleet.sim.made import made_of
    from tokenfleet.sim.mixed.compare import mixed_runs
    from tokenfleet.sim.mixed.compare_words import compared_table, markdown
    from tokenfleet.sim.mixed.compared import compared
    from tokenfleet.sim.mixed.designs import design_named
    from tokenfleet.sim.mixed.report import report
    from tokenfleet.sim.page import check_report, write_report

    names = names_of(designs)
    for name in names:
        design_named(name)
    if baseline not in names:
        raise PolicyError(f"--baseline {baseline!r} is none of --designs {designs}")
    if html is not None:
        check_report(html)
    base = options_of(
        instances=instances,
        load=load,
        chat=chat,
        gateways=gateways,
        event_delay_s=event_delay,
        outcome_delay_s=outcome_delay,
        profile=profile,
        learning=learn or None,
        prior_factor=prior_factor,
    )
    wanted = [
        msgspec.structs.replace(base, design=name, seed=seed) for name in names for seed in seeds_of("--seeds", seeds)
    ]
    runs = mixed_runs(keep)
    cells = made_of(runs, wanted, processes=jobs, what="mixed", keep=keep)
    table = compared(cells, baseline=baseline)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(table)).decode())
    elif as_markdown:
        typer.echo(markdown(table))
    else:
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH_OF_FILES)
        console.print(compared_table(table, columns=console.width))
    if html is not None:  # last: a full disk costs the page, not the figures
        write_report(html, report(table, cells))


def names_of(text: str) -> Sequence[str]:
    """Names with commas, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
