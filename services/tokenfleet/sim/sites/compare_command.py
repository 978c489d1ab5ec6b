"""The command `sim compare sites`: designs of cross-site dispatch on the same requests."""

from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.sim.compare_command import seeds_of
from tokenfleet.sim.fleet_options import EventDelay, ProfileName
from tokenfleet.sim.sites.command import Copies, Ingresses, Replicas, ResidencyShare, SummaryAge, options_of


def compare_sites(
    copies: Copies = None,
    residency: ResidencyShare = None,
    summary_age: SummaryAge = None,
    ingresses: Ingresses = None,
    replicas: Replicas = None,
    event_delay: EventDelay = None,
    profile: ProfileName = None,
    designs: Annotated[str, typer.Option(help="Designs, with commas between them. {all}")] = "",
    baseline: Annotated[str, typer.Option(help="What changes are against.")] = "ideal",
    seeds: Annotated[str, typer.Option(help="As 1,2,5 or 1-4.")] = "1-4",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for finished runs: a broken-off comparison goes on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare designs of dispatch between sites with the ideal, on the same requests.

    What stands in {} is taken where no option tells.
    """
    import msgspec

    from tokenfleet.core.errors import PolicyError, listed
    from tokenfleet.sim.made import made_of
    from tokenfleet.sim.sites.compare import compared, site_runs, table_of, wanted
    from tokenfleet.sim.sites.dispatchers import DESIGNS

    base = options_of(
        copies=copies,
        residency=residency,
        summary_age_s=summary_age,
        ingresses=ingresses,
        replicas=replicas,
        event_delay_s=event_delay,
        profile=profile,
    )
    named = tuple(filter(None, designs.split(","))) or tuple(DESIGNS)
    if unknown := [name for name in (*named, baseline) if name not in DESIGNS]:
        raise PolicyError(f"{unknown[0]!r} is no design: there is {listed(tuple(DESIGNS))}")
    if baseline not in named:
        named = (baseline, *named)
    cells = made_of(
        site_runs(keep), wanted(base, named, seeds_of("--seeds", seeds)), processes=jobs, what="sites", keep=keep
    )
    table = compared(cells, baseline=baseline)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(table)).decode())
    else:
        typer.echo(table_of(table))
