"""Run: one day of plans beside the fleet that is always as large as its peak."""

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.core.planning.forecast import Expected, forecast
from tokenfleet.core.planning.problem import ModelNeeds, Prices, Problem, SiteStock, Way
from tokenfleet.core.planning.review import planned
from tokenfleet.sim.plan.demand import DAY_S, MINUTE_S, offered, steps_of
from tokenfleet.sim.plan.fleet import MODEL, Fleet, Served

STEP_S = 300.0
HORIZON = 12
COLD_STEPS, WARM_STEPS = 2, 1
USE_MAX = 0.8
DESIGNS = ("forecast", "perfect")
HISTORY_DAYS = 7
SITES = ("a", "b", "c", "d")


class PlanOptions(Struct, frozen=True, kw_only=True):
    """One run. `peak` is the greatest demand of a site over its mean, `forecast_every` the steps between two fits;
    `perfect` plans know what will be offered."""

    design: str = "forecast"
    hours: float = 24.0
    peak: float = 2.0
    critical: float = 0.5
    forecast_every: int = 3
    seed: int = 1


class Result(Struct, frozen=True, kw_only=True):
    """One run: the share of the offered work that was served, and accelerator hours, beside those of a fleet in which
    each site always has what its own peak needs. `plans` were made, `published` followed; the slowest took `solve_s`.
    """

    seed: int
    design: str
    hours: float
    attainment: float
    gpu_hours: float
    static_attainment: float
    static_gpu_hours: float
    saved: float
    plans: int
    published: int
    solve_s: float
    ready: tuple[tuple[int, ...], ...]


def run_plan(
    options: PlanOptions, *, now_s: Callable[[], float], progress: Callable[[float], None] | None = None
) -> Result:
    """Plan and serve a day, after a week of history. `now_s` is a clock, for what the solver takes alone.

    Raises PolicyError for an unknown design and for figures out of range.
    """
    _refuse_impossible(options)
    per_step = round(STEP_S / MINUTE_S)
    minutes = offered(
        sites=len(SITES), days=HISTORY_DAYS + 1 + math.ceil(options.hours / 24.0), peak=options.peak, seed=options.seed
    )
    steps = [steps_of(own, per_step) for own in minutes]
    first = HISTORY_DAYS * round(DAY_S / STEP_S)
    count = round(options.hours * 3600.0 / STEP_S)
    static = [math.ceil(_quantile(own[first - round(DAY_S / STEP_S) : first], 0.99) / USE_MAX) for own in steps]
    fleet = Fleet([math.ceil(own[first] / USE_MAX) for own in steps], cold_steps=COLD_STEPS, warm_steps=WARM_STEPS)
    always = Fleet(static, cold_steps=COLD_STEPS, warm_steps=WARM_STEPS)
    served: list[Served] = []
    beside: list[Served] = []
    ready: list[tuple[int, ...]] = []
    expected: list[Expected] = []
    made = published = 0
    slowest_s = 0.0
    for step in range(first, first + count):
        if options.design == "perfect":
            expected = [Expected(mean=(), p90=tuple(own[step : step + HORIZON])) for own in steps]
        elif (step - first) % options.forecast_every == 0:
            expected = [
                forecast(own[:step], season=round(DAY_S / STEP_S), steps=HORIZON + options.forecast_every)
                for own in steps
            ]
        late = 0 if options.design == "perfect" else (step - first) % options.forecast_every
        problem = _problem(options, fleet, [each.p90[late : late + HORIZON] for each in expected])
        hour = {(name, MODEL): tuple(own[step - HORIZON : step]) for name, own in zip(SITES, steps, strict=True)}
        review = planned(problem, last_hour=hour, now_s=now_s)
        made += 1
        published += review.publish
        slowest_s = max(slowest_s, review.plan.took_s)
        fleet.begin(review.plan if review.publish else None, SITES)
        always.begin(None, SITES)
        for minute in range(step * per_step, (step + 1) * per_step):
            work = [own[minute] for own in minutes]
            served.append(fleet.minute(work))
            beside.append(_apart(always, work))
        ready.append(tuple(fleet.ready))
        if progress is not None:
            progress((step - first + 1) * STEP_S)
    hours, static_hours = _gpu_hours(served), _gpu_hours(beside)
    return Result(
        seed=options.seed,
        design=options.design,
        hours=options.hours,
        attainment=_attained(served),
        gpu_hours=hours,
        static_attainment=_attained(beside),
        static_gpu_hours=static_hours,
        saved=1.0 - hours / static_hours,
        plans=made,
        published=published,
        solve_s=slowest_s,
        ready=tuple(ready),
    )


def _problem(options: PlanOptions, fleet: Fleet, demand: Sequence[Sequence[float]]) -> Problem:
    return Problem(
        step_s=STEP_S,
        steps=HORIZON,
        sites={name: SiteStock(gpus=200, sleeping_max=100, price_per_gpu_hour=2.0) for name in SITES},
        models={MODEL: ModelNeeds(cold_steps=COLD_STEPS, warm_steps=WARM_STEPS, critical=options.critical)},
        replicas={(name, MODEL): fleet.replicas(site) for site, name in enumerate(SITES)},
        demand={(name, MODEL): tuple(values) for name, values in zip(SITES, demand, strict=True)},
        ways={
            (origin, site, MODEL): Way(cost_per_unit=0.0 if origin == site else AWAY_COST)
            for origin in SITES
            for site in SITES
        },
        prices=Prices(),
        use_max=USE_MAX,
    )


AWAY_COST = 1e-5  # of a unit of work that leaves its site: 0.04 an hour beside 2.0 for the replica that serves it


def _apart(fleet: Fleet, work: Sequence[float]) -> Served:
    """A minute in which no site helps another."""
    return Served(
        offered=sum(work),
        served=sum(min(own, able) for own, able in zip(work, fleet.ready, strict=True)),
        gpus=sum(fleet.ready),
    )


def _attained(served: Sequence[Served]) -> float:
    return sum(each.served for each in served) / sum(each.offered for each in served)


def _gpu_hours(served: Sequence[Served]) -> float:
    return sum(each.gpus for each in served) * MINUTE_S / 3600.0


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)))]


def _refuse_impossible(options: PlanOptions) -> None:
    if options.design not in DESIGNS:
        raise PolicyError(f"--design {options.design!r}: there is {listed(DESIGNS)}")
    if not STEP_S / 3600.0 <= options.hours <= 240.0:
        raise PolicyError(f"--hours {options.hours:g}: it is {STEP_S / 3600.0:.3f} to 240")
    if not 1.0 <= options.peak <= 2.0:
        raise PolicyError(f"--peak {options.peak:g}: it is 1 to 2, for demand is never below 0")
    if not 0.0 <= options.critical <= 1.0:
        raise PolicyError(f"--critical {options.critical:g}: it is 0 to 1")
