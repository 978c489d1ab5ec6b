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

    policy, digest = load_policy(str(file))
    typer.echo(f"revision {policy.revision} is good: {', '.join(policy.classes)}; sha256 {digest}")


@policy_app.command("show")
def policy_show() -> None:
    """Print the shipped policy, to start one's own from."""
    from tokenfleet.adapters.policy_file import policy_text

    typer.echo(policy_text(), nl=False)


@policy_app.command("apply")
def policy_apply(
    file: Path,
    canary: Annotated[
        float | None, typer.Option(help="Try it on this percentage of requests first, at most 50.")
    ] = None,
    for_: Annotated[str, typer.Option("--for", help="How long to try: 90s, 10m, 2h. Only with --canary.")] = "10m",
    kafka: KafkaOption = "",
    state_dir: State = STATE,
) -> None:
    """Put a policy file into force everywhere, or try it.

    Its revision must be greater than any published. A canary that does worse ends at once, one that does not is put
    into force when its time is over, if enough of its requests have ended by then.
    """
    from tokenfleet.client.policies import (
        check_can_be_undone,
        duration_s,
        publish,
        refuse_no_newer,
        revision_in,
        share_of,
    )

    if canary is None:
        revision = revision_in(file)
    else:
        check_can_be_undone(file)
        revision = revision_in(file, share=share_of(canary), for_s=duration_s(for_))
    if not kafka:
        asyncio.run(refuse_no_newer(file, endpoints(state_dir).gateways))
    asyncio.run(publish(kafka or endpoints(state_dir).kafka, revision))
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
