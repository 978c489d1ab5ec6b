"""Run rows: the figures of one run, from the rows that audit wrote into PostgreSQL."""

from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres
from tokenfleet.core.goodput.cost import cost_per_million
from tokenfleet.core.goodput.judge import NO_SLO

WIDTH_S = 10.0  # the narrowest windows of the shipped policy

VERDICTS = """
select verdict, site, count(*) as n from decisions
where at >= to_timestamp($1) and starts_with(request, $2) group by 1, 2
"""
LATENCY = """
select request_class, percentile_cont(array[0.5, 0.95]) within group (order by (body->>'ttft_s')::float8) as ttft_s
from outcomes
where at >= to_timestamp($1) and starts_with(request, $2) and kind = 'first_token' and body->>'ttft_s' is not null
group by 1
"""
# A run's sums are under cluster ids of its own; a window that it shares with an earlier run was first written then.
GOODPUT = """
select request_class, sum(goodput_tokens)::bigint as goodput_tokens, sum(output_tokens)::bigint as output_tokens,
    sum(met)::bigint as met, sum(missed)::bigint as missed, sum(rejected)::bigint as rejected,
    sum(excluded)::bigint as excluded, sum(cost) as cost
from goodput
where width_s = $2 and start_s >= $1 - $2 and recorded_at >= to_timestamp($1)
group by 1
"""


class ClassSums(Struct, frozen=True, kw_only=True):
    """Goodput's sums of one class over the run; the empty class bears the pools' cost."""

    goodput_tokens: int
    output_tokens: int
    met: int
    missed: int
    rejected: int
    excluded: int
    cost: float

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
    """`verdicts` by verdict and site, `ttft_s` (p50, p95) and `sums` by class."""

    verdicts: dict[tuple[str, str], int]
    ttft_s: dict[str, tuple[float, float]]
    sums: dict[str, ClassSums]

    def count(self, verdict: str) -> int:
        return sum(n for (each, _), n in self.verdicts.items() if each == verdict)

    @property
    def cost_per_million_goodput_tokens(self) -> float | None:
        """None without goodput, and as long as no cost was told."""
        cost = sum(sums.cost for sums in self.sums.values())
        tokens = sum(sums.goodput_tokens for name, sums in self.sums.items() if name != NO_SLO)
        return cost_per_million(cost, tokens) if cost else None


async def run_rows(postgres: Postgres, *, run: str, since_wall_s: float) -> RunRows:
    """Raises PostgresAwayError."""
    verdicts = await postgres.fetch(VERDICTS, since_wall_s, run)
    latency = await postgres.fetch(LATENCY, since_wall_s, run)
    return RunRows(
        verdicts={(row["verdict"], row["site"]): row["n"] for row in verdicts},
        ttft_s={row["request_class"]: tuple(row["ttft_s"]) for row in latency},
        sums=await class_sums(postgres, since_wall_s=since_wall_s),
    )


async def class_sums(postgres: Postgres, *, since_wall_s: float) -> dict[str, ClassSums]:
    """Goodput's sums by class. Raises PostgresAwayError."""
    names = ClassSums.__struct_fields__
    return {
        row["request_class"]: ClassSums(**{name: row[name] for name in names})
        for row in await postgres.fetch(GOODPUT, since_wall_s, WIDTH_S)
    }
