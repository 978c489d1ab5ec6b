"""Policies: the routers by name, as `sim run --policy` takes them."""

from collections.abc import Callable

from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.router import Router, Setup

POLICIES: dict[str, Callable[[Setup], Router]] = {
    "tokenpilot": Pilot,
}
