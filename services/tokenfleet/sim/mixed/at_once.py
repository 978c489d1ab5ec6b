"""At once: gateways that can hold nothing back, with and without SLOMax's feasibility gate before them.

A job that is deferred comes again when it is told to; what is refused is gone.
"""

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from tokenfleet.core.asked import Steps
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy
from tokenfleet.core.schedule import decide
from tokenfleet.sim.pilot import UNBOUNDED, Pilot
from tokenfleet.sim.router import Answer, Setup

ADMIT_AND_ROUTE: Final = Steps(admission=True, routing=True)


class AtOnce(Pilot):
    """SLOMax is asked and bounds no class; it refuses what a deadline rules out, and no more unless it is `gated`."""

    steps = ADMIT_AND_ROUTE
    wait_max_s = 0.0
    gated = False

    def __init__(self, setup: Setup) -> None:
        policy = setup.policy
        super().__init__(setup if policy is None else replace(setup, policy=_unbound(policy, gated=self.gated)))
        self._deferred: list[tuple[float, float, Request]] = []  # when it comes again and when it came first

    @property
    def holding(self) -> int:
        return len(self._deferred)

    def route(self, request: Request, now_s: float) -> Answer:
        return self._asked(request, now_s, since_s=now_s)

    def released(self, now_s: float) -> Sequence[Answer]:
        due = [each for each in self._deferred if each[0] <= now_s]
        self._deferred = [each for each in self._deferred if each[0] > now_s]
        return [self._asked(request, now_s, since_s=since_s) for _, since_s, request in due]

    def _asked(self, request: Request, now_s: float, *, since_s: float) -> Answer:
        asked = replace(request, wait_max_s=self.wait_max_s, elapsed_s=now_s - since_s)
        decided = decide(self.site, asked, self.steps, self._ids(), now_s=now_s)
        admission = decided.decision.admission
        if decided.decision.verdict != "defer" or admission is None or admission.not_before_s is None:
            return self._answer(request, decided, now_s)
        self._deferred.append((now_s + admission.not_before_s, since_s, request))
        return Answer(request=request.id, decision=decided.decision.id)


class Gated(AtOnce):
    """The same behind the feasibility gate."""

    gated = True


def _unbound(policy: Policy, *, gated: bool) -> Policy:
    """The policy with no bounds on a class's load, and the gate as told."""
    classes = {
        name: replace(terms, running_max_per_instance=UNBOUNDED, backlog_max_s=UNBOUNDED)
        for name, terms in policy.classes.items()
    }
    gate = replace(policy.slomax.gate, enabled=gated)
    return replace(policy, classes=classes, slomax=replace(policy.slomax, gate=gate))
