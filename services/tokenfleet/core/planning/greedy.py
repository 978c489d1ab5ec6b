"""Greedy: one cautious step from what is, for when the solver has nothing: start where demand exceeds what is planned
for, stop nothing."""

from tokenfleet.core.planning.plan import Line, Plan, Step
from tokenfleet.core.planning.problem import Problem


def greedy(problem: Problem, *, why: str) -> Plan:
    """One more replica at each site whose own demand in the horizon exceeds what its replicas are planned for, if
    there is room: from sleep where one sleeps, else cold."""
    free = {
        site: stock.gpus
        - sum(
            problem.models[name].gpus * (here.ready + sum(here.starting))
            for (at, name), here in problem.replicas.items()
            if at == site
        )
        for site, stock in problem.sites.items()
    }
    lines: list[Line] = []
    for (site, name), here in problem.replicas.items():
        offered = max(problem.demand.get((site, name), ()), default=0.0)
        able = problem.use_max * here.rate * (here.ready + sum(here.starting))
        gpus = problem.models[name].gpus
        starts = int(offered > able and free[site] >= gpus and not here.held)
        free[site] -= starts * gpus
        warm = starts if here.sleeping else 0
        first = Step(ready=here.ready, cold=starts - warm, warm=warm, sleeping=here.sleeping - warm)
        lines.append(
            Line(site=site, model=name, steps=(first,), serves={site: offered}, use=offered / able if able else 0.0)
        )
    return Plan(how="greedy", objective=0.0, keeping=0.0, gap=None, took_s=0.0, lines=tuple(lines), why=why)
