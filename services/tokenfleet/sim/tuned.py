"""Tuned: each peer at the best of a grid of its settings, so that nothing is won against its defaults alone.

The grids hold the settings that the peers' documents tell users to tune, around their defaults. They are run per
scenario on seeds of their own; the least (mean TTFT P50) × (mean TTFT P95) wins, so that neither is bought with the
other.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from math import inf

from msgspec import Struct

from tokenfleet.sim.compare import Cell
from tokenfleet.sim.measure import late_s

GRIDS: dict[str, tuple[str, ...]] = {
    "sglang": tuple(
        f"sglang:balance_abs={balance_abs},balance_rel={balance_rel},match_min={match_min}"
        for balance_abs, balance_rel, match_min in product((4, 8, 16, 64), (1.2, 1.5), (0.1, 0.3, 0.5))
    ),
    "dynamo": tuple(f"dynamo:overlap_weight={weight}" for weight in (0.5, 1, 2, 4, 8, 16, 32)),
    "llmd": tuple(
        f"llmd:prefix={prefix},queue={queue},kv={kv}" for prefix, queue, kv in product((1, 3, 6), (1, 2, 6), (0, 2))
    ),
}


class Tried(Struct, frozen=True, kw_only=True):
    """One point of a grid: seconds, means over the tuning seeds."""

    policy: str
    ttft_p50_s: float
    ttft_p95_s: float

    @property
    def score(self) -> float:
        """Seconds squared; less is better."""
        return self.ttft_p50_s * self.ttft_p95_s


def grid_of(policies: Iterable[str]) -> tuple[str, ...]:
    """All points of the grids of those policies that have one."""
    return tuple(point for policy in policies for point in GRIDS.get(policy, ()))


def tried(cells: Sequence[Cell]) -> dict[str, tuple[Tried, ...]]:
    """The points by policy, the best first; infinite where so many requests were lost that a percentile never came."""
    by_point: defaultdict[str, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_point[cell.policy].append(cell)
    points: defaultdict[str, list[Tried]] = defaultdict(list)
    for policy, its in by_point.items():
        points[policy.partition(":")[0]].append(
            Tried(
                policy=policy,
                ttft_p50_s=_mean([late_s(cell.ttft_s.p50) for cell in its]),
                ttft_p95_s=_mean([late_s(cell.ttft_s.p95) for cell in its]),
            )
        )
    return {policy: tuple(sorted(its, key=lambda point: point.score)) for policy, its in points.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else inf
