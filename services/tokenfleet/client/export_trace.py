"""Export trace: a fleet's own requests from PostgreSQL as a trace that the simulator replays.

A row is a logical request that ran: its arrival is its first decision's label, its lengths are those of how it ended.
Refused requests have no output length, so a replay is of the load that was served.
"""

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres, PostgresAwayError, RowsRefusedError
from tokenfleet.adapters.safe_text import from_json, safe_key
from tokenfleet.core.errors import NotFoundError, SetupError
from tokenfleet.core.trace_line import TraceLine

PAGE_ROWS = 2_000  # decisions read at a time: some 4 MB


class Window(Struct, frozen=True, kw_only=True):
    """Decisions labelled from `since_s` up to, not with, `until_s` (Unix seconds); empty names are any."""

    since_s: float
    until_s: float
    model: str = ""
    tenant: str = ""
    site: str = ""


class Exported(Struct, frozen=True, kw_only=True):
    """Logical requests seen in the window: `rows` were written, the others left out, by reason."""

    rows: int
    refused: int  # never ran
    open: int  # no end is known (yet)
    uncounted: int  # ended without output tokens, or nobody told how many
    without_keys: int  # of `rows`: without block keys, or with blocks of another size than the first ones


class _Decided(Struct, frozen=True, kw_only=True):
    """What of a decision's body a trace needs; bodies of other versions may lack the keys."""

    request: str
    attempt: int
    verdict: str
    tenant: str
    model: str
    request_class: str
    prompt_tokens: int
    at_wall_s: float
    block_keys: bytes = b""
    block_tokens: int = 0


class _Ended(Struct, frozen=True, kw_only=True):
    """What of an outcome's body a trace needs."""

    request: str
    attempt: int
    instance: str = ""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None


async def export_trace(dsn: str, window: Window, path: Path) -> Exported:
    """Write the window's requests to `path`, by arrival; the file is there when it is whole.

    Raises NotFoundError when no request ran in the window, SetupError when the database or the file can't be used.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            exported = await _written(dsn, window, file)
        if exported.rows:
            new.replace(path)
            return exported
    except (PostgresAwayError, RowsRefusedError) as error:
        raise SetupError(f"the database can't be read ({error}); is it the one that `audit` writes to?") from error
    except OSError as error:
        raise SetupError(f"{path} can't be written: {error.strerror}") from error
    finally:
        new.unlink(missing_ok=True)
    since, until = (
        datetime.fromtimestamp(at_s, UTC).isoformat(" ", "seconds") for at_s in (window.since_s, window.until_s)
    )
    raise NotFoundError(
        f"no request that ended was decided from {since} to {until}: {exported.refused} refused, {exported.open} open, "
        f"{exported.uncounted} without token counts; take another window with --since and --until"
    )


async def _written(dsn: str, window: Window, file: IO[bytes]) -> Exported:
    began_s: float | None = None
    block_tokens = rows = refused = still_open = uncounted = without_keys = 0
    async with Postgres(dsn) as postgres:
        async for decided, ended in _requests(postgres, window):
            if ended is None:
                refused += decided.verdict == "reject"
                still_open += decided.verdict != "reject"
                continue
            if not ended.output_tokens:
                uncounted += 1
                continue
            block_tokens = block_tokens or decided.block_tokens
            keyed = bool(decided.block_keys) and decided.block_tokens == block_tokens
            began_s = decided.at_wall_s if began_s is None else began_s
            line = _line(decided, ended, at_s=decided.at_wall_s - began_s)
            if keyed:
                line = msgspec.structs.replace(line, keys=decided.block_keys)
            if block_tokens:
                line = msgspec.structs.replace(line, block_tokens=block_tokens)
            file.write(msgspec.json.encode(line) + b"\n")
            rows += 1
            without_keys += not keyed
    return Exported(rows=rows, refused=refused, open=still_open, uncounted=uncounted, without_keys=without_keys)


def _line(decided: _Decided, ended: _Ended, *, at_s: float) -> TraceLine:
    """Times are told for requests that ran at their first attempt: a second one's begins before its engine knew it."""
    measured = ended.attempt == 0
    return TraceLine(
        at_s=at_s,
        prompt_tokens=ended.prompt_tokens or decided.prompt_tokens,
        output_tokens=ended.output_tokens or 0,
        id=decided.request,
        tenant=decided.tenant,
        class_=decided.request_class,
        model=decided.model,
        instance=ended.instance,
        cached_tokens=ended.cached_tokens,
        ttft_s=ended.ttft_s if measured else None,
        tpot_s=ended.tpot_s if measured else None,
    )


async def _requests(postgres: Postgres, window: Window) -> AsyncIterator[tuple[_Decided, _Ended | None]]:
    """Each logical request's first decision in the window, by arrival, and how it ended. A retry's is never first."""
    seen: set[str] = set()
    after_at, after_id = datetime.fromtimestamp(window.since_s, UTC), ""
    until = datetime.fromtimestamp(window.until_s, UTC)
    names = (safe_key(window.tenant), window.model, window.site)
    while True:
        page = await postgres.fetch(DECISIONS, after_at, after_id, until, *names, PAGE_ROWS)
        if not page:
            return
        after_at, after_id = page[-1]["at"], page[-1]["id"]
        first: list[_Decided] = []
        for row in page:
            decided: _Decided = from_json(row["body"], _Decided)
            if decided.attempt == 0 and decided.request not in seen:
                seen.add(decided.request)
                first.append(decided)
        ends = await _ends(postgres, [decided.request for decided in first])
        for decided in first:
            yield decided, ends.get(decided.request)


async def _ends(postgres: Postgres, requests: list[str]) -> dict[str, _Ended]:
    """How each request ended: by its last attempt that counted tokens, else its last; the origin's word stands."""
    ends: dict[str, _Ended] = {}
    for row in await postgres.fetch(ENDS, [safe_key(request) for request in requests]):
        event: _Ended = from_json(row["body"], _Ended)
        ends[event.request] = event
    return ends


# The order puts the row to keep last.
ENDS = """
select body from outcomes
where request = any($1::text[]) and kind in ('finished', 'failed', 'cancelled', 'timed_out')
order by request, coalesce(output_tokens, 0) > 0, attempt, at_origin
"""
DECISIONS = """
select id, at, body from decisions
where (at, id) > ($1::timestamptz, $2::text) and at < $3::timestamptz
    and day >= ($1::timestamptz at time zone 'UTC')::date and day <= ($3::timestamptz at time zone 'UTC')::date
    and ($4 = '' or tenant = $4) and ($5 = '' or model = $5) and ($6 = '' or site = $6)
order by at, id limit $7
"""
