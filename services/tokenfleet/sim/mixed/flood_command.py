"""The command `sim run flood`: what one tenant's flood takes from the others."""

from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.sim.fleet_options import Instances
from tokenfleet.sim.mixed.command import Load, options_of

if TYPE_CHECKING:
    from tokenfleet.sim.mixed.flood import FloodResult

USUAL_LOAD, USUAL_TENANTS, USUAL_FLOOD, USUAL_INSTANCES = 0.8, 10, 100.0, 4


def run_flood(
    instances: Instances = USUAL_INSTANCES,
    load: Load = USUAL_LOAD,
    tenants: Annotated[int, typer.Option(help="Tenants who share the load evenly; the first then floods.")] = (
        USUAL_TENANTS
    ),
    flood: Annotated[float, typer.Option(help="How many times its chat the first tenant sends.")] = USUAL_FLOOD,
    design: Annotated[str, typer.Option(help="As of `sim run mixed`.")] = "slomax",
    seed: Annotated[int, typer.Option(help="Of long and batch requests and of all chance in the fleet.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve a mixed load of several tenants without and with the flood of one of them, and compare the others."""
    from time import process_time  # of the processor, for requests_per_cpu_s alone

    import msgspec

    from tokenfleet.sim.mixed.flood import run_flood
    from tokenfleet.sim.mixed.workload import LEN_S
    from tokenfleet.sim.words import progress_bar

    options = options_of(instances=instances, load=load, tenants=tenants, flood=flood, design=design, seed=seed)
    with progress_bar(f"{design}, seed {seed}, calm and flooded", total_s=LEN_S) as progress:
        result = run_flood(options, cpu_s=process_time, progress=progress)
    typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode() if as_json else _words(result))


def _words(result: "FloodResult") -> str:
    calm, flooded = result.calm, result.flooded
    ratios = ", ".join(
        f"{name} {'never' if ratio is None else f'{ratio:.2f}'}" for name, ratio in result.ttft_p99_ratio.items()
    )
    return (
        f"{result.design}: load {result.load:g} on {result.instances} instances by {result.tenants} tenants, one "
        f"sends {result.flood:g} times its chat ({flooded.flooding_requests:,} requests), seed {result.seed}\n"
        f"the others keep {result.kept:.1%} of their goodput; attainment {calm.others_attainment:.2%} without the "
        f"flood, {flooded.others_attainment:.2%} in it, the worst of them {flooded.worst_attainment:.2%}\n"
        f"their p99 of time to first token, in the flood over without: {ratios}\n"
        f"of their long prompts were refused {calm.refused_share.get('long', 0.0):.1%} without the flood, "
        f"{flooded.refused_share.get('long', 0.0):.1%} in it"
    )
