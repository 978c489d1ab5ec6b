"""Replay command: whether recorded decisions follow from their evidence, and what other weights would have changed."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenfleet.client.ask_commands import numbers_of
from tokenfleet.client.setup_commands import STATE, State, endpoints
from tokenfleet.core.errors import BadRecordError, BadRequestError, NotFoundError, SetupError

if TYPE_CHECKING:
    from tokenfleet.core.decision import Decision
    from tokenfleet.core.policy import Policy
    from tokenfleet.core.tokenpilot.replay import Rescored

SHOWN_MAX = 50  # differences told one by one
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def replay(
    request_id: Annotated[str, typer.Argument(help="Request whose decisions to replay. Default: all of --since.")] = "",
    since: Annotated[str, typer.Option(help="How far back, for example 90s, 15m, 1h, 2d.")] = "1h",
    file: Annotated[Path | None, typer.Option(help="Decisions as JSON lines, instead of PostgreSQL.")] = None,
    weights: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, another weight of TokenPilot; may be given again.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy file they were made under. Default: the shipped one.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="The newest so many.")] = 10_000,
    postgres: Annotated[str, typer.Option(help="DSN. Default: the running fleet's.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    state_dir: State = STATE,
) -> None:
    """Choose recorded decisions again from their own evidence.

    Exit code 1 when one gives another choice. With --weights: which choices would change.
    """
    from tokenfleet.adapters.policy_file import load_policy
    from tokenfleet.core.tokenpilot.replay import other_weights, rescored, reweighed

    changed = numbers_of("--weights", weights)
    terms, _ = load_policy(policy)
    other_weights(terms.tokenpilot, changed)  # a wrong name is told before anything is read
    if file is not None:
        decisions = read_decisions(file, request_id)[-limit:]
    else:
        decisions = asyncio.run(_recorded(postgres or endpoints(state_dir).postgres, request_id, _ago_s(since), limit))
    if not decisions:
        of = f"of {request_id!r}" if request_id else f"in {file}" if file is not None else f"since {since}"
        raise NotFoundError(f"no decision is recorded {of}")
    told = [
        reweighed(each, terms.tokenpilot, changed) if changed else rescored(each, terms.tokenpilot)
        for each in decisions
    ]
    if as_json:
        typer.echo(json.dumps(replay_figures(told, changed), indent=2))
    else:
        for line in (*replay_words(told, changed), *_foreign(decisions, terms)):
            typer.echo(line)
        if len(decisions) == limit:
            typer.echo(f"only the newest {limit:,} were read; --limit reads more")
    if not changed and any(each.outcome == "different" for each in told):
        raise typer.Exit(1)


def replay_figures(told: Sequence["Rescored"], changed: dict[str, float]) -> dict[str, object]:
    """What `replay --json` prints."""
    counts = Counter(each.outcome for each in told)
    return {
        "decisions": len(told),
        "weights": changed,
        "same": counts["same"],
        "unknown": counts["unknown"],
        "no_choice": counts["no_choice"],
        "different": [
            {
                "decision": each.decision.id,
                "request": each.decision.request,
                "recorded": each.decision.target,
                "replayed": each.target,
                "how": each.how,
                "why": each.why,
            }
            for each in told
            if each.outcome == "different"
        ],
    }


def replay_words(told: Sequence["Rescored"], changed: dict[str, float]) -> Iterable[str]:
    """What `replay` prints."""
    counts = Counter(each.outcome for each in told)
    chosen = len(told) - counts["no_choice"]
    differing = [each for each in told if each.outcome == "different"]
    yield f"{len(told):,} decisions, {chosen:,} of them chose an instance or refused by the filters' counts"
    if changed:
        share = len(differing) / chosen if chosen else 0.0
        yield f"under {', '.join(f'{name} = {value:g}' for name, value in changed.items())}:"
        yield f"  {len(differing):,} would choose otherwise ({share:.1%}), among the candidates that each kept"
        yield f"  {counts['same']:,} would choose the same"
    else:
        yield f"  {counts['same']:,} give the same choice again"
    for why, count in Counter(each.why for each in told if each.outcome == "unknown").most_common():
        yield f"  {count:,} can't be told: {why}"
    if not changed:
        yield f"  {len(differing):,} differ"
    for each in differing[:SHOWN_MAX]:
        yield f"{each.decision.request} [{each.decision.id}]: recorded {each.decision.target or '-'}, " + (
            f"replayed {each.target or '-'}: {each.why}"
        )
    if len(differing) > SHOWN_MAX:
        yield f"... and {len(differing) - SHOWN_MAX:,} more; --json lists all"


def read_decisions(file: Path, request_id: str) -> "list[Decision]":
    """The decisions in a file of JSON lines, as `decisions.body` holds them; of one request if named.

    Raises SetupError for a file that can't be read and BadRecordError for a line, with its number.
    """
    import msgspec

    from tokenfleet.adapters.safe_text import from_json
    from tokenfleet.core.decision import Decision

    found: list[Decision] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    decision: Decision = from_json(line, Decision)
                except msgspec.DecodeError as error:
                    raise BadRecordError(f"{file}:{number}: no decision ({error})") from error
                if request_id in ("", decision.request):
                    found.append(decision)
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"{file} can't be read: {error}") from error
    return found


async def _recorded(dsn: str, request_id: str, ago_s: float, limit: int) -> "list[Decision]":
    """Decisions from PostgreSQL, oldest first. Raises SetupError when it does not answer."""
    from tokenfleet.adapters.audit_store import AuditStore
    from tokenfleet.adapters.clock import wall_s
    from tokenfleet.adapters.postgres import Postgres, PostgresAwayError
    from tokenfleet.adapters.safe_text import from_json
    from tokenfleet.core.decision import Decision

    try:
        async with Postgres(dsn) as postgres:
            store = AuditStore(postgres)
            if request_id:
                bodies, _ = await store.told_of(request_id)
            else:
                bodies = await store.decisions_like(
                    filters=("",) * 5, since_s=wall_s() - ago_s, until_s=None, limit=limit
                )
                bodies.reverse()
    except PostgresAwayError as error:
        raise SetupError(
            f"PostgreSQL gives no decisions ({error}); does it run, and has `tokenfleet migrate`?"
        ) from None
    return [from_json(body, Decision) for body in bodies]


def _foreign(decisions: "Sequence[Decision]", terms: "Policy") -> Iterable[str]:
    """Says so where the limits of another policy revision were used than decided."""
    foreign = Counter(each.policy_revision for each in decisions if each.policy_revision != terms.revision)
    for revision, count in sorted(foreign.items()):
        yield (
            f"{count:,} were made under policy revision {revision}, replayed with the limits of {terms.revision}: "
            "give its file with --policy"
        )


def _ago_s(since: str) -> float:
    if (match := re.fullmatch(r"(\d{1,9})([smhd])", since)) is None:
        raise BadRequestError("--since", f"{since!r} is not a number with s, m, h or d, such as 15m")
    return int(match[1]) * UNITS_S[match[2]]
