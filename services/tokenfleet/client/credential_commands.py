"""Credential commands: a token and its entry in the credentials file, on the command line."""

import json
import re
from typing import Annotated

import typer

from tokenfleet.core.errors import BadRequestError

credentials_app = typer.Typer(no_args_is_help=True, help="Who may call, and for whom.")

NAME = re.compile(r"[A-Za-z0-9_-]+")  # a bare key of TOML


@credentials_app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the credential, for logs and refusals.")],
    role: Annotated[list[str], typer.Option(help="gateway, operator or auditor; again for more.")],
    tenant: Annotated[list[str] | None, typer.Option(help="Tenant to speak for; again for more. Default: all.")] = None,
) -> None:
    """Print a fresh token, once, and the entry to add to the file."""
    from tokenfleet.adapters.credentials import new_token, token_sha256
    from tokenfleet.core.identity import ROLES

    if not NAME.fullmatch(name):
        raise BadRequestError("NAME", f"{name!r} is not of letters, digits, - and _")
    if unknown := sorted(set(role) - set(ROLES)):
        raise BadRequestError("--role", f"{unknown[0]!r} is none of {', '.join(ROLES)}")
    if tenant and not all(tenant):
        raise BadRequestError("--tenant", "is empty; leave it out for all tenants")
    token = new_token()
    typer.echo(f"token, shown this once; whoever calls has it as TOKENFLEET_TOKEN: {token}\n")
    typer.echo(f"[credentials.{name}]\ntoken_sha256 = {_toml(token_sha256(token))}\nroles = {_toml(role)}")
    if tenant:
        typer.echo(f"tenants = {_toml(tenant)}")


def _toml(value: str | list[str]) -> str:
    """Strings and lists of them are written alike in JSON and in TOML."""
    return json.dumps(value, ensure_ascii=False)
