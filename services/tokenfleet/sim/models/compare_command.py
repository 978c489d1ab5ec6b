"""The command `sim compare models`: slots that follow demand beside every static split, several seeds."""

from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.compare_command import seeds_of
from tokenfleet.sim.fleet_options import ProfileName
from tokenfleet.sim.models.command import DemandName, Load, Slots, options_of


def compare_models(
    instances: Slots = None,
    load: Load = None,
    demand: DemandName = None,
    profile: ProfileName = None,
    splits: Annotated[str, typer.Option(help="Static splits, as slots of the first model: 3,4 or 1-7. {all}")] = "",
    seeds: Annotated[str, typer.Option(help="As 1,2,5 or 1-4.")] = "1-4",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    keep: Annotated[
        Path | None, typer.Option(help="Folder for finished runs: a broken-off comparison goes on.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare slots that follow demand with static splits, on the same requests for two models.

    What stands in {} is taken where no option tells.
    """
    import msgspec

    from tokenfleet.sim.made import made_of
    from tokenfleet.sim.models.compare import compared, designs, model_runs, table_of

    base = options_of(instances=instances, load=load, demand=demand, profile=profile)
    last = base.instances - 1
    static = seeds_of("--splits", splits or f"1-{last}")
    if not all(1 <= split <= last for split in static):
        raise PolicyError(f"--splits {splits}: each is 1 to {last}, for each model has a slot")
    wanted = designs(base, static, seeds_of("--seeds", seeds))
    cells = made_of(model_runs(keep), wanted, processes=jobs, what="models", keep=keep)
    table = compared(cells)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(table)).decode())
    else:
        typer.echo(table_of(table))
