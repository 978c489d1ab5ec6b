"""Allowances: the controlled number of the class queues over a run, gateway by gateway."""

from tokenfleet.core.decision import Request
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.sim.control import Control, Series, control_of
from tokenfleet.sim.demand import Demand
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.router import MakeRouter, Router, Setup
from tokenfleet.sim.slots import Slots
from tokenfleet.sim.telemetry import MODEL

BAND = 0.1  # of the guarded time per token: where it is settled, around its mean until the next change
SHARE_BAND = 0.03  # of the pool: one step
SETTLED_TAIL = 0.5  # of the time until the next change, over which that mean is taken


class Allowances:
    """An Overseer that moves nothing and reads the allowance of the first gateway each second, if that has one."""

    def __init__(self) -> None:
        self.allowed: list[tuple[float, float]] = []
        self.pilots: list[Pilot] = []

    def watching(self, make_router: MakeRouter) -> MakeRouter:
        """The same routers, watched."""

        def made(setup: Setup) -> Router:
            router = make_router(setup)
            if isinstance(router, Pilot):
                self.pilots.append(router)
            return router

        return made

    def offered(self, request: Request, now_s: float) -> None:
        pass

    def placed(self, request: str, now_s: float) -> None:
        pass

    def ended(self, event: OutcomeEvent, now_s: float) -> None:
        pass

    def advance(self, slots: Slots, now_s: float) -> None:
        for pilot in self.pilots[:1]:
            if pilot.site.policy.slomax.pacing.enabled:
                self.allowed.append((now_s, pilot.site.queues(MODEL).allowance.share))


def control_of_allowance(series: Series, demand: Demand | None, *, until_s: float) -> Control:
    """How the allowance behaved: it is settled when it is within BAND of what it comes to before the next change."""
    return _control_of("allowance", series, demand, until_s=until_s, band=BAND)


def control_of_share(series: Series, demand: Demand | None, *, until_s: float) -> Control:
    """The same of chat's share, and SHARE_BAND."""
    return _control_of("share of chat", series, demand, until_s=until_s, band=SHARE_BAND)


def _control_of(what: str, series: Series, demand: Demand | None, *, until_s: float, band: float) -> Control:
    within = [(at_s, share) for at_s, share in series if at_s < until_s]
    changes_s = demand.changes_s if demand is not None else ()
    ends_s = [*(at_s for at_s in changes_s if at_s < until_s), until_s]

    def off(at_s: float, value: float) -> bool:
        end_s = next(end_s for end_s in ends_s if end_s > at_s)
        start_s = max((start_s for start_s in (0.0, *ends_s) if start_s <= at_s), default=0.0)
        tail = [share for when_s, share in within if end_s - SETTLED_TAIL * (end_s - start_s) <= when_s < end_s]
        return abs(value - sum(tail) / max(1, len(tail))) > band

    return control_of(what, within, changes_s=changes_s, until_s=until_s, off=off)
