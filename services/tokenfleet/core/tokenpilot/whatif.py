"""What if: the choice on the present table, and on the same table with some things otherwise. Nothing is placed.

What is predicted of the waiting stays as it is: the backlogs come from work that is placed already.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.accounts import Coefficients, PoolCalibration
from tokenfleet.core.asked import chance_of, estimated
from tokenfleet.core.columns import columns_of
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import BadRequestError, listed
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.pool_table import p_hit
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.classify import classify
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.view import InstanceView

ADDED_MAX = 1_000  # instances of one question
COEFFICIENTS = ("c0_s", "w_min_s", "a_s", "b_s", "d_s")
CHANCES = ("p_hit", "p_hit_dispatch", "p_hit_approx")
FACTORS = (*COEFFICIENTS, "bias_s", "margin_idle", "margin_queued", *CHANCES)


class Added(Struct, frozen=True, kw_only=True):
    """`count` idle and cold instances of the make of `like`; their names are its name with +1, +2, …"""

    like: str
    count: int = 1


class Changes(Struct, frozen=True, kw_only=True):
    """What would be otherwise: weights of TokenPilot by name, instances without new work, gone, or added, and factors
    on what was learned of the pool, by name in FACTORS."""

    weights: dict[str, float] = {}
    drained: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    added: tuple[Added, ...] = ()
    calibration: dict[str, float] = {}


class WhatIf(Struct, frozen=True, kw_only=True):
    """Both choices; `changes` says how the changes were understood, `tables` names what both rest on."""

    pool: str
    present: Routing
    changed: Routing
    changes: tuple[str, ...]
    tables: dict[str, str]
    age_s: float | None
    policy_revision: int
    calibration_revision: int


def what_if(site: Site, request: Request, changes: Changes, *, now_s: float) -> WhatIf:
    """Which instance of `site` the request would get now, and under `changes`; both draw the same chance.

    The way from another origin is left out: it is the same for all. Raises BadRequestError for a weight, factor or
    instance that there isn't, with the list of those there are, UnknownModelError and UnknownTenantError.
    """
    site.policy.model(request.model)
    site.policy.tenant(request.tenant)
    request, q50, q90 = estimated(request, site.policy, site.outputs)
    here = site.pool(request.model, now_s, request)
    classified = classify(request, here, site.policy, output_q90_tokens=q90)
    present, _, _ = altered(here, site.policy, Changes())  # made the same way: equal to the last digit
    pool, policy, told = altered(here, site.policy, changes)

    def routing(pool: PoolView, policy: Policy) -> Routing:
        return choose(
            request,
            pool,
            policy,
            request_class=classified.request_class,
            output_q50=q50,
            output_q90=q90,
            rng=chance_of(request.id, request.attempt, request.hop),
            last_instance=site.sessions.last(request.tenant, request.session),
        )

    return WhatIf(
        pool=pool.pool,
        present=routing(present, site.policy),
        changed=routing(pool, policy),
        changes=told,
        tables=site.versions(),
        age_s=pool.age_s,
        policy_revision=site.policy.revision,
        calibration_revision=site.calibration_revision,
    )


def altered(pool: PoolView, policy: Policy, changes: Changes) -> tuple[PoolView, Policy, tuple[str, ...]]:
    """The pool and the policy under `changes`, and the changes in words, a line each."""
    told: list[str] = []
    weights = _weighed(policy.tokenpilot, changes.weights, told)
    calibration = _calibrated(pool.calibration, changes.calibration, told)
    instances = _peopled(pool.instances, changes, told)
    if calibration is not pool.calibration:
        instances = [replace(each, p_hit=p_hit(calibration, each.kv_state)) for each in instances]
    other = replace(pool, columns=columns_of(instances), calibration=calibration)
    return other, replace(policy, tokenpilot=weights), tuple(told)


def _weighed(weights: TokenPilotPolicy, changed: Mapping[str, float], told: list[str]) -> TokenPilotPolicy:
    before: dict[str, float] = {
        name: value for name, value in msgspec.to_builtins(weights).items() if isinstance(value, int | float)
    }
    for name, value in changed.items():
        if name not in before:
            raise BadRequestError("weights", f"no weight {name[:40]!r}; there is: {listed(before)}")
        if not math.isfinite(value):
            raise BadRequestError("weights", f"{name} can't be {value:g}: it is no number")
        number = int(value) if isinstance(before[name], int) and value.is_integer() else value
        try:
            weights = msgspec.convert(msgspec.to_builtins(weights) | {name: number}, TokenPilotPolicy)
        except msgspec.ValidationError as error:
            raise BadRequestError("weights", f"{name} can't be {value:g}: {error}") from error
        told.append(f"{name} {before[name]:g} → {value:g}")
    return weights


def _calibrated(before: PoolCalibration, factors: Mapping[str, float], told: list[str]) -> PoolCalibration:
    known: dict[str, float] = {name: getattr(before.coefficients, name) for name in COEFFICIENTS}
    known |= {name: getattr(before, name) for name in FACTORS if name not in COEFFICIENTS}
    after: dict[str, float] = {}
    for name, factor in factors.items():
        if name not in known:
            raise BadRequestError("calibration", f"nothing learned is named {name[:40]!r}; there is: {listed(known)}")
        if not 0.0 <= factor < math.inf:
            raise BadRequestError("calibration", f"{name}: {factor:g} is not a factor from 0 on")
        value = known[name] * factor
        after[name] = min(value, 1.0) if name in CHANCES else value
        told.append(f"{name} {known[name]:.3g} → {after[name]:.3g}")
    if not after:
        return before
    coefficients: Coefficients = replace(
        before.coefficients, **{name: value for name, value in after.items() if name in COEFFICIENTS}
    )
    others = {name: value for name, value in after.items() if name not in COEFFICIENTS}
    return replace(before, coefficients=coefficients, **others)


def _peopled(instances: Sequence[InstanceView], changes: Changes, told: list[str]) -> list[InstanceView]:
    """The instances that there would be."""
    known = {each.instance: each for each in instances}
    _refuse_unknown("drained", changes.drained, known)
    _refuse_unknown("removed", changes.removed, known)
    _refuse_unknown("added", (added.like for added in changes.added), known)
    if (total := sum(added.count for added in changes.added)) > ADDED_MAX:
        raise BadRequestError("added", f"{total:,} instances, at most {ADDED_MAX:,} are tried")
    there = [
        replace(each, availability="draining", availability_reason="if drained") if name in changes.drained else each
        for name, each in known.items()
        if name not in changes.removed
    ]
    for verb in ("drained", "removed"):
        if names := getattr(changes, verb):
            told.append(f"{verb}: {', '.join(names)}")
    for added in changes.added:
        there += [_like(known[added.like], f"{added.like}+{n}") for n in range(1, added.count + 1)]
        told.append(f"added: {added.count} like {added.like}")
    return there


def _refuse_unknown(field: str, names: Iterable[str], known: Mapping[str, InstanceView]) -> None:
    for name in names:
        if name not in known:
            raise BadRequestError(field, f"no instance {name[:40]!r} serves this model here; there is: {listed(known)}")


def _like(made: InstanceView, name: str) -> InstanceView:
    """An idle, cold and healthy instance of the same make."""
    return InstanceView(
        instance=name,
        address="",
        model=made.model,
        model_digest=made.model_digest,
        engine=made.engine,
        context_max_tokens=made.context_max_tokens,
        kv_total_tokens=made.kv_total_tokens,
        kv_state=made.kv_state,
        p_hit=made.p_hit,
    )
