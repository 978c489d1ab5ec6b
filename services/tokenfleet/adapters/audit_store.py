"""Audit store: what the audit process writes to PostgreSQL and reads back.

Every insert may come twice: keys make the second a no-op. There is one writer; see `_not_beside` for where that counts.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import date, timedelta

from tokenfleet.adapters.audit_rows import (
    DECISION_ROWS,
    GOODPUT_KEY,
    GOODPUT_ROWS,
    OUTCOME_ROWS,
    REVISION_ROWS,
    SHARE_ROWS,
    Item,
    Table,
)
from tokenfleet.adapters.postgres import Connection, Postgres, Row, RowsRefusedError, copy_in
from tokenfleet.adapters.safe_text import safe_key

DAYS_BACK_MAX = 40  # labels further from the present than this are kept in the other partition
DAYS_AHEAD_MAX = 2
MIDNIGHT_S = 3600.0  # copies of one event bear labels closer than this
DAY_S = 86400.0

Insert = Callable[[Connection, Sequence[Row]], Awaitable[None]]

logger = logging.getLogger(__name__)


class AuditStore:
    """The tables of migrations/. Methods raise PostgresAwayError; a row that is refused goes to `quarantine`."""

    def __init__(self, postgres: Postgres) -> None:
        self._postgres = postgres
        self._days: set[date] = set()
        self.quarantined = 0

    async def add_decisions(self, items: Sequence[Item], *, today: date) -> None:
        await self._ensure_days(items, today)
        await self._add(items, lambda connection, rows: _insert_new(connection, DECISION_ROWS, rows))

    async def add_outcomes(self, items: Sequence[Item], *, today: date) -> None:
        await self._ensure_days(items, today)

        async def insert(connection: Connection, rows: Sequence[Row]) -> None:
            await _insert_new(connection, OUTCOME_ROWS, await _not_beside(connection, rows))

        await self._add(items, insert)

    async def add_goodput(self, items: Sequence[Item]) -> None:
        await self._add(items, _replace_older)

    async def add_revisions(self, items: Sequence[Item]) -> None:
        await self._add(items, lambda connection, rows: _insert_new(connection, REVISION_ROWS, rows))

    async def add_share_changes(self, items: Sequence[Item]) -> None:
        await self._add(items, lambda connection, rows: _insert_new(connection, SHARE_ROWS, rows))

    async def ask(self) -> None:
        """Return if the server answers and the tables are there."""
        await self._postgres.fetch("select from quarantine limit 1")

    async def drop_before(self, oldest: date) -> int:
        """Drop the days before `oldest`; returns how many partitions went."""
        [row] = await self._postgres.fetch("select audit_drop_before($1) as dropped", oldest)
        self._days = {day for day in self._days if day >= oldest}
        return row["dropped"]

    async def decisions_like(
        self, *, filters: Sequence[str], since_s: float | None, until_s: float | None, limit: int
    ) -> list[str]:
        """Bodies of the newest decisions; `filters` are tenant, model, site, target, verdict, empty for any."""
        rows = await self._postgres.fetch(FIND, *map(safe_key, filters), since_s, until_s, limit)
        return [row["body"] for row in rows]

    async def told_of(self, request: str) -> tuple[list[str], list[str]]:
        """Bodies of all decisions and all outcome events of one logical request, each in order."""
        async with self._postgres.connection() as connection:
            decisions = await connection.fetch(DECISIONS_OF, safe_key(request))
            outcomes = await connection.fetch(OUTCOMES_OF, safe_key(request))
        return [row["body"] for row in decisions], [row["body"] for row in outcomes]

    async def goodput_windows(
        self, *, width_s: float, request_class: str, tenant: str, since_s: float | None, until_s: float | None
    ) -> list[dict[str, object]]:
        """Rows of the view goodput_windows, oldest first; of the newest GOODPUT_ROWS_MAX."""
        rows = await self._postgres.fetch(
            GOODPUT, width_s, safe_key(request_class), safe_key(tenant), since_s, until_s, GOODPUT_ROWS_MAX
        )
        return [dict(row) for row in reversed(rows)]

    async def _add(self, items: Sequence[Item], insert: Insert) -> None:
        """Insert all, halving a refused batch until the bad row stands alone: it is quarantined, the rest is kept."""
        waiting = [items] if items else []
        while waiting:
            batch = waiting.pop()
            try:
                async with self._postgres.connection() as connection:
                    await insert(connection, [item.row for item in batch])
            except RowsRefusedError as error:
                if len(batch) == 1:
                    await self._quarantine(batch[0], str(error))
                else:
                    half = len(batch) // 2
                    waiting += [batch[half:], batch[:half]]

    async def _quarantine(self, item: Item, reason: str) -> None:
        kind = reason.partition(":")[0]  # the rest may quote the row
        logger.error("%s[%d]@%d item %d refused: %s", item.topic, item.partition, item.offset, item.number, kind)
        self.quarantined += 1
        await self._postgres.fetch(QUARANTINE, item.topic, item.partition, item.offset, item.number, kind)

    async def _ensure_days(self, items: Sequence[Item], today: date) -> None:
        first, last = today - timedelta(days=DAYS_BACK_MAX), today + timedelta(days=DAYS_AHEAD_MAX)
        new = {item.row[0] for item in items} - self._days
        for day in sorted(day for day in new if first <= day <= last):
            await self._postgres.fetch("select audit_ensure_day($1)", day)
            self._days.add(day)


async def _insert_new(connection: Connection, table: Table, rows: Sequence[Row]) -> None:
    if not rows:
        return
    columns = ", ".join(table.columns)
    incoming = await copy_in(connection, table.name, table.columns, rows)
    await connection.execute(
        f"insert into {table.name} ({columns}) select {columns} from {incoming} on conflict do nothing"  # noqa: S608  # names of our own
    )


async def _replace_older(connection: Connection, rows: Sequence[Row]) -> None:
    columns, key = ", ".join(GOODPUT_ROWS.columns), ", ".join(GOODPUT_KEY)
    incoming = await copy_in(connection, GOODPUT_ROWS.name, GOODPUT_ROWS.columns, rows)
    updates = ", ".join(f"{name} = excluded.{name}" for name in GOODPUT_ROWS.columns if name not in GOODPUT_KEY)
    await connection.execute(
        f"insert into goodput ({columns}) "  # noqa: S608  # names of our own
        f"select distinct on ({key}) {columns} from {incoming} order by {key}, version desc "
        f"on conflict ({key}) do update set {updates}, recorded_at = now() where excluded.version > goodput.version"
    )


async def _not_beside(connection: Connection, rows: Sequence[Row]) -> Sequence[Row]:
    """The rows whose event does not stand under the day before or after already.

    An event without a time of its own is labelled when it is received; a report repeated across midnight then bears two
    days, which no key of a partitioned table can join. One writer can look first.
    """
    near = [row for row in rows if min(at := row[AT].timestamp() % DAY_S, DAY_S - at) < MIDNIGHT_S]
    if not near:
        return rows
    days = {row[DAY] + timedelta(days=step) for row in near for step in (-1, 1)}
    found = await connection.fetch(BESIDE, sorted(days), sorted({row[REQUEST] for row in near}))
    taken = {(row["day"], row["request"], row["attempt"], row["kind"], row["at_origin"]) for row in found}
    kept: list[Row] = []
    for row in rows:
        event = row[REQUEST : REQUEST + 4]
        if any((row[DAY] + timedelta(days=step), *event) in taken for step in (-1, 1)):
            continue
        taken.add((row[DAY], *event))  # the batch itself may hold both
        kept.append(row)
    return kept


DAY = OUTCOME_ROWS.columns.index("day")
REQUEST = OUTCOME_ROWS.columns.index("request")
AT = OUTCOME_ROWS.columns.index("at")
GOODPUT_ROWS_MAX = 10_000
BESIDE = """
select day, request, attempt, kind, at_origin from outcomes where day = any($1::date[]) and request = any($2::text[])
"""
QUARANTINE = """
insert into quarantine (topic, partition, "offset", item, reason) values ($1, $2, $3, $4, $5) on conflict do nothing
"""
FIND = """
select body from decisions
where ($1 = '' or tenant = $1) and ($2 = '' or model = $2) and ($3 = '' or site = $3) and ($4 = '' or target = $4)
    and ($5 = '' or verdict = $5)
    and ($6::double precision is null or at >= to_timestamp($6))
    and ($7::double precision is null or at < to_timestamp($7))
order by at desc, id desc limit $8
"""
DECISIONS_OF = "select body from decisions where request = $1 order by attempt, at, id"
OUTCOMES_OF = "select body from outcomes where request = $1 order by at, attempt, kind, at_origin"
GOODPUT = """
select * from goodput_windows
where width_s = $1 and ($2 = '' or request_class = $2) and ($3 = '' or tenant = $3)
    and ($4::double precision is null or start_s >= $4) and ($5::double precision is null or start_s < $5)
order by start_s desc, request_class, tenant, pool limit $6
"""
