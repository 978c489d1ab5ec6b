"""Books check: is everything that the load was answered and acknowledged a row in PostgreSQL, compared by id."""

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from tokenfleet.adapters.postgres import Connection, Postgres
from tokenfleet.local.load_stats import ANSWERED

MISSING_SHOWN = 10  # ids in the report; the rest are only counted

# A row's own time is its replica's clock, which may be wrong: then the time at which the row was recorded finds it.
MISSING_DECISIONS = """
select a.id from answered_decisions a
where not exists (select from decisions d where d.id = a.id and greatest(d.at, d.recorded_at) >= to_timestamp($1))
"""
MISSING_OUTCOMES = """
select a.request || ' ' || a.attempt || ' ' || a.kind as id from answered_outcomes a
where not exists (
    select from outcomes o
    where o.request = a.request and o.attempt = a.attempt and o.kind = a.kind
        and greatest(o.at, o.recorded_at) >= to_timestamp($1)
)
"""
ROWS = """
with run_decisions as (
    select from decisions where greatest(at, recorded_at) >= to_timestamp($1) and starts_with(request, $2)
), run_outcomes as (
    select request, kind from outcomes where greatest(at, recorded_at) >= to_timestamp($1) and starts_with(request, $2)
)
select (select count(*) from run_decisions) as decisions, (select count(*) from run_outcomes) as outcomes,
    (select count(distinct request) from run_outcomes
        where kind in ('finished', 'failed', 'cancelled', 'timed_out', 'rejected')) as ended
"""


class Books(Struct, frozen=True, kw_only=True):
    """What the load was told, each once: decision ids, and outcome events as (request, attempt, kind)."""

    decisions: frozenset[str]
    outcomes: frozenset[tuple[str, int, str]]


class Found(Struct, frozen=True, kw_only=True):
    """`missing` are those of the books without a row; the others count the run's rows, `ended` its ended requests."""

    missing: tuple[str, ...]
    decisions: int
    outcomes: int
    ended: int


def read_books(folder: Path) -> Books:
    """The books of the run; a line cut short by a kill was never whole and counts for nothing."""
    lines = list(_lines(folder / ANSWERED))
    return Books(
        decisions=frozenset(line[1] for line in lines if line[0] == "decision" and len(line) == 2),
        outcomes=frozenset(
            (line[1], int(line[2]), line[3]) for line in lines if line[0] == "outcome" and len(line) == 4
        ),
    )


async def find(postgres: Postgres, books: Books, *, run: str, since_wall_s: float) -> Found:
    """Compare the books with the rows of the run. Raises PostgresAwayError."""
    async with postgres.connection() as connection:
        await _copy(connection, "answered_decisions", "id text", [(id,) for id in books.decisions])
        await _copy(connection, "answered_outcomes", "request text, attempt bigint, kind text", sorted(books.outcomes))
        missing = [
            str(row["id"])
            for query in (MISSING_DECISIONS, MISSING_OUTCOMES)
            for row in await connection.fetch(query, since_wall_s)
        ]
        rows = await connection.fetchrow(ROWS, since_wall_s, run)
    assert rows is not None  # three counts always are a row
    return Found(missing=tuple(missing), decisions=rows["decisions"], outcomes=rows["outcomes"], ended=rows["ended"])


async def _copy(
    connection: Connection, table: str, columns: str, rows: list[tuple[str]] | list[tuple[str, int, str]]
) -> None:
    await connection.execute(f"create temp table {table} ({columns}) on commit drop")
    await connection.copy_records_to_table(table, records=rows)


def _lines(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield line.rstrip("\n").split("\t")
    except FileNotFoundError:
        return
