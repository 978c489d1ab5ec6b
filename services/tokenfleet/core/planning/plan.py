"""Plan: what to start and stop, step by step, and what it was chosen for."""

from msgspec import Struct


class Step(Struct, frozen=True, kw_only=True):
    """One model at one site in one step: replicas that are ready then, and what begins in it.

    `cold` and `warm` start, `stop` stops (what of it does not go to sleep is taken off), `sleeping` is what sleeps at
    its end, `gpus` what ready and starting ones occupy.
    """

    ready: int
    gpus: int = 0
    cold: int = 0
    warm: int = 0
    stop: int = 0
    sleeping: int = 0


class Line(Struct, frozen=True, kw_only=True):
    """One model at one site over the horizon. `serves` is the work a second from each origin in the first step in
    which what is begun now is ready, `use` the share of what its replicas can serve then."""

    site: str
    model: str
    steps: tuple[Step, ...]
    serves: dict[str, float]
    use: float


class Plan(Struct, frozen=True, kw_only=True):
    """What comes of one planning. `how`: by the solver (`solved`), by one cautious step from what is (`greedy`), or as
    it was (`kept`). `objective` and `keeping` are the cost of the horizon with it and with nothing changed, in money;
    `unmet` is the work that is not served, by model, `exposed` what would not be if a site were lost. `gap` is how far
    from the best the solver may have stopped, None where it proved nothing.
    """

    how: str
    objective: float
    keeping: float
    gap: float | None
    took_s: float
    lines: tuple[Line, ...]
    unmet: dict[str, float] = {}
    exposed: dict[str, float] = {}
    why: str = ""

    def line(self, site: str, model: str) -> Line | None:
        return next((line for line in self.lines if (line.site, line.model) == (site, model)), None)
