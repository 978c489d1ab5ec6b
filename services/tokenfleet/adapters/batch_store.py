"""Batch store: the tickets of batch work in PostgreSQL, and who grants them.

All times are the server's. A state changes in one statement and only from the state that it follows on, and is granted
only under the owner's epoch, whose row is locked meanwhile; so what comes twice or late changes nothing.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from msgspec import Struct

from tokenfleet.adapters.postgres import Connection, Postgres
from tokenfleet.adapters.safe_text import safe_key
from tokenfleet.core.policy import BatchPolicy
from tokenfleet.core.slomax.grants import NextGrants, Room, WaitingTicket
from tokenfleet.core.slomax.tickets import BUCKET_RATIO, BUCKETS, Backlog, Ended, HandedIn, Key, TicketEvent, Used

OWNER_SILENT_MAX_S: Final = 10.0  # another one may take over from an owner that has not looked for so long
GRANTS_KNOWN_MAX: Final = 10_000
SWEPT_MAX: Final = 1_000  # rows that a turn moves on or deletes
LOST_AFTER_S: Final = 3_600.0  # past its deadline a placed one counts as expired if no outcome was heard
UNUSED_WAIT_MAX_S: Final = 900.0  # a ticket that nobody comes for has its turn ever more seldom, and so often at least

Choose = Callable[[Sequence[WaitingTicket], Room, bool], NextGrants]
"""From a page, the room beside grants that are out, and whether more wait behind the page."""


class PoolTickets(Struct, frozen=True, kw_only=True):
    """One pool's tickets now: `first_left_s` is the time to the first deadline of those that wait, None when none does;
    `done_s` GPU seconds ended in the last window."""

    backlog: Backlog
    first_left_s: float | None
    done_s: float


def none_waits() -> PoolTickets:
    """Those of a pool without any."""
    return PoolTickets(backlog=Backlog(), first_left_s=None, done_s=0.0)


class Turn(Struct, frozen=True, kw_only=True):
    """What an owner's turn changed: how many it granted, took back unused, and found expired."""

    granted: int
    unused: int
    expired: int


class BatchStore:
    """The tickets of one site. Methods raise PostgresAwayError and RowsRefusedError."""

    def __init__(self, postgres: Postgres, site: str) -> None:
        self._postgres, self._site = postgres, site

    async def write(self, events: Sequence[TicketEvent], *, wall_s: float) -> int:
        """Brings the events to their rows; all may come again. Returns how many ended late.

        A ticket's time to its deadline has run since it was handed in, by the clock of this host.
        """
        handed_in = [_row(each, wall_s) for each in events if isinstance(each, HandedIn)]
        used = [(*_key(each), each.decision) for each in events if isinstance(each, Used)]
        ended = [(*_key(each), each.how) for each in events if isinstance(each, Ended)]
        late = 0
        async with self._postgres.connection() as connection:
            if handed_in:
                await connection.execute(HAND_IN, *_columns(handed_in))
            if used:
                await connection.execute(USED, *_columns(used))
            if ended:
                late = sum(row["late"] for row in await connection.fetch(ENDED, *_columns(ended)))
        return late

    async def granted(self) -> list[Key]:
        """The grants that are out and unused."""
        rows = await self._postgres.fetch(GRANTED, self._site, GRANTS_KNOWN_MAX)
        return [(row["tenant"], row["request"], row["attempt"]) for row in rows]

    async def pools(self, *, window_s: float) -> dict[str, PoolTickets]:
        """What waits for each model and what ended in the last `window_s`."""
        async with self._postgres.connection() as connection:
            waiting = await connection.fetch(WAITING, self._site, math.log(BUCKET_RATIO), BUCKETS - 1)
            done = await connection.fetch(DONE, self._site, window_s)
        seconds: defaultdict[str, dict[int, float]] = defaultdict(dict)
        tickets: defaultdict[str, int] = defaultdict(int)
        first: dict[str, float] = {}
        for row in waiting:
            model = row["model"]
            seconds[model][row["bucket"]] = row["gpu_s"]
            tickets[model] += row["tickets"]
            first[model] = min(first.get(model, math.inf), row["first_left_s"])
        done_s = {row["model"]: row["gpu_s"] for row in done}
        return {
            model: PoolTickets(
                backlog=Backlog(seconds.get(model), tickets=tickets.get(model, 0)),
                first_left_s=first.get(model),
                done_s=done_s.get(model, 0.0),
            )
            for model in (*first, *(done_s.keys() - first.keys()))
        }

    async def claim(self, model: str, owner: str, *, by_right: bool) -> int | None:
        """The epoch of `owner` from now on, which ends every earlier one; None while another one owns the pool.

        `by_right`: the log says so, whoever looked last.
        """
        rows = await self._postgres.fetch(CLAIM, self._site, model, owner, by_right, OWNER_SILENT_MAX_S)
        return rows[0]["epoch"] if rows else None

    async def turn(
        self, model: str, *, epoch: int, room: Room, ahead: int, terms: BatchPolicy, choose: Choose
    ) -> Turn | None:
        """One turn of the owner of `epoch`: what went unused waits again, what passed its deadline is over, and the
        first in line are granted. None, and nothing is changed, when the epoch is over."""
        async with self._postgres.connection() as connection:
            if not await connection.fetch(RENEW, self._site, model, epoch):
                return None
            pool = (self._site, model)
            unused = await connection.fetch(UNUSED, *pool, epoch, terms.grant_s, UNUSED_WAIT_MAX_S)
            expired = await connection.fetch(EXPIRED, *pool, SWEPT_MAX, LOST_AFTER_S)
            await connection.execute(FORGOTTEN, *pool, SWEPT_MAX, terms.kept_s)
            [out] = await connection.fetch(OUT, *pool)
            left = room.without(out["tickets"], out["kv_tokens"], ahead=ahead)
            page, more = await _page(connection, pool, terms.page_max)
            chosen = choose(page, left, more)
            granted = await _mark(connection, chosen, epoch=epoch, grant_s=terms.grant_s)
        return Turn(granted=granted, unused=len(unused), expired=len(expired))


async def _page(connection: Connection, pool: tuple[str, str], page_max: int) -> tuple[list[WaitingTicket], bool]:
    """The first in line by deadline, and some of those that were found to miss theirs, since that may have changed; and
    whether more wait behind."""
    first = await connection.fetch(PAGE, *pool, False, page_max)
    missing = await connection.fetch(PAGE, *pool, True, max(1, page_max // 4))
    page = [
        WaitingTicket(
            key=(row["tenant"], row["request"], row["attempt"]),
            gpu_s=row["gpu_s"],
            kv_tokens=row["kv_tokens"],
            left_s=row["left_s"],
            will_miss=row["will_miss"],
        )
        for row in (*first, *missing)
    ]
    return page, len(first) == page_max


async def _mark(connection: Connection, chosen: NextGrants, *, epoch: int, grant_s: float) -> int:
    """How many are granted: one that ended meanwhile is not."""
    for keys, will_miss in ((chosen.misses, True), (chosen.in_time, False)):
        if keys:
            await connection.execute(MISS, *_columns(keys), will_miss)
    if not chosen.granted:
        return 0
    return len(await connection.fetch(GRANT, *_columns(chosen.granted), epoch, grant_s))


def _row(ticket: HandedIn, wall_s: float) -> tuple[Any, ...]:
    waited_s = max(0.0, wall_s - ticket.at_wall_s)
    return (*_key(ticket), ticket.site, ticket.model, ticket.kv_tokens, ticket.gpu_s, ticket.left_s - waited_s)


def _key(event: TicketEvent) -> Key:
    return safe_key(event.tenant), safe_key(event.request), event.attempt


def _columns(rows: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """Rows as one list a column, for `unnest`."""
    return [list(column) for column in zip(*rows, strict=True)]


HAND_IN = """
insert into batch_tickets (tenant, request, attempt, site, model, kv_tokens, gpu_s, deadline)
select tenant, request, attempt, site, model, kv_tokens, gpu_s, now() + left_s * interval '1 second'
from unnest($1::text[], $2::text[], $3::integer[], $4::text[], $5::text[], $6::bigint[], $7::float8[], $8::float8[])
    as handed_in (tenant, request, attempt, site, model, kv_tokens, gpu_s, left_s)
on conflict do nothing
"""
USED = """
update batch_tickets t set state = 'granted', used_at = coalesce(used_at, now()), decision = u.decision
from unnest($1::text[], $2::text[], $3::integer[], $4::text[]) as u (tenant, request, attempt, decision)
where (t.tenant, t.request, t.attempt) = (u.tenant, u.request, u.attempt) and t.state in ('waiting', 'granted')
"""
ENDED = """
update batch_tickets t
set state = case when e.how = 'finished' then 'done' else 'withdrawn' end, ended_as = e.how, ended_at = now()
from (
    select e.*, was.state as was
    from unnest($1::text[], $2::text[], $3::integer[], $4::text[]) as e (tenant, request, attempt, how)
    join batch_tickets was using (tenant, request, attempt)
) as e
where (t.tenant, t.request, t.attempt) = (e.tenant, e.request, e.attempt)
    and t.state in ('waiting', 'granted', 'expired')
returning (e.was <> 'expired' and t.state = 'done' and now() > t.deadline)::integer as late
"""
GRANTED = """
select tenant, request, attempt from batch_tickets
where site = $1 and state = 'granted' and used_at is null and granted_until > now() order by deadline limit $2
"""
WAITING = """
select model,
    least($3, ceil(ln(greatest(date_part('epoch', deadline - now()), 1)) / $2::float8))::integer as bucket,
    coalesce(sum(gpu_s) filter (where not will_miss), 0) as gpu_s,
    count(*) as tickets,
    min(date_part('epoch', deadline - now())) as first_left_s
from batch_tickets where site = $1 and state = 'waiting' group by model, bucket
"""
DONE = """
select model, sum(gpu_s) as gpu_s from batch_tickets
where site = $1 and state = 'done' and ended_at > now() - $2::float8 * interval '1 second' group by model
"""
CLAIM = """
insert into batch_owners as o (site, model, owner, epoch) values ($1, $2, $3, 1)
on conflict (site, model) do update set owner = $3, epoch = o.epoch + 1, renewed_at = now()
where $4 or o.owner = $3 or o.renewed_at < now() - $5::float8 * interval '1 second'
returning epoch
"""
RENEW = """
update batch_owners set renewed_at = now() where site = $1 and model = $2 and epoch = $3 returning epoch
"""
UNUSED = """
update batch_tickets
set state = 'waiting', epoch = $3, granted_until = null, unused = unused + 1,
    not_before = now() + least($4::float8 * power(2, least(unused, 16)), $5::float8) * interval '1 second'
where site = $1 and model = $2 and state = 'granted' and used_at is null and granted_until < now()
returning 1
"""
EXPIRED = """
update batch_tickets set state = 'expired', ended_at = now()
where (tenant, request, attempt) in (
    (select tenant, request, attempt from batch_tickets
        where site = $1 and model = $2 and state = 'waiting' and not will_miss and deadline < now() limit $3)
    union all
    (select tenant, request, attempt from batch_tickets
        where site = $1 and model = $2 and state = 'waiting' and will_miss and deadline < now() limit $3)
    union all
    (select tenant, request, attempt from batch_tickets
        where site = $1 and model = $2 and state = 'granted'
            and deadline < now() - case when used_at is null then 0 else $4::float8 end * interval '1 second' limit $3)
) and state in ('waiting', 'granted')
returning 1
"""
FORGOTTEN = """
delete from batch_tickets where (tenant, request, attempt) in (
    select tenant, request, attempt from batch_tickets
    where site = $1 and model = $2 and ended_at < now() - $4::float8 * interval '1 second' limit $3
)
"""
OUT = """
select count(*) as tickets, coalesce(sum(kv_tokens), 0)::float8 as kv_tokens from batch_tickets
where site = $1 and model = $2 and state = 'granted' and used_at is null
"""
PAGE = """
select tenant, request, attempt, gpu_s, kv_tokens, will_miss, date_part('epoch', deadline - now()) as left_s
from batch_tickets
where site = $1 and model = $2 and state = 'waiting' and will_miss = $3 and not_before <= now()
order by deadline limit $4
"""
GRANT = """
update batch_tickets t
set state = 'granted', epoch = $4, granted_until = now() + $5::float8 * interval '1 second'
from unnest($1::text[], $2::text[], $3::integer[]) as g (tenant, request, attempt)
where (t.tenant, t.request, t.attempt) = (g.tenant, g.request, g.attempt) and t.state = 'waiting'
returning 1
"""
MISS = """
update batch_tickets t set will_miss = $4
from unnest($1::text[], $2::text[], $3::integer[]) as m (tenant, request, attempt)
where (t.tenant, t.request, t.attempt) = (m.tenant, m.request, m.attempt) and t.state = 'waiting'
"""
