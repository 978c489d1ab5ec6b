"""Policy commands: check, show and apply a policy file, try one on a share of requests, see how it does."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.client.setup_commands import STATE, KafkaOption, State, endpoints

policy_app = typer.Typer(no_args_is_help=True, help="The policy: classes, tenants, models, sites, weights.")


@policy_app.command("check")
def policy_check(file: Path) -> None:
    """Check a policy file as a replica would read it."""
    from tokenfleet.adapters.policy_file import load_policy
    from tokenfleet.client.policies import check_can_be_steered

    policy, digest = load_policy(str(file))
    check_can_be_steered(file)
    typer.echo(f"revision {policy.revision} is good: {', '.join(policy.classes)}; sha256 {digest}")


@policy_app.command("show")
def policy_show(
    in_force: Annotated[bool, typer.Option("--in-force", help="The last one that was published instead.")] = False,
    kafka: KafkaOption = "",
    state_dir: State = STATE,
) -> None:
    """Print the shipped policy, to start one's own from."""
    from tokenfleet.adapters.policy_file import policy_text
    from tokenfleet.client.policies import read_log

    log = asyncio.run(read_log(kafka or endpoints(state_dir).kafka)) if in_force else None
    published = None if log is None else log.in_force
    typer.echo(policy_text() if published is None else published.toml, nl=False)


@policy_app.command("apply")
def policy_apply(
    file: Path,
    canary: Annotated[
        float | None, typer.Option(help="Try it on this percentage of requests first, at most 50.")
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="How long to try: 90s, 10m, 2h. Only with --canary.")] = "10m",
    next_: Annotated[bool, typer.Option("--next", help="Under the next number, whatever the file says.")] = False,
    kafka: KafkaOption = "",
    state_dir: State = STATE,
) -> None:
    """Put a policy file into force everywhere, or try it.

    Its revision must be greater than any published; the controller of shares publishes too. A canary that does worse
    ends at once, one that does not is put into force when its time is over, if enough of its requests have ended by
    then.
    """
    from tokenfleet.client.policies import (
        check_can_be_steered,
        check_can_be_undone,
        duration_s,
        publish,
        publish_next,
        refuse_no_newer,
        revision_in,
        share_of,
    )

    check_can_be_steered(file)
    if canary is None:
        revision = revision_in(file)
    else:
        check_can_be_undone(file)
        revision = revision_in(file, share=share_of(canary), for_s=duration_s(for_))
    at = kafka or endpoints(state_dir).kafka
    if next_:
        revision = asyncio.run(publish_next(at, revision))
    else:
        if not kafka:
            asyncio.run(refuse_no_newer(file, endpoints(state_dir).gateways))
        asyncio.run(publish(at, revision))
    if canary is None:
        typer.echo(f"policy revision {revision.revision} is published")
    else:
        typer.echo(
            f"policy revision {revision.revision} is on trial for {canary:g} % of requests and {for_}; "
            "see `tokenfleet policy status`"
        )


@policy_app.command("status")
def policy_status(kafka: KafkaOption = "", state_dir: State = STATE) -> None:
    """Show what is in force, how a canary does, the history."""
    from rich.console import Console

    from tokenfleet.adapters.clock import wall_s
    from tokenfleet.client.policies import arms_table, history_table, read_log, status_lines

    log = asyncio.run(read_log(kafka or endpoints(state_dir).kafka))
    for line in status_lines(log, now_wall_s=wall_s()):
        typer.echo(line)
    for table in (arms_table(log), history_table(log)):
        if table is not None:
            Console().print(table)


@policy_app.command("history")
def policy_history(
    postgres: Annotated[str, typer.Option(help="DSN. Default: the running fleet's.")] = "", state_dir: State = STATE
) -> None:
    """Show who published what and why, and which shares moved."""
    from rich.console import Console

    from tokenfleet.client.policy_history import changes_table, history_rows

    rows = asyncio.run(history_rows(postgres or endpoints(state_dir).postgres))
    Console().print(changes_table(rows) if rows else "no revision was published: all go by the file they started with")


@policy_app.command("shadows")
def policy_shadows(
    postgres: Annotated[str, typer.Option(help="DSN. Default: the running fleet's.")] = "", state_dir: State = STATE
) -> None:
    """Show where the policy's shadows would have sent requests."""
    from rich.console import Console

    from tokenfleet.client.shadows import shadow_rows, shadows_table

    rows = asyncio.run(shadow_rows(postgres or endpoints(state_dir).postgres))
    if not rows:
        typer.echo("no decision had a shadow: name one in the policy, as [shadows.NAME] with weights of tokenpilot")
        return
    Console().print(shadows_table(rows))


@policy_app.command("rollback")
def policy_rollback(
    to: Annotated[Path | None, typer.Option(help="Policy file to return to. Default: the one in force.")] = None,
    reason: Annotated[str, typer.Option(help="Why, for those who look later.")] = "",
    kafka: KafkaOption = "",
    state_dir: State = STATE,
) -> None:
    """End the open canary: all go back to what is in force."""
    from tokenfleet.client.policies import roll_back

    revision = asyncio.run(roll_back(kafka or endpoints(state_dir).kafka, to=to, reason=reason))
    typer.echo(f"policy revision {revision.revision} is published: {revision.reason}")
