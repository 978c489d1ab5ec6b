"""Setup commands: topics and policy on the command line, and where the other commands find a running fleet."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.core.errors import BadRequestError

if TYPE_CHECKING:
    from tokenfleet.adapters.endpoints import Endpoints

topics_app = typer.Typer(no_args_is_help=True, help="The Kafka topics that everything travels on.")
policy_app = typer.Typer(no_args_is_help=True, help="The policy: classes, tenants, models, sites, weights.")

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


@policy_app.command("check")
def policy_check(file: Path) -> None:
    """Say what is wrong with a policy file, as a replica would read it."""
    from tokenfleet.adapters.policy_file import load_policy

    policy, digest = load_policy(str(file))
    typer.echo(f"revision {policy.revision} is good: {', '.join(policy.classes)}; sha256 {digest}")


@policy_app.command("show")
def policy_show() -> None:
    """Print the shipped policy, to start one's own from."""
    from tokenfleet.adapters.policy_file import policy_text

    typer.echo(policy_text(), nl=False)


@policy_app.command("apply")
def policy_apply(file: Path, kafka: KafkaOption = "", state_dir: State = STATE) -> None:
    """Put a policy file into force everywhere.

    Its revision must be greater than the one in force.
    """
    from tokenfleet.client.operate import publish_policy, refuse_no_newer

    if not kafka:
        asyncio.run(refuse_no_newer(file, endpoints(state_dir).gateways))
    revision = asyncio.run(publish_policy(kafka or endpoints(state_dir).kafka, file))
    typer.echo(f"policy revision {revision} is published")


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
