"""Policy history: the revisions that were published, and what the controller of shares changed, from PostgreSQL."""

from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table
from rich.text import Text

from tokenfleet.adapters.postgres import Postgres, PostgresAwayError
from tokenfleet.adapters.safe_text import from_json
from tokenfleet.client.words import moment
from tokenfleet.core.errors import SetupError
from tokenfleet.core.slomax.terms import Setting

ROWS_MAX = 50
REVISIONS = """
select revision, canary, published_by, reason, extract(epoch from at)::double precision as at_wall_s,
    pool, kind, before::text, after::text, why
from (select * from policy_revisions order by revision desc, recorded_at desc limit $1) as revisions
left join share_changes using (revision, sha256)
order by revision desc, revisions.recorded_at desc, pool
"""


class HistoryRow(Struct, frozen=True, kw_only=True):
    """A published file, or one pool that it changed the shares of; `before` and `after` are Settings as JSON."""

    revision: int
    canary: bool
    published_by: str
    reason: str
    at_wall_s: float
    pool: str | None
    kind: str | None
    before: str | None
    after: str | None
    why: str | None


async def history_rows(dsn: str, *, limit: int = ROWS_MAX) -> list[HistoryRow]:
    """Of the last `limit` revisions, newest first. Raises SetupError if PostgreSQL does not answer."""
    try:
        async with Postgres(dsn) as postgres:
            return [HistoryRow(**dict(row)) for row in await postgres.fetch(REVISIONS, limit)]
    except PostgresAwayError as error:
        raise SetupError(f"PostgreSQL: {error}; start it, run `tokenfleet migrate`, or give its --postgres") from error


def changes_table(rows: Sequence[HistoryRow]) -> Table:
    """One line a revision, or a pool of it."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("revision", "at", "by", "pool", "shares and ceiling", "why"):
        table.add_column(column, justify="right" if column == "revision" else "left", overflow="fold")
    for row in rows:
        by = f"{row.published_by or 'unknown'}{', on trial' if row.canary else ''}"
        changed = "" if row.before is None or row.after is None else _changed(row.before, row.after)
        why = row.why if row.why is not None else row.reason
        kind = f"{row.kind}: " if row.kind not in (None, "step") else ""
        table.add_row(str(row.revision), moment(row.at_wall_s), Text(by), row.pool or "", changed, Text(f"{kind}{why}"))
    return table


def _changed(before: str, after: str) -> str:
    old, new = (from_json(text, Setting) for text in (before, after))
    told = [
        f"{name} {old.shares.get(name, 0.0):.1%} → {share:.1%}"
        for name, share in new.shares.items()
        if share != old.shares.get(name)
    ]
    told += [f"ceiling {old.ceiling:.1%} → {new.ceiling:.1%}"] if new.ceiling != old.ceiling else []
    return ", ".join(told)
