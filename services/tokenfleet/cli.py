"""The command line: start a fleet, look at it, ask it, change it.

Each command imports what it needs when it runs: `tokenfleet --help` is quick.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tokenfleet.client.ask_commands import Gateway, Json, route, schedule, targets_of, whatif
from tokenfleet.client.credential_commands import credentials_app
from tokenfleet.client.export_command import export
from tokenfleet.client.policy_commands import policy_app
from tokenfleet.client.replay_command import replay
from tokenfleet.client.setup_commands import STATE, KafkaOption, State, endpoints, topics_app
from tokenfleet.core.errors import BadRequestError, NotFoundError, SetupError, TokenFleetError
from tokenfleet.local.bench.command import bench
from tokenfleet.sim.commands import sim_app

if TYPE_CHECKING:
    from tokenfleet.wire.v1 import scheduler_pb2

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="TokenFleet: a control plane for fleets of LLM inference instances. Start with `tokenfleet up`.",
)
app.add_typer(topics_app, name="topics")
app.add_typer(policy_app, name="policy")
app.add_typer(credentials_app, name="credentials")
app.add_typer(sim_app, name="sim")
for command in (schedule, route, whatif, replay, bench):
    app.command()(command)
sim_app.command("export")(export)  # reads PostgreSQL, which the simulator can't see


@app.command()
def up(
    for_s: Annotated[float | None, typer.Option("--for", help="Seconds of load; then drain, report and end.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    kafka: Annotated[str, typer.Option(help="HOST:PORT of a real Kafka, instead of the embedded broker.")] = "",
    postgres: Annotated[str, typer.Option(help="DSN of a real PostgreSQL, instead of the embedded one.")] = "",
    engines: Annotated[Path | None, typer.Option(help="TOML file of real engines, instead of simulated ones.")] = None,
    no_load: Annotated[bool, typer.Option("--no-load", help="Start the fleet without the load.")] = False,
    copies: Annotated[
        int | None,
        typer.Option(min=1, max=6, help="Rotated copies of the trace: 1 is 3.4 requests/s. Default: the fleet's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the load.")] = 1,
    policy: Annotated[
        str, typer.Option(help="tokenpilot, power_of_two, least_requests, round_robin or random: who picks instances.")
    ] = "",
    design: Annotated[
        str,
        typer.Option(
            help="slomax, least_requests, priority or pools: one cluster, chat, long and batch requests, served so."
        ),
    ] = "",
    port_base: Annotated[int, typer.Option(min=1024, max=65000, help="First of the ports used.")] = 7400,
    state_dir: State = STATE,
) -> None:
    """Run a whole fleet on this machine until Ctrl-C.

    Broker, PostgreSQL, four sites with simulated engines, all services and a load. With --design one site of four
    engines that three classes of requests share.
    """
    from tokenfleet.local.options import UpOptions
    from tokenfleet.local.up import run_up

    options = UpOptions(
        for_s=for_s,
        json=as_json,
        kafka=kafka,
        postgres=postgres,
        engines=engines,
        no_load=no_load,
        copies=copies,
        seed=seed,
        policy=policy,
        design=design,
        port_base=port_base,
        state_dir=state_dir,
    )
    sys.exit(run_up(options))


def _process(name: str, words: str) -> None:
    def run(config: Annotated[Path | None, typer.Option(help="TOML file; TOKENFLEET_* variables win.")] = None) -> None:
        if config is not None:
            os.environ["TOKENFLEET_CONFIG"] = str(config)  # noqa: TID251  handed to the settings, which read it
        importlib.import_module(f"tokenfleet.processes.{name}").main()

    run.__doc__ = words
    app.command(name)(run)


_process("agent", "Run the agent: engines' metrics and KV events to Kafka.")
_process("capacity", "Run the capacity processor: telemetry to tables.")
_process("decide", "Run a decision replica of one site: the gRPC services.")
_process("goodput", "Run the goodput processor: what outcomes add up to.")
_process("audit", "Run the audit writer and its service, on PostgreSQL.")


@app.command()
def migrate(
    postgres: Annotated[str, typer.Option(help="DSN. Default: the running fleet's.")] = "", state_dir: State = STATE
) -> None:
    """Bring a PostgreSQL database to the newest schema."""
    from tokenfleet.adapters.postgres import migrate as run_migrations

    asyncio.run(run_migrations(postgres or endpoints(state_dir).postgres, wait_max_s=10.0))
    typer.echo("the database is at the newest schema")


@app.command()
def status(
    gateway: Gateway = "",
    site: Annotated[str, typer.Option(help="Ask a replica of this site.")] = "",
    output: Annotated[str, typer.Option("-o", help="table or json.")] = "table",
    watch: Annotated[bool, typer.Option("--watch", help="Again every second until Ctrl-C.")] = False,
    state_dir: State = STATE,
) -> None:
    """Show sites, pools and instances as a replica sees them."""
    from rich.console import Console
    from rich.live import Live

    from tokenfleet.client.sites import sites_table
    from tokenfleet.client.words import plain

    if output not in ("table", "json"):
        raise BadRequestError("-o", f"{output!r} is neither table nor json")
    if watch and output == "json":
        raise BadRequestError("--watch", "draws a table; for JSON ask again and again")
    names = [site] if site or gateway else list(endpoints(state_dir).gateways)
    seen, silent = _seen(gateway, names, state_dir)
    if output == "json":
        for each in seen:
            typer.echo(json.dumps(plain(each), indent=2))
        return
    if not watch:
        Console().print(sites_table(seen, silent=silent))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(sites_table(seen, silent=silent), auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            seen, silent = _seen(gateway, names, state_dir)
            live.update(sites_table(seen, silent=silent), refresh=True)


def _seen(gateway: str, names: list[str], state_dir: Path) -> tuple[list["scheduler_pb2.SitesResponse"], list[str]]:
    """What a replica of each site sees, and the sites where none answered. Raises SetupError if none did anywhere."""
    from tokenfleet.client import calls

    seen: list[scheduler_pb2.SitesResponse] = []
    silent: list[str] = []
    for name in names:
        try:
            seen.append(asyncio.run(calls.sites(targets_of(gateway, name, state_dir))))
        except SetupError:
            if name == names[-1] and not seen:
                raise
            silent.append(name)
    return seen, silent


Verdict = Annotated[str, typer.Option(help="Only admit, redirect, defer, queue or reject.")]
Audit = Annotated[str, typer.Option(help="HOST:PORT of the Audit service. Default: the running fleet's.")]


@app.command()
def find(
    verdict: Verdict = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    model: Annotated[str, typer.Option(help="Only this model's.")] = "",
    site: Annotated[str, typer.Option(help="Only decisions for this site.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 20,
    audit: Audit = "",
    as_json: Json = False,
    state_dir: State = STATE,
) -> None:
    """List the newest decisions, with the request ids to explain."""
    from rich.console import Console

    from tokenfleet.client import calls
    from tokenfleet.client.words import decisions_table, plain

    target = audit or endpoints(state_dir).audit
    found = asyncio.run(calls.find(target, verdict=verdict, tenant=tenant, model=model, site=site, limit=limit))
    if as_json:
        typer.echo(json.dumps(plain(found), indent=2))
    else:
        Console().print(decisions_table(found.decisions))


@app.command()
def explain(
    request_id: Annotated[str, typer.Argument(help="Request id. Default: the newest decision's.")] = "",
    verdict: Verdict = "",
    audit: Audit = "",
    as_json: Json = False,
    state_dir: State = STATE,
) -> None:
    """Explain what was decided on a request and what came of it."""
    from rich.console import Console

    from tokenfleet.client import calls
    from tokenfleet.client.words import explanation, plain

    target = audit or endpoints(state_dir).audit
    if not request_id:
        newest = asyncio.run(calls.find(target, verdict=verdict, limit=1)).decisions
        if not newest:
            raise NotFoundError("no decision is recorded yet" + (f" with verdict {verdict}" if verdict else ""))
        request_id = newest[0].request
    found = asyncio.run(calls.explain(target, request_id))
    if as_json:
        typer.echo(json.dumps(plain(found), indent=2))
    else:
        Console().print(explanation(request_id, found))


@app.command()
def drain(
    instance: str,
    site: Annotated[str, typer.Option(help="Site of the instance. Default: found by its name.")] = "",
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    reason: Annotated[str, typer.Option(help="Why, for those who look later.")] = "",
    kafka: KafkaOption = "",
    state_dir: State = STATE,
) -> None:
    """Give an instance no new work; what runs there ends by itself."""
    from tokenfleet.client.operate import drain_instance, site_of

    where = site or asyncio.run(site_of(instance, endpoints(state_dir).gateways))
    bootstrap = kafka or endpoints(state_dir).kafka
    asyncio.run(drain_instance(bootstrap, where, instance, undo=undo, reason=reason))
    typer.echo(f"{instance} at {where} {'takes work again' if undo else 'is draining'}")


def main() -> NoReturn:
    """Entry point: a domain error is one line and an exit code ≠ 0."""
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what matters of it, the errors say
    try:
        app(standalone_mode=True)
    except (BadRequestError, NotFoundError) as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    except TokenFleetError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


if __name__ == "__main__":
    main()
