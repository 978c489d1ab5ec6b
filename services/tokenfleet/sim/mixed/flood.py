"""Flood: what one tenant's flood takes from the others of a mixed cluster."""

from collections.abc import Callable
from math import isfinite

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.sim.measure import Quantiles, figures_of, late_s, quantiles
from tokenfleet.sim.mixed.run import MixedOptions, MixedRun, run_mixed
from tokenfleet.sim.mixed.workload import tenant_name
from tokenfleet.sim.pilot import WAIT_MAX_S, Pilot
from tokenfleet.sim.router import Answer

INTERACTIVE_WAIT_MAX_S = 30.0
FLOODING = tenant_name(0)


class Impatient(Pilot):
    """A gateway whose interactive callers leave after half a minute."""

    def route(self, request: Request, now_s: float) -> Answer:
        self.wait_max_s = INTERACTIVE_WAIT_MAX_S if request.deadline_s is None else WAIT_MAX_S
        return super().route(request, now_s)


class Side(Struct, frozen=True, kw_only=True):
    """One run: output tokens of the others within their service level, in the window; their attainment of what they
    offered, and that of the worst of them; by class their first tokens, those of who got there alone, and the share of
    them that was refused; requests and tokens within the service level of the tenant that floods."""

    others_goodput_tokens: int
    others_attainment: float
    worst_attainment: float
    ttft_s: dict[str, Quantiles]
    served_ttft_s: dict[str, Quantiles]
    refused_share: dict[str, float]
    flooding_requests: int
    flooding_goodput_tokens: int


class FloodResult(Struct, frozen=True, kw_only=True):
    """`calm` and `flooded` are one workload without and with the flood; `kept` is the others' goodput in the flood over
    that in the calm, `ttft_p99_ratio` that of their 99th percentiles by class, None where one never got there."""

    seed: int
    design: str
    instances: int
    load: float
    tenants: int
    flood: float
    calm: Side
    flooded: Side
    kept: float
    ttft_p99_ratio: dict[str, float | None]


def run_flood(
    options: MixedOptions, *, cpu_s: Callable[[], float], progress: Callable[[float], None] | None = None
) -> FloodResult:
    """Serve the workload without and with the flood of `options`. Who has left comes again no more.

    Raises PolicyError as run_mixed does.
    """
    options = replace(options, patience_s=INTERACTIVE_WAIT_MAX_S)
    if options.design == "slomax":
        options = replace(options, make_router=Impatient)
    calm = _side(run_mixed(replace(options, flood=1.0), cpu_s=cpu_s, progress=progress))
    flooded = _side(run_mixed(options, cpu_s=cpu_s, progress=progress))
    return FloodResult(
        seed=options.seed,
        design=options.design,
        instances=options.instances,
        load=options.load,
        tenants=options.tenants,
        flood=options.flood,
        calm=calm,
        flooded=flooded,
        kept=flooded.others_goodput_tokens / max(calm.others_goodput_tokens, 1),
        ttft_p99_ratio={name: _ratio(flooded.ttft_s[name].p99, calm.ttft_s[name].p99) for name in calm.ttft_s},
    )


def _side(run: MixedRun) -> Side:
    window, whole = run.accounts.by_tenant(until_s=run.result.window_s), run.accounts.by_tenant()
    others = [each for name, each in whole.items() if name != FLOODING]
    judged = sum(each.met + each.missed + each.rejected for each in others)
    theirs = [each for each in run.served if each.tenant != FLOODING]
    by_class = {
        name: [each for each in theirs if each.request_class == name]
        for name in sorted({each.request_class for each in theirs})
    }
    ttft_s = {name: [late_s(figures_of(each).ttft_s) for each in its] for name, its in by_class.items()}
    return Side(
        others_goodput_tokens=sum(each.goodput_tokens for name, each in window.items() if name != FLOODING),
        others_attainment=sum(each.met for each in others) / max(judged, 1),
        worst_attainment=min((each.attainment_offered or 0.0 for each in others), default=0.0),
        ttft_s={name: quantiles(its) for name, its in ttft_s.items()},
        served_ttft_s={name: quantiles(list(filter(isfinite, its))) for name, its in ttft_s.items()},
        refused_share={name: sum(bool(each.refused) for each in its) / len(its) for name, its in by_class.items()},
        flooding_requests=sum(each.tenant == FLOODING for each in run.served),
        flooding_goodput_tokens=window[FLOODING].goodput_tokens if FLOODING in window else 0,
    )


def _ratio(flooded_s: float | None, calm_s: float | None) -> float | None:
    return None if flooded_s is None or not calm_s else flooded_s / calm_s
