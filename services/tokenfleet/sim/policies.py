"""Policies: the routers by name, as `sim run --policy` takes them."""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.baselines.blind import LeastRequests, LeastStale, PowerOfTwo, RandomChoice, RoundRobin
from tokenfleet.sim.baselines.dynamo import Dynamo, DynamoSettings
from tokenfleet.sim.baselines.llmd import Llmd, LlmdSettings
from tokenfleet.sim.baselines.sglang import Sglang, SglangSettings
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.router import Router, Setup

Settings = TypeVar("Settings", bound=msgspec.Struct)

POLICIES: dict[str, Callable[[Setup], Router]] = {
    "tokenpilot": Pilot,
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "power_of_two": PowerOfTwo,
    "least_requests": LeastRequests,
    "least_stale": LeastStale,
    "sglang": Sglang,
    "dynamo": Dynamo,
    "llmd": Llmd,
}


def policy_named(name: str) -> Callable[[Setup], Router]:
    """The router of that name, or of a variant such as `sglang:balance_abs=8,match_min=0.1`.

    Raises PolicyError for an unknown policy, setting or value, with what there is.
    """
    base, _, changes = name.partition(":")
    if base not in POLICIES:
        raise PolicyError(f"no policy {base!r}; there is: {listed(POLICIES)}")
    if not changes:
        return POLICIES[base]
    variant = _VARIANTS.get(base)
    if variant is None:
        raise PolicyError(f"policy {name!r}: {base} has no settings; these have: {listed(_VARIANTS)}")
    settings: dict[str, str] = {}
    for change in changes.split(","):
        setting, _, value = change.partition("=")
        settings[setting.strip()] = value.strip()
    return variant(name, settings)


def _sglang(name: str, settings: dict[str, str]) -> Callable[[Setup], Router]:
    return partial(Sglang, settings=_settings(name, settings, SglangSettings))


def _dynamo(name: str, settings: dict[str, str]) -> Callable[[Setup], Router]:
    return partial(Dynamo, settings=_settings(name, settings, DynamoSettings))


def _llmd(name: str, settings: dict[str, str]) -> Callable[[Setup], Router]:
    return partial(Llmd, settings=_settings(name, settings, LlmdSettings))


_VARIANTS = {"sglang": _sglang, "dynamo": _dynamo, "llmd": _llmd}


def _settings(name: str, settings: dict[str, str], kind: type[Settings]) -> Settings:
    if unknown := sorted(set(settings) - set(kind.__struct_fields__)):
        raise PolicyError(f"policy {name!r}: no setting {unknown[0]!r}; there is: {listed(kind.__struct_fields__)}")
    try:
        given = msgspec.convert(settings, kind, strict=False)
    except msgspec.ValidationError as error:
        raise PolicyError(f"policy {name!r}: {error}") from error
    for setting, value in msgspec.structs.asdict(given).items():
        if not -math.inf < value < math.inf:
            raise PolicyError(f"policy {name!r}: {setting} is {value}; it is a finite number")
    return given
