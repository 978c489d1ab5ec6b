"""Designs: ways to serve chat, long-context and batch requests on one cluster, by name, each as a policy.

The same as the simulator's (sim/mixed/designs.py), with what decide replicas know of the engines. Service levels are
those of the policy that is changed.
"""

import tomllib
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import BadRequestError
from tokenfleet.local.fleet import EngineGroup, Fleet
from tokenfleet.local.policy_change import PolicyChange, merged

POOL, BULK_POOL = "small-chat", "small-bulk"
NO_GATE = 1e6  # of the time per output token that is guarded
UNBOUNDED = 1_000_000

# Counters that are 250 ms old are good for forecasts over 1 s.
PACED = {"enabled": True, "window_s": 1.0}
NOT_STEERED = {"steer_weight": 0.0, "per_guarded_s": 0.0, "per_decode_s": 0.0, "per_prefill_s": 0.0}
BY_RANK = {
    "slomax": {"pacing": PACED, "gate": {"enabled": False}, "fair": {"floor_share": 0.0, "starved_after_s": 1e6}},
    "classes": {
        "chat": {"running_max_per_instance": 200, "kv_share_max": 0.97, "queue": NOT_STEERED},
        "long": {
            "running_max_per_instance": 6,
            "kv_share_max": 0.9,
            "queue": NOT_STEERED | {"role": "filling", "prefills_max": 2, "gate_share": NO_GATE},
        },
        "batch": {
            "running_max_per_instance": 24,
            "kv_share_max": 0.8,
            "queue": NOT_STEERED | {"gate_share": NO_GATE},
        },
    },
}
"""Queues by rank, first come first served inside a class, within bounds and without a forecast."""

IN_A_POOL_OF_THEIR_OWN = {
    "long": {"running_max_per_instance": UNBOUNDED, "queue": {"prefills_max": 0}},
    "batch": {"running_max_per_instance": UNBOUNDED},
}


class Design(Struct, frozen=True, kw_only=True):
    """`changes` of the policy; `halves`: chat has one half of the engines, long and batch the other."""

    changes: Mapping[str, Any]
    halves: bool = False


DESIGNS = {
    "slomax": Design(changes={"slomax": {"pacing": PACED}}),
    "least_requests": Design(
        changes={"products": {"slomax": False, "fleetmind": False}, "tokenpilot": {"rule": "least_requests"}}
    ),
    "priority": Design(changes=BY_RANK),
    "pools": Design(changes=BY_RANK, halves=True),
}


def design_of(name: str) -> Design:
    """Raises BadRequestError with the list of what exists."""
    if (design := DESIGNS.get(name)) is None:
        raise BadRequestError("--design", f"no design {name!r}; there is: {', '.join(DESIGNS)}")
    return design


def design_change(name: str) -> PolicyChange:
    """The design as a change of a policy. Raises BadRequestError as `design_of`."""
    design = design_of(name)
    return PolicyChange(reason=f"up --design {name}", of=lambda toml: _with_pools(merged(toml, design.changes), design))


def designed(fleet: Fleet, name: str) -> Fleet:
    """The fleet as the design has it. Raises BadRequestError as `design_of`."""
    if not design_of(name).halves:
        return fleet
    sites = {name: replace(site, engines=_halved(site.engines)) for name, site in fleet.sites.items()}
    return replace(fleet, sites=sites, load=replace(fleet.load, model_of={"long": BULK_POOL, "batch": BULK_POOL}))


def _halved(groups: tuple[EngineGroup, ...]) -> tuple[EngineGroup, ...]:
    """Half of each group as one of its own that serves the other pool."""
    halves: list[EngineGroup] = []
    for group in groups:
        half = group.count // 2
        halves += [
            replace(group, count=group.count - half),
            replace(group, count=half, name=f"{group.name}-bulk", model=BULK_POOL),
        ]
    return tuple(halves)


def _with_pools(toml: str, design: Design) -> str:
    """Two pools are two names of one model."""
    if not design.halves:
        return toml
    model = tomllib.loads(toml)["models"][POOL]
    return merged(toml, {"models": {BULK_POOL: model}, "classes": IN_A_POOL_OF_THEIR_OWN})
