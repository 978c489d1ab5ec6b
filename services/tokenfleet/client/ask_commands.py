"""Ask commands: one question on a request, from the command line: schedule, route, what if."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.client.setup_commands import STATE, State, endpoints
from tokenfleet.core.errors import BadRequestError, SetupError

if TYPE_CHECKING:
    from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Gateway = Annotated[str, typer.Option(help="HOST:PORT of a decision service. Default: the running fleet's.")]
Model = Annotated[str, typer.Option(help="Model to ask for.")]
Tenant = Annotated[str, typer.Option(help="Tenant that asks.")]
Site = Annotated[str, typer.Option(help="Site where the request arrives. Default: the first one.")]
RouteSite = Annotated[str, typer.Option(help="Site whose instances to choose from. Default: the first with engines.")]
Prompt = Annotated[int, typer.Option(help="Tokens of the prompt.")]
Budget = Annotated[int | None, typer.Option(help="Output budget in tokens.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Decide without placing or recording anything.")]
Wait = Annotated[float, typer.Option(min=0.0, help="Seconds that it may be held for an instance (late binding).")]
RequestId = Annotated[str, typer.Option("--id", help="Request id. Default: a new one.")]
Task = Annotated[str, typer.Option(help="Task label, for example batch.")]


def schedule(
    model: Model,
    tenant: Tenant,
    site: Site = "",
    prompt_tokens: Prompt = 1000,
    max_tokens: Budget = None,
    task: Task = "",
    wait: Wait = 0.0,
    request_id: RequestId = "",
    dry_run: DryRun = False,
    as_json: Json = False,
    gateway: Gateway = "",
    state_dir: State = STATE,
) -> None:
    """Ask for one decision: run now? at which site? which instance?"""
    from tokenfleet.client import calls

    request = _request(model, tenant, site, prompt_tokens, max_tokens, task, request_id, wait)
    _show(asyncio.run(calls.schedule(targets_of(gateway, site, state_dir), request, dry_run=dry_run)), as_json)


def route(
    model: Model,
    tenant: Tenant,
    site: RouteSite = "",
    prompt_tokens: Prompt = 1000,
    max_tokens: Budget = None,
    task: Task = "",
    wait: Wait = 0.0,
    request_id: RequestId = "",
    dry_run: DryRun = False,
    as_json: Json = False,
    gateway: Gateway = "",
    state_dir: State = STATE,
) -> None:
    """Ask for one instance of a site, and nothing else."""
    from tokenfleet.client import calls

    site = site or _site_serving(model, gateway, state_dir)
    request = _request(model, tenant, site, prompt_tokens, max_tokens, task, request_id, wait)
    _show(asyncio.run(calls.route(targets_of(gateway, site, state_dir), request, dry_run=dry_run)), as_json)


Pairs = list[str] | None


def whatif(
    model: Model,
    tenant: Tenant,
    site: RouteSite = "",
    prompt_tokens: Prompt = 1000,
    max_tokens: Budget = None,
    task: Task = "",
    request_id: RequestId = "",
    weights: Annotated[Pairs, typer.Option(help="NAME=VALUE, another weight of TokenPilot; again for more.")] = None,
    drain: Annotated[Pairs, typer.Option(help="Instance that would take no new work; again for more.")] = None,
    remove: Annotated[Pairs, typer.Option(help="Instance that would be gone; again for more.")] = None,
    add: Annotated[Pairs, typer.Option(help="INSTANCE[=COUNT], idle ones of its make; again for more.")] = None,
    calibration: Annotated[Pairs, typer.Option(help="NAME=FACTOR on what was learned; again for more.")] = None,
    as_json: Json = False,
    gateway: Gateway = "",
    state_dir: State = STATE,
) -> None:
    """Ask which instance it would be if some things were otherwise.

    The choice now and the choice then, on the present tables. Places nothing.
    """
    from rich.console import Console

    from tokenfleet.client import calls
    from tokenfleet.client.words import plain, what_if_words
    from tokenfleet.wire.v1 import scheduler_pb2

    changes = scheduler_pb2.Changes(
        weights=numbers_of("--weights", weights),
        drained=drain or (),
        removed=remove or (),
        added=[_added(each) for each in add or ()],
        calibration=numbers_of("--calibration", calibration),
    )
    site = site or _site_serving(model, gateway, state_dir)
    request = _request(model, tenant, site, prompt_tokens, max_tokens, task, request_id)
    told = asyncio.run(calls.what_if(targets_of(gateway, site, state_dir), request, changes))
    if as_json:
        typer.echo(json.dumps(plain(told), indent=2))
    else:
        Console().print(what_if_words(told))


def targets_of(gateway: str, site: str, state_dir: Path) -> tuple[str, ...]:
    """The replicas to ask: the given one, or those of `site` (default: the first) in the running fleet."""
    if gateway:
        return tuple(gateway.split(","))
    gateways = endpoints(state_dir).gateways
    name = site or next(iter(gateways))
    if name not in gateways:
        raise SetupError(f"no site {name!r} in the running fleet; there is: {', '.join(gateways)}")
    return gateways[name]


def _request(
    model: str,
    tenant: str,
    site: str,
    prompt_tokens: int,
    max_tokens: int | None,
    task: str,
    request_id: str,
    wait_max_s: float = 0.0,
) -> "decision_pb2.Request":
    import uuid

    from tokenfleet.wire.v1 import decision_pb2

    for name, value in (("--prompt-tokens", prompt_tokens), ("--max-tokens", max_tokens)):
        if value is not None and not -(2**63) <= value < 2**63:
            raise BadRequestError(name, f"{value} is no 64-bit number")
    return decision_pb2.Request(
        id=request_id or f"cli-{uuid.uuid4().hex[:12]}",
        model=model,
        tenant=tenant,
        origin=site,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        stream=not task,
        task=task,
        wait_max_s=wait_max_s,
    )


def _show(decision: "decision_pb2.Decision", as_json: bool) -> None:
    from rich.console import Console

    from tokenfleet.client.words import decision_words, plain

    if as_json:
        typer.echo(json.dumps(plain(decision), indent=2))
    else:
        Console().print(decision_words(decision))


def _site_serving(model: str, gateway: str, state_dir: Path) -> str:
    """The first site with engines for `model`; empty when a replica is named: its own."""
    from tokenfleet.client.operate import site_serving

    return "" if gateway else asyncio.run(site_serving(model, endpoints(state_dir).gateways))


def numbers_of(option: str, pairs: Pairs) -> dict[str, float]:
    """The numbers in NAME=NUMBER. Raises BadRequestError for what is none."""
    numbers: dict[str, float] = {}
    for pair in pairs or ():
        name, _, value = pair.partition("=")
        try:
            numbers[name] = float(value)
        except ValueError:
            raise BadRequestError(option, f"{pair!r} is not NAME=NUMBER") from None
    return numbers


def _added(pair: str) -> "scheduler_pb2.AddedInstances":
    from tokenfleet.wire.v1 import scheduler_pb2

    like, _, count = pair.partition("=")
    if count and not (count.isdecimal() and 0 < int(count) < 2**31):
        raise BadRequestError("--add", f"{pair!r} is not INSTANCE=COUNT")
    return scheduler_pb2.AddedInstances(like=like, count=int(count or 1))
