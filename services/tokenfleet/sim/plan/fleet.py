"""Fleet: replicas of one model at several sites that follow plans, and the work that they serve minute by minute."""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.planning.plan import Plan
from tokenfleet.core.planning.problem import Replicas

MODEL = "model"


class Served(Struct, frozen=True, kw_only=True):
    """One minute: work offered and served, and accelerators in use."""

    offered: float
    served: float
    gpus: int


class Fleet:
    """`ready`, `sleeping` and under way at each site; a replica that stops is there for the rest of its step."""

    def __init__(self, ready: Sequence[int], *, cold_steps: int, warm_steps: int) -> None:
        self.ready = list(ready)
        self.sleeping = [0] * len(ready)
        self.starting = [[0] * max(cold_steps, warm_steps) for _ in ready]
        self._stopping = [0] * len(ready)
        self._cold_steps, self._warm_steps = cold_steps, warm_steps

    def begin(self, plan: Plan | None, names: Sequence[str]) -> None:
        """A step begins: what was to be ready is, and the first step of the plan is done."""
        for site, name in enumerate(names):
            self.ready[site] += self.starting[site].pop(0)
            self.starting[site].append(0)
            self._stopping[site] = 0
            line = plan.line(name, MODEL) if plan is not None else None
            if line is None:
                continue
            now = line.steps[0]
            stop = min(now.stop, self.ready[site])
            self.starting[site][self._cold_steps - 1] += now.cold
            self.starting[site][self._warm_steps - 1] += now.warm
            self.ready[site] -= stop
            self._stopping[site] = stop
            self.sleeping[site] = now.sleeping

    def minute(self, offered: Sequence[float]) -> Served:
        """Serve a minute's work: each site its own first, then what others are short of."""
        short = [max(0.0, work - able) for work, able in zip(offered, self.ready, strict=True)]
        spare = sum(max(0.0, able - work) for work, able in zip(offered, self.ready, strict=True))
        return Served(
            offered=sum(offered),
            served=sum(offered) - max(0.0, sum(short) - spare),
            gpus=sum(self.ready) + sum(self._stopping) + sum(sum(starting) for starting in self.starting),
        )

    def replicas(self, site: int) -> Replicas:
        """As a problem has them; a replica serves a unit of work."""
        return Replicas(
            rate=1.0, ready=self.ready[site], sleeping=self.sleeping[site], starting=tuple(self.starting[site])
        )
