"""Live rows: how each site, model and class fared in the last half minute, from the rows in PostgreSQL."""

from asyncpg import Record
from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres

WINDOW_S = 30.0
GOODPUT_WIDTH_S = 10.0
GOODPUT_WINDOWS = 3  # the newest is still open

# A decision counts where it was made: an ingress site's redirects are its own, the admission is the other site's.
DECISIONS = """
select split_part(replica, '/', 1) as site, model, request_class,
    count(*) filter (where verdict = 'admit') as admitted,
    count(*) filter (where verdict = 'queue') as queued,
    count(*) filter (where verdict = 'reject') as rejected,
    count(*) filter (where verdict = 'redirect') as redirected
from decisions
where at >= now() - make_interval(secs => $1)
group by 1, 2, 3
"""
LATENCY = """
select site, model, request_class,
    percentile_cont(array[0.5, 0.95]) within group (order by (body->>'ttft_s')::float8) as ttft_s
from outcomes
where kind = 'first_token' and at >= now() - make_interval(secs => $1) and body->>'ttft_s' is not null
group by 1, 2, 3
"""
GOODPUT = """
select split_part(pool, '@', 2) as site, split_part(pool, '@', 1) as model, request_class,
    sum(goodput_tokens)::float8 as goodput_tokens, sum(met)::float8 as met, sum(missed)::float8 as missed
from goodput
where width_s = $1 and request_class <> '' and start_s >= extract(epoch from now()) - $2 and start_s > $3
group by 1, 2, 3
"""


class LiveRow(Struct, kw_only=True):
    """One site, model and class over WINDOW_S; None is unknown."""

    site: str
    model: str
    request_class: str
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
    def arrivals(self) -> int:
        return self.admitted + self.queued + self.rejected + self.redirected

    @property
    def goodput_tokens_per_s(self) -> float:
        return self.goodput_tokens / (GOODPUT_WIDTH_S * GOODPUT_WINDOWS)

    @property
    def attainment(self) -> float | None:
        """Of the admitted ones that ended."""
        return self.met / (self.met + self.missed) if self.met + self.missed else None


async def live_rows(postgres: Postgres, *, since_wall_s: float) -> list[LiveRow]:
    """By site, model and class. Raises PostgresAwayError."""
    rows: dict[tuple[str, str, str], LiveRow] = {}
    for found in await postgres.fetch(DECISIONS, WINDOW_S):
        row = _row(rows, found)
        row.admitted, row.queued = found["admitted"], found["queued"]
        row.rejected, row.redirected = found["rejected"], found["redirected"]
    for found in await postgres.fetch(LATENCY, WINDOW_S):
        row = _row(rows, found)
        row.ttft_p50_s, row.ttft_p95_s = found["ttft_s"]
    for found in await postgres.fetch(
        GOODPUT, GOODPUT_WIDTH_S, GOODPUT_WIDTH_S * (GOODPUT_WINDOWS + 1), since_wall_s - GOODPUT_WIDTH_S
    ):
        row = _row(rows, found)
        row.goodput_tokens, row.met, row.missed = found["goodput_tokens"], found["met"], found["missed"]
    return [rows[key] for key in sorted(rows)]


def _row(rows: dict[tuple[str, str, str], LiveRow], found: Record) -> LiveRow:
    key = (found["site"], found["model"], found["request_class"])
    return rows.setdefault(key, LiveRow(site=key[0], model=key[1], request_class=key[2]))
