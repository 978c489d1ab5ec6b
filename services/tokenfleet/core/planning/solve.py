"""Solve: the cheapest plan over the horizon, as a mixed-integer linear programme for HiGHS.

    minimise   accelerators in use + sleeping + starts + stops + ways + unmet + exposed
    subject to n[t] = n[t−1] + cold[t−Lc] + warm[t−Lw] + starting[t] − stop[t]        replicas
               r[t] = r[t−1] + stop[t] − warm[t] − off[t], Σ r ≤ sleeping_max          weights in host memory
               Σ x + unmet = demand,  Σ x ≤ use_max · rate · n                          flows, where permitted
               Σ (other sites) use_max · rate · n + exposed ≥ critical · demand         any one site lost
               Σ gpus · (n + under way) ≤ gpus of the site;  starts, stops ≤ changes_max

Starts and stops of the first INTEGER_STEPS are whole numbers; what lies behind them is planned anew before it is done.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from tokenfleet.core.planning.plan import Line, Plan, Step
from tokenfleet.core.planning.problem import Problem

INTEGER_STEPS = 3
LIMIT_S = 20.0
GAP = 0.01
HOLD_COST = 1e-6  # a tie goes to what changes nothing

Numbers = NDArray[np.float64]


def solved(problem: Problem, *, now_s: Callable[[], float], limit_s: float = LIMIT_S) -> Plan | None:
    """The best plan found within about `limit_s`; None if the solver found none. `now_s` is a clock.

    Models share nothing but accelerators and host memory, so each is planned alone, which takes seconds where all
    together would take minutes. Where the plans don't fit together, they are made again one after another, those that
    give back first, each beside what is planned and what the others have now.
    """
    end_s = now_s() + limit_s

    def one(name: str, taken: Taken, left: int) -> Plan | None:
        return _solved(problem.of(name, taken), now_s=now_s, limit_s=max(LEAST_S, (end_s - now_s()) / left))

    plans: dict[str, Plan] = {}
    for place, name in enumerate(problem.models):
        plan = one(name, {}, len(problem.models) - place)
        if plan is None:
            return None
        plans[name] = plan
    if not _fit(problem, plans.values()):
        plans = _after_another(problem, plans, one) or {}
    return _joined(plans.values()) if plans else None


def kept(problem: Problem, *, now_s: Callable[[], float]) -> Plan | None:
    """The plan that changes nothing: what it costs, and what it leaves unserved."""
    plan = solved(problem.unchanged(), now_s=now_s)
    return None if plan is None else replace(plan, how="kept", keeping=plan.objective)


Taken = dict[str, tuple[tuple[float, float], ...]]
LEAST_S = 0.5  # for one model, however late it is


def _after_another(
    problem: Problem, alone: dict[str, Plan], one: Callable[[str, Taken, int], Plan | None]
) -> dict[str, Plan] | None:
    """Plans that fit: whoever gives back goes first, then whoever leaves most work undone without more."""

    def grows(name: str) -> float:
        return sum(line.steps[-1].gpus - line.steps[0].gpus for line in alone[name].lines)

    now = {name: _occupied_now(problem, name) for name in problem.models}
    plans: dict[str, Plan] = {}
    order = sorted(problem.models, key=grows)
    for place, name in enumerate(order):
        taken = _sum(
            problem, [*(_taken(problem, plan) for plan in plans.values()), *(now[n] for n in order[place + 1 :])]
        )
        plan = one(name, taken, len(order) - place)
        if plan is None:
            return None
        plans[name] = plan
    return plans


def _fit(problem: Problem, plans: Iterable[Plan]) -> bool:
    taken = _sum(problem, [_taken(problem, plan) for plan in plans])
    return all(
        gpus <= stock.gpus and sleeping <= stock.sleeping_max
        for site, stock in problem.sites.items()
        for gpus, sleeping in taken[site]
    )


def _taken(problem: Problem, plan: Plan) -> Taken:
    taken = {site: [[0.0, 0.0] for _ in range(problem.steps)] for site in problem.sites}
    for line in plan.lines:
        for at, step in zip(taken[line.site], line.steps, strict=True):
            at[0] += step.gpus
            at[1] += step.sleeping
    return {site: tuple([(gpus, sleeping) for gpus, sleeping in steps]) for site, steps in taken.items()}


def _occupied_now(problem: Problem, name: str) -> Taken:
    """What a model has now, all the time."""
    taken: Taken = {}
    for site in problem.sites:
        here = problem.replicas.get((site, name))
        gpus = problem.models[name].gpus * (here.ready + sum(here.starting)) if here is not None else 0
        taken[site] = ((float(gpus), float(here.sleeping if here is not None else 0)),) * problem.steps
    return taken


def _sum(problem: Problem, all_taken: Sequence[Taken]) -> Taken:
    return {
        site: tuple(
            [
                (sum(taken[site][step][0] for taken in all_taken), sum(taken[site][step][1] for taken in all_taken))
                for step in range(problem.steps)
            ]
        )
        for site in problem.sites
    }


def _joined(plans: Iterable[Plan]) -> Plan:
    """One plan of all models'; its gap is that of the whole cost."""
    every = list(plans)
    objective = sum(plan.objective for plan in every)
    proven = sum(plan.objective * (1.0 - (1.0 if plan.gap is None else plan.gap)) for plan in every)
    return replace(
        every[0],
        objective=objective,
        gap=1.0 - proven / objective if objective > 0.0 else 0.0,
        took_s=sum(plan.took_s for plan in every),
        lines=tuple([line for plan in every for line in plan.lines]),
        unmet={name: work for plan in every for name, work in plan.unmet.items()},
        exposed={name: work for plan in every for name, work in plan.exposed.items()},
    )


def _solved(problem: Problem, *, now_s: Callable[[], float], limit_s: float) -> Plan | None:
    began_s = now_s()
    model = _Model(problem)
    result = milp(
        c=model.cost,
        integrality=model.integer,
        bounds=Bounds(np.zeros(model.size), model.most),
        constraints=LinearConstraint(model.matrix(), *model.sides()),
        options={"time_limit": limit_s, "mip_rel_gap": GAP},
    )
    if result.x is None:
        return None
    gap = getattr(result, "mip_gap", None)
    return model.plan(
        np.asarray(result.x, np.float64),
        how="solved",
        gap=0.0 if gap is None else float(gap),
        took_s=now_s() - began_s,
    )


@dataclass
class _Rows:
    """Constraints as they are written down: low ≤ Σ factor · variable ≤ high."""

    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])
    at: list[int] = field(default_factory=list[int])
    of: list[int] = field(default_factory=list[int])
    factor: list[float] = field(default_factory=list[float])

    def add(self, terms: Iterator[tuple[int, float]], *, low: float = -np.inf, high: float = np.inf) -> None:
        row = len(self.low)
        self.low.append(low)
        self.high.append(high)
        for variable, factor in terms:
            self.at.append(row)
            self.of.append(variable)
            self.factor.append(factor)


class _Model:
    """The programme of one problem: variables by place, costs, bounds and constraints."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.size = 0
        self.pairs = list(problem.replicas)
        self.flows = [way for way in problem.ways if way[1:] in problem.replicas and way[0::2] in problem.demand]
        steps = problem.steps
        self.ready = {pair: self._several(steps) for pair in self.pairs}
        self.cold = {pair: self._several(steps) for pair in self.pairs}
        self.warm = {pair: self._several(steps) for pair in self.pairs}
        self.stop = {pair: self._several(steps) for pair in self.pairs}
        self.off = {pair: self._several(steps) for pair in self.pairs}
        self.sleeping = {pair: self._several(steps) for pair in self.pairs}
        self.flow = {way: self._several(steps) for way in self.flows}
        self.unmet = {demand: self._several(steps) for demand in problem.demand}
        critical = [name for name, needs in problem.models.items() if needs.critical > 0.0]
        self.exposed = {(site, name): self._several(steps) for site in problem.sites for name in critical}
        self.cost = np.zeros(self.size)
        self.most = np.full(self.size, np.inf)
        self.integer = np.zeros(self.size, np.int64)
        self.rows = _Rows()
        self._price()
        self._bound()
        for pair in self.pairs:
            self._follow(pair)
        self._stock()
        self._serve()
        self._lose()

    def _several(self, number: int) -> range:
        places = range(self.size, self.size + number)
        self.size += number
        return places

    def _price(self) -> None:
        problem, prices, hours = self.problem, self.problem.prices, self.problem.step_hours
        for site, name in self.pairs:
            pair, gpus = (site, name), problem.models[name].gpus
            self.cost[self.ready[pair]] = problem.sites[site].price_per_gpu_hour * gpus * hours
            self.cost[self.cold[pair]] = prices.cold_start
            self.cost[self.warm[pair]] = prices.warm_start
            self.cost[self.stop[pair]] = prices.stop
            self.cost[self.sleeping[pair]] = prices.sleeping_per_hour * hours
            self.cost[self.off[pair]] = HOLD_COST
        for way, places in self.flow.items():
            self.cost[places] = problem.ways[way].cost_per_unit * problem.step_s
        for places in self.unmet.values():
            self.cost[places] = prices.unmet_per_unit * problem.step_s
        for places in self.exposed.values():
            self.cost[places] = prices.exposed_per_unit * problem.step_s

    def _bound(self) -> None:
        for site, name in self.pairs:
            most = self.problem.changes_max(site, name)
            for places in (self.cold[site, name], self.warm[site, name], self.stop[site, name]):
                self.most[places] = most
                self.integer[places[:INTEGER_STEPS]] = 1
            self.integer[self.off[site, name][:INTEGER_STEPS]] = 1

    def _follow(self, pair: tuple[str, str]) -> None:
        """How replicas and sleeping weights go from step to step."""
        here, needs = self.problem.replicas[pair], self.problem.models[pair[1]]
        for step in range(self.problem.steps):
            coming = here.starting[step] if step < len(here.starting) else 0
            terms = [(self.ready[pair][step], 1.0), (self.stop[pair][step], 1.0)]
            terms += [(self.ready[pair][step - 1], -1.0)] if step else []
            terms += [(self.cold[pair][step - needs.cold_steps], -1.0)] if step >= needs.cold_steps else []
            terms += [(self.warm[pair][step - needs.warm_steps], -1.0)] if step >= needs.warm_steps else []
            known = float(coming + (0 if step else here.ready))
            self.rows.add(iter(terms), low=known, high=known)
            slept = float(0 if step else here.sleeping)
            terms = [
                (self.sleeping[pair][step], 1.0),
                (self.stop[pair][step], -1.0),
                (self.warm[pair][step], 1.0),
                (self.off[pair][step], 1.0),
            ]
            terms += [(self.sleeping[pair][step - 1], -1.0)] if step else []
            self.rows.add(iter(terms), low=slept, high=slept)
            starts = [(self.cold[pair][step], 1.0), (self.warm[pair][step], 1.0)]
            self.rows.add(iter(starts), high=float(self.problem.changes_max(*pair)))

    def _stock(self) -> None:
        """Accelerators for what is ready and under way, host memory for what sleeps."""
        problem = self.problem
        for site, stock in problem.sites.items():
            own = [pair for pair in self.pairs if pair[0] == site]
            for step in range(problem.steps):
                known = sum(
                    problem.models[pair[1]].gpus * sum(problem.replicas[pair].starting[step + 1 :]) for pair in own
                )
                gpus, sleeping = problem.taken[site][step] if site in problem.taken else (0.0, 0.0)
                self.rows.add(self._occupied(own, step), high=max(0.0, stock.gpus - known - gpus))
                self.rows.add(
                    ((self.sleeping[pair][step], 1.0) for pair in own), high=max(0.0, stock.sleeping_max - sleeping)
                )

    def _occupied(self, own: list[tuple[str, str]], step: int) -> Iterator[tuple[int, float]]:
        for pair in own:
            needs = self.problem.models[pair[1]]
            yield self.ready[pair][step], float(needs.gpus)
            for began, lead in ((self.cold[pair], needs.cold_steps), (self.warm[pair], needs.warm_steps)):
                for start in range(max(0, step - lead + 1), step + 1):
                    yield began[start], float(needs.gpus)

    def _serve(self) -> None:
        """Demand is served or unmet, by replicas up to what they are planned for."""
        problem = self.problem
        leaving = {of: [way for way in self.flows if way[0::2] == of] for of in problem.demand}
        arriving = {pair: [way for way in self.flows if way[1:] == pair] for pair in self.pairs}
        for of, offered in problem.demand.items():
            for step in range(problem.steps):
                terms = [(self.flow[way][step], 1.0) for way in leaving[of]] + [(self.unmet[of][step], 1.0)]
                self.rows.add(iter(terms), low=offered[step], high=offered[step])
        for pair, ways in arriving.items():
            served = problem.use_max * problem.replicas[pair].rate
            for step in range(problem.steps):
                terms = [(self.flow[way][step], 1.0) for way in ways] + [(self.ready[pair][step], -served)]
                self.rows.add(iter(terms), high=0.0)

    def _lose(self) -> None:
        """With any one site lost the others serve the critical share of what may go to them."""
        problem = self.problem
        for (lost, name), places in self.exposed.items():
            others = [pair for pair in self.pairs if pair[1] == name and pair[0] != lost]
            origins = {way[0] for way in self.flows if way[2] == name and way[1] != lost}
            for step in range(problem.steps):
                offered = sum(problem.demand[origin, name][step] for origin in origins)
                terms = [(self.ready[pair][step], problem.replicas[pair].rate) for pair in others]
                terms.append((places[step], 1.0))
                self.rows.add(iter(terms), low=problem.models[name].critical * offered)

    def matrix(self) -> csr_array:
        """The constraints' factors, a row a constraint."""
        rows = self.rows
        return csr_array((rows.factor, (rows.at, rows.of)), shape=(len(rows.low), self.size))

    def sides(self) -> tuple[Numbers, Numbers]:
        """Least and most of each constraint."""
        return np.array(self.rows.low), np.array(self.rows.high)

    def plan(self, found: Numbers, *, how: str, gap: float | None, took_s: float) -> Plan:
        """The found values as a plan."""
        problem, hours = self.problem, self.problem.step_s
        unmet: dict[str, float] = {}
        for (_, name), places in self.unmet.items():
            unmet[name] = unmet.get(name, 0.0) + float(found[places].sum()) * hours
        exposed: dict[str, float] = {}
        for (_, name), places in self.exposed.items():
            exposed[name] = max(exposed.get(name, 0.0), float(found[places].max()))
        return Plan(
            how=how,
            objective=float(self.cost @ found),
            keeping=0.0,
            gap=gap,
            took_s=took_s,
            lines=tuple(self._line(pair, found) for pair in self.pairs),
            unmet={name: work for name, work in unmet.items() if work > SMALL},
            exposed={name: work for name, work in exposed.items() if work > SMALL},
            why=f"over {problem.steps} steps of {problem.step_s:g} s",
        )

    def _line(self, pair: tuple[str, str], found: Numbers) -> Line:
        site, name = pair
        needs = self.problem.models[name]
        steps = tuple(
            Step(
                ready=round(found[self.ready[pair][step]]),
                gpus=round(sum(factor * found[place] for place, factor in self._occupied([pair], step)))
                + needs.gpus * sum(self.problem.replicas[pair].starting[step + 1 :]),
                cold=round(found[self.cold[pair][step]]),
                warm=round(found[self.warm[pair][step]]),
                stop=round(found[self.stop[pair][step]]),
                sleeping=round(found[self.sleeping[pair][step]]),
            )
            for step in range(self.problem.steps)
        )
        told = min(needs.cold_steps, self.problem.steps - 1)
        serves = {way[0]: float(found[self.flow[way][told]]) for way in self.flows if way[1:] == pair}
        able = self.problem.replicas[pair].rate * found[self.ready[pair][told]]
        return Line(
            site=site,
            model=name,
            steps=steps,
            serves={origin: work for origin, work in serves.items() if work > SMALL},
            use=sum(serves.values()) / able if able > SMALL else 0.0,
        )


SMALL = 1e-6
