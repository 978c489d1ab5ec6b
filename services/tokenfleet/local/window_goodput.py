"""Window goodput: what finished within the load's own time, and what the ready instances cost in just that time.

The published windows of goodput are 10 s wide and wherever the clock puts them; the load begins and ends in between,
and what is drained afterwards is no throughput of the load.
"""

import math
from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from tokenfleet.adapters.postgres import Postgres
from tokenfleet.adapters.safe_text import from_json
from tokenfleet.core.goodput.cost import cost_per_million
from tokenfleet.core.goodput.judge import NO_SLO
from tokenfleet.core.goodput.request import Heard, LogicalRequest
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.local.run_rows import WIDTH_S

ROWS_AT_ONCE = 500  # of the cursor: memory stays the same however long the load was

ENDS = """
select request, at_origin, body from outcomes
where at >= to_timestamp($1) and at < to_timestamp($2) and starts_with(request, $3) and kind <> 'progress'
order by request
"""
COST = """
select pool, start_s, sum(cost) as cost from goodput
where width_s = $3 and request_class = '' and recorded_at >= to_timestamp($4) and start_s > $1 - $3 and start_s < $2
group by 1, 2
"""


class Window(Struct, frozen=True, kw_only=True):
    """From `from_wall_s` until `until_wall_s`, labels of this machine's clock. Tokens by class,
    of requests that ended in it; cost of all pools."""

    from_wall_s: float
    until_wall_s: float
    goodput_tokens: Mapping[str, int]
    output_tokens: Mapping[str, int] = {}
    cost: float

    @property
    def seconds(self) -> float:
        return self.until_wall_s - self.from_wall_s

    def goodput_tokens_per_s(self, request_class: str) -> float:
        return self.goodput_tokens.get(request_class, 0) / self.seconds

    def output_tokens_per_s(self, request_class: str) -> float:
        return self.output_tokens.get(request_class, 0) / self.seconds

    @property
    def cost_per_million_goodput_tokens(self) -> float | None:
        """None without goodput, and as long as no cost was told."""
        tokens = sum(tokens for name, tokens in self.goodput_tokens.items() if name != NO_SLO)
        return cost_per_million(self.cost, tokens) if self.cost else None


async def window_of(
    postgres: Postgres, policy: Policy, *, run: str, since_wall_s: float, from_wall_s: float, until_wall_s: float
) -> Window:
    """The window of a run that began at `since_wall_s`; `policy` judges as it does for the goodput processor.

    Raises PostgresAwayError, RowsRefusedError.
    """
    goodput_tokens, output_tokens = await _tokens(postgres, policy, run, from_wall_s, until_wall_s)
    return Window(
        from_wall_s=from_wall_s,
        until_wall_s=until_wall_s,
        goodput_tokens=goodput_tokens,
        output_tokens=output_tokens,
        cost=await _cost(postgres, since_wall_s, from_wall_s, until_wall_s),
    )


async def _tokens(
    postgres: Postgres, policy: Policy, run: str, from_wall_s: float, until_wall_s: float
) -> tuple[Counter[str], Counter[str]]:
    """Goodput and all output, by class."""
    sums: dict[str, Counter[str]] = {"goodput_tokens": Counter(), "output_tokens": Counter()}
    name: str | None = None
    request = LogicalRequest()
    async with postgres.connection() as connection:
        async for row in connection.cursor(ENDS, from_wall_s, until_wall_s, run, prefetch=ROWS_AT_ONCE):
            if row["request"] != name:
                if name is not None:
                    _add(sums, request, policy)
                name, request = row["request"], LogicalRequest()
            event = from_json(row["body"], OutcomeEvent)
            request.hear(Heard(event, event.at_wall_s, row["at_origin"], late=False))
    if name is not None:
        _add(sums, request, policy)
    return sums["goodput_tokens"], sums["output_tokens"]


def _add(sums: dict[str, Counter[str]], request: LogicalRequest, policy: Policy) -> None:
    for posting in request.account(policy, -math.inf).postings:
        for column, count in posting.counts:
            if column in sums:
                sums[column][posting.request_class] += count


async def _cost(postgres: Postgres, since_wall_s: float, from_wall_s: float, until_wall_s: float) -> float:
    """A window that the load's edge cuts costs what its pool costs at most in that time, and no more than it did."""
    rows = await postgres.fetch(COST, from_wall_s, until_wall_s, WIDTH_S, since_wall_s)
    per_s: dict[str, float] = {}
    for row in rows:
        per_s[row["pool"]] = max(per_s.get(row["pool"], 0.0), row["cost"] / WIDTH_S)
    return sum(
        min(row["cost"], per_s[row["pool"]] * _overlap_s(row["start_s"], from_wall_s, until_wall_s)) for row in rows
    )


def _overlap_s(start_s: float, from_s: float, until_s: float) -> float:
    return max(0.0, min(until_s, start_s + WIDTH_S) - max(from_s, start_s))
