"""Commands: the simulator on the command line."""

from typing import Annotated

import typer
from typer.core import TyperGroup

from tokenfleet.sim.compare_command import compare
from tokenfleet.sim.fit_command import fit_profile
from tokenfleet.sim.fleet_options import Copies, EventDelay, Gateways, Instances, Length, ProfileName, Trace, Warm
from tokenfleet.sim.mixed.command import run_mixed
from tokenfleet.sim.mixed.compare_command import compare_mixed
from tokenfleet.sim.mixed.flood_command import run_flood
from tokenfleet.sim.models.command import run_models
from tokenfleet.sim.models.compare_command import compare_models
from tokenfleet.sim.plan.command import run_plan
from tokenfleet.sim.sites.command import run_sites
from tokenfleet.sim.sites.compare_command import compare_sites

ROUTING = "routing"


class RoutingUnlessNamed(TyperGroup):
    """Of two kinds of comparison that of routing need not be named: its arguments are names of scenarios."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        named = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if named else [ROUTING, *args])


sim_app = typer.Typer(no_args_is_help=True, help="The fleet simulator: policies and designs on real traces.")
run_app = typer.Typer(no_args_is_help=True, help="Run one simulation and print what came of it.")
sim_app.add_typer(run_app, name="run")
compare_app = typer.Typer(
    cls=RoutingUnlessNamed, help="Compare routing policies (the usual), mixed designs, shares of two models, or sites."
)
sim_app.add_typer(compare_app, name="compare")
run_app.command("mixed")(run_mixed)
run_app.command("flood")(run_flood)
run_app.command("models")(run_models)
run_app.command("sites")(run_sites)
run_app.command("plan")(run_plan)
sim_app.command("fit")(fit_profile)
compare_app.command(ROUTING)(compare)
compare_app.command("mixed")(compare_mixed)
compare_app.command("models")(compare_models)
compare_app.command("sites")(compare_sites)


@run_app.command(ROUTING)
def run_routing(
    trace: Trace = None,
    copies: Copies = None,
    instances: Instances = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy; `sim list` names them. {tokenpilot}")] = None,
    gateways: Gateways = None,
    event_delay: EventDelay = None,
    profile: ProfileName = None,
    seed: Annotated[int, typer.Option(help="Of rotation, jitter and all chance in the fleet.")] = 1,
    length: Length = None,
    warm: Warm = None,
    learn: Annotated[bool, typer.Option("--learn", help="TokenPilot learns its coefficients from outcomes.")] = False,
    prior_factor: Annotated[
        float | None, typer.Option(help="TokenPilot starts from the true coefficients × this.")
    ] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out and count lines that can't be used.")] = False,
    scenario: Annotated[str, typer.Option(help="Start from this scenario; other options change it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Route one trace through a simulated fleet.

    What stands in {} is taken where neither an option nor the scenario tells.
    """
    from time import process_time  # of the processor, for requests_per_cpu_s alone

    import msgspec
    from rich.console import Console

    from tokenfleet.sim.run import run, window
    from tokenfleet.sim.scenarios import options_of
    from tokenfleet.sim.words import progress_bar, result_words

    given = {
        "trace": trace,
        "copies": copies,
        "instances": instances,
        "policy": policy,
        "gateways": gateways,
        "event_delay_s": event_delay,
        "profile": profile,
        "seed": seed,
        "len_s": length,
        "warm_s": warm,
        "learning": learn or None,
        "prior_factor": prior_factor,
        "skip_bad": skip_bad or None,
    }
    options = options_of(scenario, {name: value for name, value in given.items() if value is not None})
    with progress_bar(f"{options.policy}, seed {seed}", total_s=window(options)[0]) as progress:
        result = run(options, cpu_s=process_time, progress=progress).result
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
    else:
        Console().print(result_words(result))


@sim_app.command("list")
def show_names(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List traces, policies, profiles, scenarios and the designs of mixed runs."""
    import msgspec

    from tokenfleet.sim.mixed.designs import DESIGNS
    from tokenfleet.sim.policies import POLICIES
    from tokenfleet.sim.profiles import profiles
    from tokenfleet.sim.scenarios import SCENARIOS
    from tokenfleet.sim.traces.read import SHIPPED

    names = {
        "traces": SHIPPED,
        "policies": POLICIES,
        "profiles": profiles(),
        "scenarios": SCENARIOS,
        "designs": DESIGNS,
    }
    if as_json:
        typer.echo(msgspec.json.encode({kind: sorted(known) for kind, known in names.items()}).decode())
        return
    for kind, known in names.items():
        typer.echo(f"{kind + ':':10} {', '.join(sorted(known))}")
