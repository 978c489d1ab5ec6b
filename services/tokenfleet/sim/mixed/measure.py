"""Measure: what a mixed run came to, class by class."""

from collections.abc import Callable, Sequence
from math import isfinite

from msgspec import Struct

from tokenfleet.core.policy import REQUIRED_CLASSES
from tokenfleet.sim.control import Control
from tokenfleet.sim.measure import Quantiles, RequestFigures, figures_of, late_s, quantiles
from tokenfleet.sim.mixed.workload import BULK_PERIOD_S, BULK_STARTS_S
from tokenfleet.sim.served import Served

CLASSES = ("all", *REQUIRED_CLASSES)


class Counts(Struct, frozen=True, kw_only=True):
    """Requests: all that arrived, and what became of them."""

    offered: int
    completed: int
    unfinished: int
    rejected: int


class Throughput(Struct, frozen=True, kw_only=True):
    """Output tokens a second of requests that ended in the window, and of all until the last end."""

    window: float
    makespan: float


class Result(Struct, frozen=True, kw_only=True):
    """One mixed run; figures by class have the keys `all`, `chat`, `long` and `batch`.

    The window is [0, `window_s`), the makespan runs to the last end. Tokens count where their request ended. Attainment
    is over all requests of the run: of the admitted ones, and of the offered ones, where a refused one has missed its
    service level; None where there is none. `waste_tokens` were generated outside it. The cost is that of all instances
    over the window, idle or not. In percentiles a request that never got there is infinitely late. `bulk_end_s` is the
    time from each bulk's beginning to the end of its last batch job, None where one never ended. `rho` is the offered
    prefill work without caches, a second and instance. `allowance` tells how the number was moved by which SLOMax
    trades long against chat, `share_of_chat` how the controller moved the pool's shares, None where nothing does.
    """

    seed: int
    design: str
    chat: str
    instances: int
    load: float
    gateways: int
    event_delay_s: float
    outcome_delay_s: float
    profile: str
    window_s: float
    makespan_s: float
    rho: float
    requests: dict[str, Counts]
    rejected: int
    attainment_offered: dict[str, float | None]
    attainment_admitted: dict[str, float | None]
    goodput_tokens_per_s: dict[str, float]
    goodput_makespan_tokens_per_s: dict[str, float]
    throughput_tokens_per_s: Throughput
    waste_tokens: int
    cost_per_million_goodput_tokens: float | None
    ttft_s: dict[str, Quantiles]
    tpot_s: dict[str, Quantiles]
    e2e_s: dict[str, Quantiles]
    bulk_end_s: tuple[float | None, ...]
    hit_ratio: float
    requests_per_cpu_s: float
    demand: str = ""
    shares: str = "none"
    allowance: Control | None = None
    share_of_chat: Control | None = None


def by_class(served: Sequence[Served]) -> dict[str, list[Served]]:
    """The requests of each class, and all."""
    return {"all": list(served)} | {
        name: [each for each in served if each.request_class == name] for name in REQUIRED_CLASSES
    }


def counts(served: Sequence[Served]) -> Counts:
    """What became of these."""
    rejected = sum(bool(each.refused) for each in served)
    completed = sum(each.finished_s is not None for each in served)
    return Counts(
        offered=len(served), completed=completed, unfinished=len(served) - completed - rejected, rejected=rejected
    )


def percentiles(
    served: dict[str, list[Served]], figure: Callable[[RequestFigures], float | None], *, ended_only: bool = False
) -> dict[str, Quantiles]:
    """One figure by class; what never got there is infinitely late, or with `ended_only` left out."""
    return {
        name: quantiles([late_s(figure(f)) for f in map(figures_of, its) if not ended_only or figure(f) is not None])
        for name, its in served.items()
    }


def bulk_ends_s(batch: Sequence[Served]) -> tuple[float | None, ...]:
    """Seconds from the beginning of each bulk until its last job ended; None: a job never did."""
    ends: list[float | None] = []
    for start_s in BULK_STARTS_S:
        its = [each for each in batch if start_s <= each.row.at_s < start_s + BULK_PERIOD_S]
        last_s = max((late_s(each.finished_s) for each in its), default=start_s)
        ends.append(last_s - start_s if isfinite(last_s) else None)
    return tuple(ends)
