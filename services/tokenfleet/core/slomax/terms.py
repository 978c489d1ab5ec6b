"""Terms: the tables of the policy file that say how SLOMax queues, paces and shares a pool out; all first values."""

from collections.abc import Collection
from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenfleet.core.ranges import NonNegative, Positive, Share


class ClassQueue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests of a class wait at the control plane and when one goes to an instance (core/slomax/pacing.py).

    `role`: a `guarded` class is protected, its time per output token is what forecasts guard; a `reserving` one has
    large prefills, for which gaps are kept free; a `filling` one takes what the others leave. `backlog_max_s` bounds
    the work before the instance's next free moment, `prefills_max` the class's requests there that have no first
    token yet (0: any number). `gate_share`: the forecast may reach this share of the guarded time per output token.
    `steer_weight` · the forecast above `steer_from_share` of it is added to an instance's cost in seconds, and so are
    `per_guarded_s`, `per_decode_s` and `per_prefill_s` for each guarded request, each decode and each reserving prefill
    there.
    """

    role: Literal["guarded", "reserving", "filling"] = "guarded"
    backlog_max_s: Positive = 0.6
    prefills_max: Annotated[int, Meta(ge=0)] = 0
    gate_share: NonNegative = 1.0
    steer_weight: NonNegative = 8.0
    steer_from_share: NonNegative = 0.0
    per_guarded_s: NonNegative = 0.0
    per_decode_s: NonNegative = 0.0
    per_prefill_s: NonNegative = 0.0


class PacingPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When classes share a pool: how far ahead forecasts look, what is kept free, and what a reserving class may cost
    the guarded one (core/slomax/pacing.py).

    Forecasts rest on the iterations of the last `window_s`. The allowance, a share of the guarded time per output
    token, starts at `allowance_start`; each `allowance_period_s` it is cut to `allowance_cut` of itself where the
    guarded class's attainment over `allowance_window_s` is below `attainment_low`, and raised by `allowance_step` above
    `attainment_high`. It turns round at most once in `allowance_turn_s`, and moves less after each turn. It counts in
    full when the reserving request must start now, and not before `allowance_slack_s`. `reserve_share` of the instances
    at most are kept from filling work for waiting reserving requests, while the earliest filling one has
    `reserve_slack_s` left; guarded ones pay `reserved_price_s` there. `ageing`: a reserving request that waits for so
    many seconds goes before one with a second less work. `planned_max` are looked at at a time, `waiting_max` wait for
    a pool at all. Of the backlog that is seen as much is over already as news of first tokens are late; `late_max_s` at
    most is taken off.
    """

    enabled: bool = False
    window_s: Positive = 0.6
    allowance_start: Share = 0.03
    allowance_min: Share = 0.01
    allowance_max: Share = 0.4
    allowance_cut: Share = 0.7
    allowance_step: Share = 0.06
    allowance_period_s: Positive = 15.0
    allowance_window_s: Positive = 15.0
    allowance_turn_s: NonNegative = 60.0
    allowance_slack_s: Positive = 5.0
    attainment_low: Share = 0.98
    attainment_high: Share = 0.99
    reserve_share: Share = 0.5
    reserve_slack_s: NonNegative = 60.0
    reserved_price_s: NonNegative = 0.3
    ageing: Positive = 5.0
    planned_max: Annotated[int, Meta(ge=1)] = 40
    waiting_max: Annotated[int, Meta(ge=1)] = 10_000
    late_max_s: NonNegative = 0.25


class FairPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between tenants of a class (core/slomax/fair.py), and the least that a class gets (core/slomax/floor.py).

    A tenant is at most `credit_max_s` of weighted GPU time ahead of where a newcomer joins, however much it waited or
    got back. A class that waits gets 5 % of the GPU seconds given out or waits no longer than 30 s: `floor_share` and
    `starved_after_s`, after which it goes first, are a little stricter, since requests come in whole ones. Who used
    more than `flood_factor` times its share over about `usage_window_s`, and `flood_min_s` GPU seconds beyond it, gets
    what is beyond its share only as filling work (core/slomax/usage.py), at a gate of at most `flood_gate_share`.
    """

    credit_max_s: NonNegative = 10.0
    floor_share: Share = 0.055
    starved_after_s: Positive = 10.0
    usage_window_s: Positive = 60.0
    flood_factor: Annotated[float, Meta(ge=1.0)] = 4.0
    flood_min_s: NonNegative = 20.0
    flood_gate_share: Share = 0.86


class GatePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request is refused because it would be late (core/slomax/feasible.py).

    `enabled`: it is asked at all; else only a deadline that can't be met refuses. A request passes from a chance of
    `pass_chance` on, is refused below `reject_chance`, and queues between. `probe_share` of those to be refused run all
    the same; when more than `false_rejects_max` of `probes_min` or more were in time, the gate only queues, for
    `again_after_s` or longer, until no more than `again_share` of what it would refuse is.
    """

    enabled: bool = True
    pass_chance: Share = 0.5
    reject_chance: Share = 0.2
    probe_share: Share = 0.02
    probes_min: Annotated[int, Meta(ge=1)] = 50
    false_rejects_max: Share = 0.1
    again_share: Share = 0.05
    again_after_s: NonNegative = 600.0


class ReservePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a pool is kept free for interactive work (core/slomax/reserve.py): between two shares of it.

    Work that is predicted to end within `borrow_max_s` may borrow it.
    """

    enabled: bool = True
    share_min: Share = 0.1
    share_max: Share = 0.5
    borrow_max_s: NonNegative = 10.0


class ClassShare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class's part of a pool, of its KV tokens and GPU seconds: `share` to start with and when the controller is off,
    never outside of [`floor`, `ceiling`]; `target` is the attainment that the controller holds it to.

    What of its share a class does not use is lent to others, but for its floor (core/slomax/lending.py).
    """

    share: Share
    floor: Share = 0.05
    ceiling: Share = 0.9
    target: Share = 0.98


class Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The shares of the classes, which add up to 1, and the admission ceiling: the use that is admitted to."""

    shares: dict[str, Share]
    ceiling: Share


class ControllerPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How shares and admission ceiling of a pool follow what was delivered (core/slomax/controller.py).

    `enabled` is the kill switch: off means the static shares and ceiling. `classes` empty: nothing is shared out.
    `pools` is what the controller has made of them, pool by pool; it writes that part of the file. One
    step moves a share by clip(`gain` · e + `gain_sum` · Σe, ± `step_max`), e being target − attainment beyond
    `dead_band`. `drift_max`: outcomes may take so many times their prediction, or the inverse. A step that was
    reverted is not followed by another for `reverted_hold_s` while as much is offered to each class, give or take
    `load_tolerance` of all.

    `slots`: the pool is shared out in so many, of which one changes hands at a time; 0: in any parts. Slots follow
    what is offered, before anybody misses: the work of the last `offered_s`, and what waits as if it were to be worked
    off in `backlog_s`. One changes hands when shares are off by `slot_hold` more than half of one, and somebody needs
    more than `slot_full` of what it has or misses its target.
    """

    enabled: bool = False
    classes: dict[str, ClassShare] = {}
    pools: dict[str, Setting] = {}
    slots: Annotated[int, Meta(ge=0)] = 0
    slot_hold: Share = 0.3
    slot_full: Share = 0.6
    offered_s: Positive = 20.0
    backlog_s: Positive = 30.0
    gain: NonNegative = 0.2
    gain_sum: NonNegative = 0.02
    step_max: Share = 0.03
    dead_band: Share = 0.02
    smoothing: Share = 0.3
    outcomes_min: Annotated[int, Meta(ge=1)] = 50
    half_width_max: Share = 0.05
    ceiling: Share = 0.95
    ceiling_min: Share = 0.5
    ceiling_max: Share = 0.95
    ceiling_cut: Share = 0.9
    ceiling_step: Share = 0.01
    waste_max: Share = 0.05
    reversal_period_s: NonNegative = 60.0
    drift_max: Positive = 1.5
    throughput_min: Share = 0.95
    throughput_windows: Annotated[int, Meta(ge=1)] = 3
    baseline_s: Positive = 600.0
    load_tolerance: Share = 0.1
    reverted_hold_s: NonNegative = 300.0

    def setting(self, pool: str) -> Setting:
        """How the pool is shared out now."""
        moved = self.pools.get(pool) if self.enabled else None
        return self.static() if moved is None or moved.shares.keys() != self.classes.keys() else moved

    def static(self) -> Setting:
        """The policy's own setting, of every pool that the controller has not moved."""
        return Setting(shares={name: each.share for name, each in self.classes.items()}, ceiling=self.ceiling)


class RetryPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When refused requests may come again, and how often (core/slomax/retry.py).

    A return ticket keeps the place in line for `return_within_s` after its time. A tenant's retry budget grows by
    `budget_per_request` with each fresh request, up to `budget_max`, and pays 1 for each retry.
    """

    return_within_s: NonNegative = 10.0
    budget_per_request: NonNegative = 0.1
    budget_max: NonNegative = 100.0


class ShardPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a site's replicas share one book a pool and one a tenant's quota (core/shard), each with one owner.

    A pool's book holds `slomax.controller.ceiling` of the KV of its ready instances. A replica asks for `lease_share`
    of it that nobody has asked it for yet, or twice what it was lately asked; what a killed one holds is lost for 30 s.
    """

    enabled: bool = False
    lease_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.1


class BatchPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether batch work with a far deadline waits by tickets in PostgreSQL (core/slomax/tickets.py, grants.py).

    `enabled`: a batch request whose gateway does not hold it, with `deadline_min_s` or more left, is deferred with a
    token. It is to come again after half of its likely wait, between `poll_min_s` and `poll_max_s`. A grant that is not
    used within `grant_s` goes back to wait. `ahead_share` of the requests that may run are granted before there is room
    for them, since gateways take a while to come. `page_max` tickets are looked at at a time. The drain rate is that of
    the last `rate_window_s`; what has ended is kept for `kept_s`.
    """

    enabled: bool = False
    deadline_min_s: Positive = 600.0
    poll_min_s: Positive = 1.0
    poll_max_s: Positive = 300.0
    grant_s: Positive = 60.0
    ahead_share: Share = 0.5
    page_max: Annotated[int, Meta(ge=1, le=10_000)] = 500
    rate_window_s: Positive = 300.0
    kept_s: Positive = 604_800.0


def share_problems(terms: ControllerPolicy, classes: Collection[str]) -> list[str]:
    """What can't be in a controller's table of shares: unknown classes, and bounds that no shares could keep."""
    shares = terms.classes
    problems = [f"slomax.controller.classes: no class {name!r}" for name in shares if name not in classes]
    problems += [
        f"slomax.controller.classes.{name}: the share is not between its floor and its ceiling"
        for name, each in shares.items()
        if not each.floor <= each.share <= each.ceiling
    ]
    if shares and abs(sum(each.share for each in shares.values()) - 1.0) > 1e-6:
        problems.append("slomax.controller.classes: the shares don't add up to 1")
    problems += [
        f"slomax.controller.pools.{pool}: the shares don't add up to 1"
        for pool, each in terms.pools.items()
        if each.shares and abs(sum(each.shares.values()) - 1.0) > 1e-6
    ]
    if not terms.ceiling_min <= terms.ceiling <= terms.ceiling_max:
        problems.append("slomax.controller: the ceiling is not between its least and its greatest")
    return problems
