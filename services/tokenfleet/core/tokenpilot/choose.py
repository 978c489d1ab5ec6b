"""TokenPilot: which instance of this site serves this request."""

import math
from collections.abc import Sequence
from heapq import nsmallest
from random import Random

import xxhash
from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.records import PlacedOn
from tokenfleet.core.tokenpilot.cost import operator_share, scale_of, spread_s, weigh
from tokenfleet.core.tokenpilot.explain import deciding_term, refusal_sentence, sentence_of
from tokenfleet.core.tokenpilot.filters import Weighed, ask_of, count, refusal_of, removed_by, soften, trusted
from tokenfleet.core.tokenpilot.known import known
from tokenfleet.core.tokenpilot.routing import How, Routing
from tokenfleet.core.view import InstanceView, PoolView

KEY_BYTES = 8  # one block key: a little-endian u64


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
) -> Routing:
    """The instance with the least cost among those that may take the request, or a typed refusal.

    The output estimates are in tokens: q50 is the load that is priced, q90 the KV that is reserved. `network_s` is the
    way from the request's origin, the same for all instances. `last_instance` served the request's session before.
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
    removals = [(instance, removed_by(instance, ask)) for instance in pool.instances]
    able = [instance for instance, name in removals if not name]
    excluded = count(name for _, name in removals if name)
    if not able:
        return _refusal(pool, excluded)

    scale = scale_of(request, pool, policy, able, output_q50=output_q50)
    weighed = [(instance, weigh(instance, scale)) for instance in able]
    left, removed, relaxed = soften(weighed, ask)
    suspect_only = not any(trusted(instance) for instance in able)
    if suspect_only or not policy.products.tokenpilot:
        how: How = "suspect" if suspect_only else "off"
        target, runner_up = less_loaded_of_two(left, rng)
    else:
        target, how = _cheapest(left, request, pool, policy.tokenpilot, rng=rng, last_instance=last_instance)
        runner_up = min((pair for pair in left if pair is not target), key=_rank, default=None)
    return _routing(
        target,
        runner_up,
        how=how,
        weighed=weighed,
        kept=policy.tokenpilot.candidates_kept,
        considered=len(pool.instances),
        excluded=excluded | count(removed.values()),
        removed=removed,
        ttft_max_s=ask.ttft_max_s,
        relaxed=relaxed,
        network_s=network_s,
        suspect_only=suspect_only,
    )


def less_loaded_of_two(pairs: Sequence[Weighed], rng: Random) -> tuple[Weighed, Weighed | None]:
    """Power of two choices on what the ledger counts, the one load that silence can't falsify; and the other drawn.

    Two of equal load are as likely.
    """
    if len(pairs) == 1:
        return pairs[0], None
    one, other = rng.sample(pairs, 2)
    return (one, other) if _open(one[0]) <= _open(other[0]) else (other, one)


def _cheapest(
    pairs: Sequence[Weighed],
    request: Request,
    pool: PoolView,
    weights: TokenPilotPolicy,
    *,
    rng: Random,
    last_instance: str,
) -> tuple[Weighed, How]:
    """The least cost; its near-ties are one group, from which the prefix's home or a draw picks."""
    best = min(pairs, key=_rank)
    last = next((pair for pair in pairs if pair[0].instance == last_instance), None)
    if last is not None and last is not best and not _worth_leaving(last, best, weights):
        return last, "session"
    if last is best:
        return best, "least_cost"
    limit_s = best[1].cost_s + _tie_s(best, pool, weights)
    near = [pair for pair in pairs if pair[1].cost_s <= limit_s]
    if len(near) == 1:
        return best, "least_cost"
    if len(request.block_keys) >= KEY_BYTES and not any(candidate.hit_tokens for _, candidate in near):
        return _home(near, request.block_keys[:KEY_BYTES]), "prefix_home"
    return rng.choices(near, weights=[operator_share(instance) for instance, _ in near])[0], "near_tie"


def _tie_s(best: Weighed, pool: PoolView, weights: TokenPilotPolicy) -> float:
    """How far above the least a cost may lie and still be called equal: a share of the prediction's own spread."""
    instance, candidate = best
    spread = spread_s(candidate.wait_s + candidate.work_s, instance, pool.calibration)
    return min(max(weights.tie_min_s, weights.tie_margin_share * spread), max(weights.tie_min_s, weights.tie_max_s))


def _worth_leaving(last: Weighed, best: Weighed, weights: TokenPilotPolicy) -> bool:
    """Whether a session gains enough by moving: more than the minimum and the share of what staying costs."""
    staying_s = last[1].cost_s
    gain_s = staying_s - best[1].cost_s
    return gain_s > max(weights.session_gain_min_s, weights.session_gain_min_share * staying_s)


def _home(pairs: Sequence[Weighed], first_key: bytes) -> Weighed:
    """Weighted rendezvous: the siblings of a burst meet on one instance while distinct prefixes spread."""

    def score(pair: Weighed) -> float:
        digest = xxhash.xxh3_64_intdigest(first_key + pair[0].instance.encode())
        return -operator_share(pair[0]) / math.log((digest + 1) / (2**64 + 2))

    return max(pairs, key=score)


def _open(instance: InstanceView) -> float:
    return instance.queued + instance.decoding + (known(instance.foreign) or 0.0)


def _rank(pair: Weighed) -> tuple[float, str]:
    # The name only orders the evidence of equal costs; near-ties are drawn, never taken in this order.
    return pair[1].cost_s, pair[0].instance


def _refusal(pool: PoolView, excluded: dict[str, int]) -> Routing:
    reason = refusal_of(excluded)
    said = refusal_sentence(pool.pool, reason, len(pool.instances), excluded)
    return Routing(reason=reason, detail=said, sentence=said, considered=len(pool.instances), excluded=excluded)


def _routing(
    target: Weighed,
    runner_up: Weighed | None,
    *,
    how: How,
    weighed: Sequence[Weighed],
    kept: int,
    considered: int,
    excluded: dict[str, int],
    removed: dict[str, str],
    ttft_max_s: float | None,
    relaxed: tuple[str, ...],
    network_s: float,
    suspect_only: bool,
) -> Routing:
    instance, chosen = target
    second = runner_up[1] if runner_up else None
    others = [candidate for _, candidate in nsmallest(kept, weighed, key=_rank) if candidate is not chosen]
    deciding = deciding_term(chosen, second) if second and how == "least_cost" else ""
    return Routing(
        target=instance.instance,
        address=instance.address,
        how=how,
        candidates=tuple(
            replace(each, filtered=removed.get(each.instance, "")) for each in (chosen, *others[: kept - 1])
        ),
        considered=considered,
        excluded=excluded,
        relaxed=relaxed,
        runner_up=second.instance if second else "",
        gap_s=second.cost_s - chosen.cost_s if second else None,
        deciding=deciding,
        predicted_ttft_s=network_s + chosen.ttft_s,
        suspect_only=suspect_only,
        placed=PlacedOn(
            hit_tokens=chosen.hit_tokens,
            uncached_tokens=chosen.uncached_tokens,
            queued=instance.queued,
            decoding=instance.decoding,
            context_tokens=known(instance.context_tokens) or 0.0,
            wait_s=chosen.wait_s,
            work_s=chosen.work_s,
            bias_s=chosen.bias_s,
            kv_state=instance.kv_state,
        ),
        sentence=sentence_of(
            chosen,
            second,
            how=how,
            network_s=network_s,
            deciding=deciding,
            removed=removed,
            relaxed=relaxed,
            ttft_max_s=ttft_max_s,
        ),
    )
