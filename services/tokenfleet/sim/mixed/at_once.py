"""At once: gateways that can hold nothing back, with and without SLOMax's feasibility gate before them."""

from typing import Final

from msgspec.structs import replace

from tokenfleet.core.asked import Steps
from tokenfleet.core.policy import Policy
from tokenfleet.sim.pilot import UNBOUNDED, Pilot
from tokenfleet.sim.router import Setup

ADMIT_AND_ROUTE: Final = Steps(admission=True, routing=True)


class AtOnce(Pilot):
    """SLOMax is asked and bounds no class; it refuses what a deadline rules out, and no more unless it is `gated`."""

    steps = ADMIT_AND_ROUTE
    wait_max_s = 0.0
    gated = False

    def __init__(self, setup: Setup) -> None:
        policy = setup.policy
        super().__init__(setup if policy is None else replace(setup, policy=_unbound(policy, gated=self.gated)))


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
