"""Setup commands: topics on the command line, and where the other commands find a running fleet."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.core.errors import BadRequestError

if TYPE_CHECKING:
    from tokenfleet.adapters.endpoints import Endpoints

topics_app = typer.Typer(no_args_is_help=True, help="The Kafka topics that everything travels on.")

State = Annotated[Path, typer.Option(help="State folder of the fleet that `up` started here.")]
KafkaOption = Annotated[str, typer.Option(help="HOST:PORT of Kafka. Default: the running fleet's.")]
STATE = Path(".tokenfleet")


@topics_app.command("apply")
def topics_apply(
    kafka: KafkaOption = "",
    site: Annotated[list[str] | None, typer.Option(help="Sites; default: those of the policy.")] = None,
    policy: Annotated[str, typer.Option(help="Policy file; default: the shipped one.")] = "",
    partitions: Annotated[list[str] | None, typer.Option(help="NAME=COUNT, for other partition counts.")] = None,
    replication: Annotated[int, typer.Option(min=1, help="Replicas of each partition.")] = 1,
    show: Annotated[bool, typer.Option("--print", help="Only print names, sizes and ACLs.")] = False,
    state_dir: State = STATE,
) -> None:
    """Create the topics that are missing; say which are wrong."""
    from tokenfleet.adapters.kafka_admin import apply
    from tokenfleet.adapters.kafka_plan import plan_text
    from tokenfleet.adapters.policy_file import load_policy
    from tokenfleet.adapters.topics import resized

    sites = tuple(site or load_policy(policy)[0].sites)
    table = resized(_counts(partitions or []))
    if show:
        typer.echo(plan_text(sites, topics=table, replication=replication))
        return
    bootstrap = kafka or endpoints(state_dir).kafka
    applied = asyncio.run(apply(bootstrap, sites, topics=table, replication=replication))
    for topic in applied:
        typer.echo(f"{topic.state:9} {topic.name} ({topic.partitions} partitions)")
        if topic.state == "wrong":
            typer.echo(f"          {topic.problem}; {topic.remedy}", err=True)
    if any(topic.state == "wrong" for topic in applied):
        raise typer.Exit(1)


def endpoints(state_dir: Path) -> "Endpoints":
    """Where the fleet that `up` started in `state_dir` listens. Raises SetupError when none did."""
    from tokenfleet.adapters.endpoints import read_endpoints

    return read_endpoints(state_dir)


def _counts(pairs: list[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pair in pairs:
        name, _, count = pair.partition("=")
        if not count.isdigit():
            raise BadRequestError("--partitions", f"{pair!r} is not NAME=COUNT")
        counts[name] = int(count)
    return counts
