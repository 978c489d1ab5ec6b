"""Sums: the goodput that a fleet published, against that of its recorded outcomes judged anew, request by request."""

from collections import Counter

from tokenfleet.adapters.postgres import Postgres
from tokenfleet.core.policy import Policy
from tokenfleet.local.run_rows import WIDTH_S
from tokenfleet.local.window_goodput import window_of

PUBLISHED = """
select request_class, sum(goodput_tokens)::bigint as tokens, sum(late_dropped)::bigint as late from goodput_sums
where width_s = $1 and request_class <> '' group by 1
"""


async def published(postgres: Postgres) -> tuple[Counter[str], int]:
    """Goodput tokens by class that the goodput processor counted, and how many events came too late for it."""
    rows = await postgres.fetch(PUBLISHED, WIDTH_S)
    return Counter({row["request_class"]: row["tokens"] for row in rows}), sum(row["late"] for row in rows)


async def judged(postgres: Postgres, policy: Policy) -> Counter[str]:
    """The same of all that was recorded, whoever sent it."""
    window = await window_of(postgres, policy, run="", since_wall_s=0.0, from_wall_s=0.0, until_wall_s=4e9)
    return Counter(window.goodput_tokens)


def differing(one: Counter[str], other: Counter[str]) -> dict[str, tuple[int, int]]:
    """Classes of which the two tell different tokens."""
    return {name: (one[name], other[name]) for name in one.keys() | other.keys() if one[name] != other[name]}
