"""TokenPilot: which instance of this site serves this request."""

from bisect import bisect_right
from random import Random

import numpy as np
import xxhash

from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.columns import Columns, Flags, Floats, Hashes, Slots
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.cost import Costs, weigh
from tokenfleet.core.tokenpilot.evidence import Chosen, refusal, routing_of
from tokenfleet.core.tokenpilot.filters import ask_of, hard, soften, trusted
from tokenfleet.core.tokenpilot.kernel import RATIO, WAIT, WORK
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.tokenpilot.rules import picked


def choose(
    request: Request,
    pool: PoolView,
    policy: Policy,
    *,
    request_class: str,
    output_q50: float,
    output_q90: float,
    rng: Random,
    network_s: float = 0.0,
    last_instance: str = "",
    ahead_s: Floats | None = None,
    held_s: float = 0.0,
    allowed: Flags | None = None,
    pace_s: Floats | None = None,
) -> Routing:
    """The instance with the least cost among those that may take the request, or a typed refusal.

    The output estimates are in tokens: q50 is the load that is priced, q90 the KV that is reserved. `network_s` is the
    way from the request's origin, the same for all instances. `last_instance` served the request's session before.
    `ahead_s` and `held_s` are the work of held requests: what goes first by slot, and all of it per instance.
    `allowed` are the instances that pacing has opened to its class (None: all), `pace_s` is what it adds to their cost.
    Equal inputs and an equally seeded `rng` give the equal routing. Raises UnknownModelError and KeyError for a model
    and a class that the policy lacks.
    """
    ask = ask_of(
        request,
        pool,
        policy,
        request_class=request_class,
        output_q90=output_q90,
        network_s=network_s,
        last_instance=last_instance,
    )
    columns, weights = pool.columns, policy.tokenpilot
    able, excluded = hard(columns, ask, allowed)
    if not len(columns) or (able is not None and not able.any()):
        return refusal(pool, excluded)
    costs = weigh(
        request.prompt_tokens,
        pool,
        weights,
        able,
        output_q50=output_q50,
        ahead_s=ahead_s,
        held_s=held_s,
        pace_s=pace_s,
    )
    left, removed, relaxed = soften(columns, costs, able, ask, blind=weights.rule != "cost")
    sure = trusted(columns)
    suspect_only = sure is not None and not (sure if able is None else sure & able).any()
    if suspect_only or not policy.products.tokenpilot:
        target, other = picked("power_of_two", columns, left, pool.turn, rng)
        chosen = Chosen(target, "suspect" if suspect_only else "off", other)
    elif weights.rule != "cost":
        target, other = picked(weights.rule, columns, left, pool.turn, rng)
        chosen = Chosen(target, weights.rule, other)
    else:
        last = columns.labels.slots.get(last_instance, -1) if last_instance else -1
        chosen = _cheapest(request, columns, costs, left, weights, rng=rng, last=last)
    return routing_of(
        chosen,
        columns,
        costs,
        able=able,
        removed=removed,
        excluded=excluded,
        relaxed=relaxed,
        weights=weights,
        prompt_tokens=request.prompt_tokens,
        ttft_max_s=ask.ttft_max_s,
        network_s=network_s,
        suspect_only=suspect_only,
    )


def _cheapest(
    request: Request,
    columns: Columns,
    costs: Costs,
    left: Flags | None,
    weights: TokenPilotPolicy,
    *,
    rng: Random,
    last: int,
) -> Chosen:
    """The least cost; its near-ties are one group, from which the prefix's home or a draw picks.

    `last` is the slot of the session's last instance, −1 without one.
    """
    cost_s = costs.cost_s
    best = next((slot for slot in costs.least if left is None or left[slot]), -1)
    if best < 0 and left is not None:
        best = int(np.where(left, cost_s, np.inf).argmin())
    least_s = cost_s.item(best)
    if last >= 0 and last != best and (left is None or left[last]):
        staying_s = cost_s.item(last)
        gain_min_s = max(weights.session_gain_min_s, weights.session_gain_min_share * staying_s)
        if staying_s - least_s <= gain_min_s:  # a session gains too little by moving
            return Chosen(last, "session")
    if last == best:
        return Chosen(best, "least_cost")
    near = _near(least_s + _tie_s(best, costs, weights), costs, left)
    if len(near) == 1:
        return Chosen(best, "least_cost")
    near = np.array(near)
    share = columns.fixed.share.take(near)
    if len(request.block_keys) >= KEY_BYTES and not _any_warm(near, columns):
        home = home_of(columns.labels.hashes[near], share, request.block_keys[:KEY_BYTES])
        return Chosen(near.item(home), "prefix_home", near_ties=len(near))
    upto = share.cumsum()
    upto = (upto / upto[-1]).tolist()
    place = min(bisect_right(upto, rng.random()), len(near) - 1)
    drawn = (upto[place - 1] if place else 0.0, upto[place])
    return Chosen(near.item(place), "near_tie", near_ties=len(near), drawn=drawn)


def _near(upto_s: float, costs: Costs, left: Flags | None) -> list[int] | Slots:
    """Those left that cost so much at most, in the order of their names."""
    cost_s, least = costs.cost_s, costs.least
    if costs.all_least or cost_s.item(least[-1]) > upto_s:
        near = [slot for slot in least if cost_s.item(slot) <= upto_s and (left is None or left[slot])]
        near.sort()
        return near
    near = (cost_s <= upto_s).nonzero()[0]
    return near if left is None else near[left.take(near)]


def home_of(names: Hashes, share: Floats, first_key: bytes) -> int:
    """Which of the instances with these hashes and operator's weights is the home of a prefix."""
    nearest: Floats = -np.log(_shares_of(names, first_key)) / share
    return int(nearest.argmin())


def _any_warm(near: Slots, columns: Columns) -> bool:
    return columns.hits is not None and bool(np.count_nonzero(columns.hits.take(near)))


def _tie_s(best: int, costs: Costs, weights: TokenPilotPolicy) -> float:
    """How far above the least a cost may lie and still be called equal: a share of the prediction's own spread."""
    terms = costs.terms
    spread_s = terms.item(RATIO, best) * (terms.item(WAIT, best) + terms.item(WORK, best))
    return min(max(weights.tie_min_s, weights.tie_margin_share * spread_s), max(weights.tie_min_s, weights.tie_max_s))


def _shares_of(names: Hashes, first_key: bytes) -> Floats:
    """A number in (0, 1) for each instance, as good as random and fixed by the prefix and the name.

    Weighted rendezvous: the least −log(u)/share wins, so the siblings of a burst meet on one instance while distinct
    prefixes spread. The mixing is splitmix64's.
    """
    x = names ^ np.uint64(xxhash.xxh3_64_intdigest(first_key))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53 + 2.0**-54
