"""The command `sim run mixed`: three classes on one simulated cluster."""

from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.sim.fleet_options import EventDelay, Gateways, Instances, ProfileName

if TYPE_CHECKING:
    from tokenfleet.sim.mixed.run import MixedOptions

Load = Annotated[float | None, typer.Option(help="1 is what the fleet can just serve. {0.9}")]
Chat = Annotated[str | None, typer.Option(help="Chat stream: azure-conv, azure-code or conversation. {azure-conv}")]
DemandName = Annotated[
    str | None,
    typer.Option("--demand", help="How the chat stream moves: waves, step, ramp, square, steady. {as recorded}"),
]
PriorFactor = Annotated[float | None, typer.Option(help="Routers start from the true coefficients × this. {1}")]
OutcomeDelay = Annotated[
    float | None, typer.Option(help="Seconds until a gateway hears of its requests' first and last tokens. {0}")
]
Learn = Annotated[bool, typer.Option("--learn", help="Routers learn their coefficients from outcomes.")]


def run_mixed(
    instances: Instances = None,
    load: Load = None,
    design: Annotated[
        str | None,
        typer.Option(help="slomax, or one to compare with: least_requests, priority, pools, at_once, gated. {slomax}"),
    ] = None,
    chat: Chat = None,
    demand: DemandName = None,
    shares: Annotated[str | None, typer.Option(help="Class shares of the KV: none, static, controlled. {none}")] = None,
    gateways: Gateways = None,
    event_delay: EventDelay = None,
    outcome_delay: OutcomeDelay = None,
    profile: ProfileName = None,
    seed: Annotated[int, typer.Option(help="Of long and batch requests and of all chance in the fleet.")] = 1,
    learn: Learn = False,
    prior_factor: PriorFactor = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve chat, long-context and batch requests on one simulated cluster.

    What stands in {} is taken where no option tells.
    """
    from time import process_time  # of the processor, for requests_per_cpu_s alone

    import msgspec
    from rich.console import Console

    from tokenfleet.sim.mixed.run import run_mixed
    from tokenfleet.sim.mixed.words import result_words
    from tokenfleet.sim.mixed.workload import LEN_S
    from tokenfleet.sim.words import progress_bar

    options = options_of(
        instances=instances,
        load=load,
        design=design,
        chat=chat,
        demand=demand,
        shares=shares,
        gateways=gateways,
        event_delay_s=event_delay,
        outcome_delay_s=outcome_delay,
        profile=profile,
        seed=seed,
        learning=learn or None,
        prior_factor=prior_factor,
    )
    with progress_bar(f"{options.design}, seed {seed}", total_s=LEN_S) as progress:
        result = run_mixed(options, cpu_s=process_time, progress=progress).result
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(result_words(result))


def options_of(**given: object) -> "MixedOptions":
    """The usual options with those changed that are given, None counting as not."""
    from msgspec.structs import replace

    from tokenfleet.sim.mixed.run import MixedOptions

    return replace(MixedOptions(), **{name: value for name, value in given.items() if value is not None})
