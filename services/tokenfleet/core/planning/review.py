"""Review: whether a plan is worth publishing. Changes are not free of risk, so it must gain or cure something, and
may not serve less of the last hour than what is there now."""

from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.planning.greedy import greedy
from tokenfleet.core.planning.plan import Plan
from tokenfleet.core.planning.problem import Problem
from tokenfleet.core.planning.solve import LIMIT_S, kept, solved

GAIN_MIN = 0.03  # of the cost of keeping things as they are
WORSE_MAX = 0.001  # of the last hour's work


class Reviewed(Struct, frozen=True, kw_only=True):
    """The plan, whether it is to be published, and why or why not."""

    plan: Plan
    publish: bool
    why: str


Hour = Mapping[tuple[str, str], tuple[float, ...]]  # what was really offered, by origin and model, a value a step


def planned(problem: Problem, *, last_hour: Hour, now_s: Callable[[], float], limit_s: float = LIMIT_S) -> Reviewed:
    """The plan for `problem`. Without one in time it is a greedy step."""
    plan, keeping = solved(problem, now_s=now_s, limit_s=limit_s), kept(problem, now_s=now_s)
    if plan is None or keeping is None:
        step = greedy(problem, why="the solver found nothing in time")
        return Reviewed(
            plan=step, publish=any(s.cold or s.warm for line in step.lines for s in line.steps), why=step.why
        )
    plan = replace(plan, keeping=keeping.objective)
    cures = _total(plan.unmet) < _total(keeping.unmet) or _total(plan.exposed) < _total(keeping.exposed)
    gain = 1.0 - plan.objective / keeping.objective if keeping.objective > 0.0 else 0.0
    if gain <= GAIN_MIN and not cures:
        return Reviewed(plan=plan, publish=False, why=f"it gains {gain:.1%}, less than {GAIN_MIN:.0%}")
    lost = _replayed(problem, plan, last_hour, now_s=now_s)
    if lost > WORSE_MAX:
        return Reviewed(plan=plan, publish=False, why=f"it would have served {lost:.1%} less of the last hour")
    return Reviewed(
        plan=plan,
        publish=True,
        why="it serves what is not served now" if cures and gain <= GAIN_MIN else f"it gains {gain:.1%}",
    )


def _replayed(problem: Problem, plan: Plan, last_hour: Hour, *, now_s: Callable[[], float]) -> float:
    """How much less of the last hour's work what the plan ends with serves than what is there now."""
    steps = len(next(iter(last_hour.values()), ()))
    if not steps:
        return 0.0
    past = replace(problem.unchanged(), steps=steps, demand=last_hour, taken={})
    ends = {(line.site, line.model): line.steps[-1].ready for line in plan.lines}
    then = replace(
        past,
        replicas={
            pair: replace(here, ready=ends.get(pair, here.ready), starting=()) for pair, here in past.replicas.items()
        },
    )
    now, after = solved(past, now_s=now_s), solved(then, now_s=now_s)
    offered = sum(sum(values) for values in last_hour.values()) * problem.step_s
    if now is None or after is None or offered <= 0.0:
        return 0.0
    return (_total(after.unmet) - _total(now.unmet)) / offered


def _total(by_model: Mapping[str, float]) -> float:
    return sum(by_model.values())
