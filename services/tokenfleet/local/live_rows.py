"""Live rows: how each site, model and class fared in the last half minute, from the rows in PostgreSQL."""

from asyncpg import Record
from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres

WINDOW_S = 30.0
GOODPUT_WIDTH_S = 10.0
GOODPUT_WINDOWS = 3  # the newest is still open

# Each query sums at all levels of LiveRows: quantiles of sums can't be made of quantiles.
# A decision counts where it was made: an ingress site's redirects are its own, the admission is the other site's.
# A request arrives once, at its origin, however many decisions it takes.
DECISIONS = """
select site, model, request_class,
    count(distinct request) filter (where origin = site) as arrivals,
    count(*) filter (where verdict = 'admit') as admitted,
    count(*) filter (where verdict = 'queue') as queued,
    count(*) filter (where verdict = 'reject') as rejected,
    count(*) filter (where verdict = 'redirect') as redirected
from (
    select split_part(replica, '/', 1) as site, origin, model, request_class, request, verdict from decisions
    where at >= now() - make_interval(secs => $1)
) as made
group by grouping sets ((site, model, request_class), (site, request_class), (site), ())
"""
LATENCY = """
select site, model, request_class,
    percentile_cont(array[0.5, 0.95]) within group (order by (body->>'ttft_s')::float8) as ttft_s
from outcomes
where kind = 'first_token' and at >= now() - make_interval(secs => $1) and body->>'ttft_s' is not null
group by grouping sets ((site, model, request_class), (site, request_class), (site), ())
"""
GOODPUT = """
select site, model, request_class,
    coalesce(sum(goodput_tokens), 0)::float8 as goodput_tokens,
    coalesce(sum(met), 0)::float8 as met, coalesce(sum(missed), 0)::float8 as missed
from (
    select split_part(pool, '@', 2) as site, split_part(pool, '@', 1) as model, request_class, goodput_tokens, met,
        missed
    from goodput
    where width_s = $1 and request_class <> '' and start_s >= extract(epoch from now()) - $2 and start_s > $3
) as windows
group by grouping sets ((site, model, request_class), (site, request_class), (site), ())
"""


class LiveRow(Struct, kw_only=True):
    """One site, model and class over WINDOW_S, each None where it is summed over; None elsewhere is unknown."""

    site: str | None
    model: str | None
    request_class: str | None
    arrivals: int = 0
    admitted: int = 0
    queued: int = 0
    rejected: int = 0
    redirected: int = 0
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    goodput_tokens: float = 0.0
    met: float = 0.0
    missed: float = 0.0

    @property
    def goodput_tokens_per_s(self) -> float:
        return self.goodput_tokens / (GOODPUT_WIDTH_S * GOODPUT_WINDOWS)

    @property
    def attainment(self) -> float | None:
        """Of the admitted ones that ended."""
        return self.met / (self.met + self.missed) if self.met + self.missed else None


class LiveRows(Struct, frozen=True, kw_only=True):
    """The same requests at three levels of detail, each in the order of its names, and all of them in one row."""

    by_model: tuple[LiveRow, ...] = ()
    by_class: tuple[LiveRow, ...] = ()
    by_site: tuple[LiveRow, ...] = ()
    total: LiveRow


NOTHING = LiveRows(total=LiveRow(site=None, model=None, request_class=None))

_Key = tuple[str | None, str | None, str | None]


async def live_rows(postgres: Postgres, *, since_wall_s: float) -> LiveRows:
    """The newest rows at every level. Raises PostgresAwayError, RowsRefusedError."""
    rows: dict[_Key, LiveRow] = {(None, None, None): LiveRow(site=None, model=None, request_class=None)}
    for found in await postgres.fetch(DECISIONS, WINDOW_S):
        row = _row(rows, found)
        row.arrivals, row.admitted, row.queued = found["arrivals"], found["admitted"], found["queued"]
        row.rejected, row.redirected = found["rejected"], found["redirected"]
    for found in await postgres.fetch(LATENCY, WINDOW_S):
        row = _row(rows, found)
        row.ttft_p50_s, row.ttft_p95_s = found["ttft_s"] or (None, None)
    for found in await postgres.fetch(
        GOODPUT, GOODPUT_WIDTH_S, GOODPUT_WIDTH_S * (GOODPUT_WINDOWS + 1), since_wall_s - GOODPUT_WIDTH_S
    ):
        row = _row(rows, found)
        row.goodput_tokens, row.met, row.missed = found["goodput_tokens"], found["met"], found["missed"]
    return LiveRows(
        by_model=_level(rows, 3), by_class=_level(rows, 2), by_site=_level(rows, 1), total=rows[None, None, None]
    )


def _row(rows: dict[_Key, LiveRow], found: Record) -> LiveRow:
    key = (found["site"], found["model"], found["request_class"])
    return rows.setdefault(key, LiveRow(site=key[0], model=key[1], request_class=key[2]))


def _level(rows: dict[_Key, LiveRow], names: int) -> tuple[LiveRow, ...]:
    """The rows that bear so many names."""
    chosen = [key for key in rows if sum(name is not None for name in key) == names]
    return tuple(rows[key] for key in sorted(chosen, key=lambda key: tuple(name or "" for name in key)))
