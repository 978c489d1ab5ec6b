"""Designs: how one cluster serves three classes, by name."""

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.baselines.blind import LeastRequests
from tokenfleet.sim.baselines.priority import Pools, Priority
from tokenfleet.sim.mixed.at_once import AtOnce, Gated
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.router import MakeRouter

DESIGNS: dict[str, MakeRouter] = {
    "slomax": Pilot,
    "at_once": AtOnce,
    "gated": Gated,
    "least_requests": LeastRequests,
    "priority": Priority,
    "pools": Pools,
}


def design_named(name: str) -> MakeRouter:
    """The design's gateways. Raises PolicyError for an unknown one, with what there is."""
    if name not in DESIGNS:
        raise PolicyError(f"--design {name!r}: there is {listed(DESIGNS)}")
    return DESIGNS[name]
