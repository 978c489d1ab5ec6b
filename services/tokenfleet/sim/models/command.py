"""The command `sim run models`: two models on one simulated site."""

from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.sim.fleet_options import ProfileName

if TYPE_CHECKING:
    from tokenfleet.sim.models.run import ModelsOptions

Slots = Annotated[int | None, typer.Option("--instances", help="Slots, each of which serves one model at a time. {8}")]
Load = Annotated[float | None, typer.Option(help="1 is what slots shared out rightly can just serve. {0.9}")]
DemandName = Annotated[
    str | None, typer.Option("--demand", help="How demand moves: waves, step, ramp, square, steady. {waves}")
]


def run_models(
    instances: Slots = None,
    load: Load = None,
    demand: DemandName = None,
    design: Annotated[str | None, typer.Option(help="following, or static. {following}")] = None,
    split: Annotated[int | None, typer.Option(help="Slots of the first model at the start. {half}")] = None,
    profile: ProfileName = None,
    seed: Annotated[int, typer.Option(help="Of the requests, of waves, and of all chance in the fleet.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve the requests of two models on slots that are shared out between them.

    What stands in {} is taken where no option tells.
    """
    from time import process_time  # of the processor, for requests_per_cpu_s alone

    import msgspec
    from rich.console import Console

    from tokenfleet.sim.models.run import run_models
    from tokenfleet.sim.models.words import result_words
    from tokenfleet.sim.models.workload import LEN_S
    from tokenfleet.sim.words import progress_bar

    options = options_of(
        instances=instances, load=load, demand=demand, design=design, split=split, profile=profile, seed=seed
    )
    with progress_bar(options.label, total_s=LEN_S) as progress:
        result = run_models(options, cpu_s=process_time, progress=progress).result
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(result_words(result))


def options_of(**given: object) -> "ModelsOptions":
    """The usual options with those changed that are given, None counting as not."""
    from msgspec.structs import replace

    from tokenfleet.sim.models.run import ModelsOptions

    return replace(ModelsOptions(), **{name: value for name, value in given.items() if value is not None})
