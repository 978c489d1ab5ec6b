"""Export command: `tokenfleet sim export`, the fleet's own requests as a trace."""

import asyncio
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.client.setup_commands import STATE, State, endpoints
from tokenfleet.core.errors import BadRequestError

UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def export(
    file: Annotated[Path, typer.Argument(help="File to write; `sim run routing --trace FILE` reads it.")],
    since: Annotated[str, typer.Option(help="From when: 90s, 30m, 1h, 2d ago, or a time as 2026-01-31T18:00Z.")] = "1h",
    until: Annotated[str, typer.Option(help="Up to when, likewise.")] = "0s",
    model: Annotated[str, typer.Option(help="Only this model's requests.")] = "",
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    site: Annotated[str, typer.Option(help="Only those decided for this site.")] = "",
    postgres: Annotated[str, typer.Option(help="DSN. Default: the running fleet's.")] = "",
    state_dir: State = STATE,
) -> None:
    """Write the fleet's own requests, from PostgreSQL, as a trace that the simulator replays."""
    from tokenfleet.adapters.clock import wall_s
    from tokenfleet.client.export_trace import Window, export_trace

    now_s = wall_s()
    window = Window(
        since_s=moment_s("--since", since, now_s=now_s),
        until_s=moment_s("--until", until, now_s=now_s),
        model=model,
        tenant=tenant,
        site=site,
    )
    if window.since_s >= window.until_s:
        raise BadRequestError("--since", f"{since} is not before --until {until}")
    exported = asyncio.run(export_trace(postgres or endpoints(state_dir).postgres, window, file))
    typer.echo(
        f"{exported.rows} requests in {file}, {exported.without_keys} of them without block keys; left out: "
        f"{exported.refused} refused, {exported.open} open, {exported.uncounted} without token counts"
    )


def moment_s(option: str, text: str, *, now_s: float) -> float:
    """Unix seconds of "30m" (ago) or of an ISO time, UTC unless it names a zone. Raises BadRequestError."""
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII)
    if ago:
        return max(0.0, now_s - float(ago[1]) * UNIT_S[ago[2]])
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadRequestError(option, f"{text!r} is neither like 30m nor like 2026-01-31T18:00Z") from None
    return max(0.0, (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
