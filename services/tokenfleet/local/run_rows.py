"""Run rows: the figures of one run, from the rows that audit wrote into PostgreSQL."""

from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres

WIDTH_S = 10.0  # the narrowest windows of the shipped policy

VERDICTS = """
select verdict, site, split_part(replica, '/', 1) as decided_at, count(*) as n from decisions
where at >= to_timestamp($1) and starts_with(request, $2) group by 1, 2, 3
"""
LATENCY = """
select request_class, percentile_cont(array[0.5, 0.95]) within group (order by (body->>'ttft_s')::float8) as ttft_s
from outcomes
where at >= to_timestamp($1) and starts_with(request, $2) and kind = 'first_token' and body->>'ttft_s' is not null
group by grouping sets ((request_class), ())
"""
# A run's sums are under cluster ids of its own; a window that it shares with an earlier run was first written then.
GOODPUT = """
select request_class, sum(met)::bigint as met, sum(missed)::bigint as missed, sum(rejected)::bigint as rejected,
    sum(excluded)::bigint as excluded
from goodput
where width_s = $2 and request_class <> '' and start_s >= $1 - $2 and recorded_at >= to_timestamp($1)
group by 1
"""


class ClassSums(Struct, frozen=True, kw_only=True):
    """How the requests of one class fared, all of the run."""

    met: int
    missed: int
    rejected: int
    excluded: int

    @property
    def attainment_admitted(self) -> float | None:
        return self.met / (self.met + self.missed) if self.met + self.missed else None

    @property
    def attainment_offered(self) -> float | None:
        offered = self.met + self.missed + self.rejected
        return self.met / offered if offered else None

    @property
    def accounted(self) -> int:
        """Logical requests."""
        return self.met + self.missed + self.rejected + self.excluded


class RunRows(Struct, frozen=True, kw_only=True):
    """`verdicts` count by verdict, the site that it names and the site that decided; `ttft_s` (p50, p95) and `sums` are
    by class, `all_ttft_s` is of all classes, None without a first token.
    """

    verdicts: dict[tuple[str, str, str], int]
    ttft_s: dict[str, tuple[float, float]]
    sums: dict[str, ClassSums]
    all_ttft_s: tuple[float, float] | None = None

    def count(self, verdict: str) -> int:
        return sum(n for (each, _, _), n in self.verdicts.items() if each == verdict)

    def admitted_to(self, site: str) -> int:
        return sum(n for (verdict, named, _), n in self.verdicts.items() if (verdict, named) == ("admit", site))

    def decided_at(self, site: str) -> int:
        return sum(n for (_, _, decider), n in self.verdicts.items() if decider == site)


async def run_rows(postgres: Postgres, *, run: str, since_wall_s: float) -> RunRows:
    """Raises PostgresAwayError."""
    verdicts = await postgres.fetch(VERDICTS, since_wall_s, run)
    latency = await postgres.fetch(LATENCY, since_wall_s, run)
    return RunRows(
        verdicts={(row["verdict"], row["site"], row["decided_at"]): row["n"] for row in verdicts},
        ttft_s={row["request_class"]: tuple(row["ttft_s"]) for row in latency if row["request_class"] is not None},
        sums=await class_sums(postgres, since_wall_s=since_wall_s),
        all_ttft_s=next(
            (tuple(row["ttft_s"]) for row in latency if row["request_class"] is None and row["ttft_s"]), None
        ),
    )


async def class_sums(postgres: Postgres, *, since_wall_s: float) -> dict[str, ClassSums]:
    """How goodput judged the run's requests, by class. Raises PostgresAwayError."""
    names = ClassSums.__struct_fields__
    return {
        row["request_class"]: ClassSums(**{name: row[name] for name in names})
        for row in await postgres.fetch(GOODPUT, since_wall_s, WIDTH_S)
    }
