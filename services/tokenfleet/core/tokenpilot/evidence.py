"""Evidence: the routing as a value, with the terms of the best candidates; made after the choice, of a few."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tokenfleet.core.columns import KV_STATES, Columns, Flags, Floats, Slots
from tokenfleet.core.decision import Candidate, How
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import uncached_tokens
from tokenfleet.core.records import PlacedOn
from tokenfleet.core.tokenpilot.cost import Costs
from tokenfleet.core.tokenpilot.explain import deciding_term, refusal_sentence, sentence_of
from tokenfleet.core.tokenpilot.filters import refusal_of
from tokenfleet.core.tokenpilot.routing import Routing


class Chosen(Struct, frozen=True):
    """The slot of the target and how it was found; `other` is the second drawn, −1 for the cheapest that is left.

    `near_ties` counts those that were as good, itself included; `drawn` is its part of the draw among them.
    """

    slot: int
    how: How
    other: int = -1
    near_ties: int = 0
    drawn: tuple[float, float] | None = None


def routing_of(
    chosen: Chosen,
    columns: Columns,
    costs: Costs,
    *,
    able: Flags | None,
    removed: Mapping[str, Flags],
    excluded: dict[str, int],
    relaxed: tuple[str, ...],
    weights: TokenPilotPolicy,
    prompt_tokens: int,
    ttft_max_s: float | None,
    network_s: float,
    suspect_only: bool,
) -> Routing:
    """`able` passed the hard filters (None: all); `removed` are those of them that each soft filter took out."""
    cost_s = costs.cost_s if able is None else np.where(able, costs.cost_s, np.inf)
    least = _least(cost_s, weights.candidates_kept + 1)
    if able is not None:
        least = [slot for slot in least if able[slot]]
    second = chosen.other if chosen.other >= 0 else _runner_up(chosen, least, cost_s, removed)
    others = [slot for slot in least if slot != chosen.slot][: weights.candidates_kept - 1]
    kept = [chosen.slot, *others]
    told = [*kept, second] if second >= 0 and second not in kept else kept
    by_slot = dict(zip(told, _candidates(told, columns, costs, removed, weights, prompt_tokens), strict=True))
    target, runner_up = by_slot[chosen.slot], by_slot.get(second)
    deciding = deciding_term(target, runner_up) if runner_up and chosen.how == "least_cost" else ""
    named = {c.instance: c.filtered for c in by_slot.values() if c.filtered} if runner_up is None else {}
    return Routing(
        target=target.instance,
        address=columns.labels.addresses[chosen.slot],
        how=chosen.how,
        near_ties=chosen.near_ties,
        drawn=chosen.drawn,
        candidates=tuple([by_slot[slot] for slot in kept]),
        considered=len(columns),
        excluded=excluded | {name: int(np.count_nonzero(flags)) for name, flags in removed.items()},
        relaxed=relaxed,
        runner_up=runner_up.instance if runner_up else "",
        gap_s=runner_up.cost_s - target.cost_s if runner_up else None,
        deciding=deciding,
        predicted_ttft_s=network_s + target.ttft_s,
        suspect_only=suspect_only,
        placed=_placed_on(chosen.slot, target, columns),
        sentence=sentence_of(
            target,
            runner_up,
            how=chosen.how,
            network_s=network_s,
            deciding=deciding,
            removed=named,
            relaxed=relaxed,
            ttft_max_s=ttft_max_s,
        ),
    )


def refusal(pool: PoolView, excluded: dict[str, int]) -> Routing:
    """Why no instance may serve the request."""
    reason = refusal_of(excluded)
    said = refusal_sentence(pool.pool, reason, len(pool.columns), excluded)
    return Routing(reason=reason, detail=said, sentence=said, considered=len(pool.columns), excluded=excluded)


RUN = 64  # slots, evenly apart, whose least tells first where the least of all are
IN_RUN = np.arange(RUN)[:, None]


def _least(cost_s: Floats, most: int) -> list[int]:
    """The slots of the `most` least costs, least first; equal costs in the order of their names."""
    runs = len(cost_s) // RUN
    if runs > 2 * most:
        least = np.minimum.reduce(cost_s[: runs * RUN].reshape(RUN, runs), axis=0)
        near = least.argpartition(most)[:most]  # each holds one of the least, so no other run does
        slots = (near + IN_RUN * runs).ravel()
        slots = np.concatenate([slots, np.arange(runs * RUN, len(cost_s))])
        slots = slots.take(cost_s.take(slots).argpartition(most)[:most])
    elif len(cost_s) > most:
        slots = cost_s.argpartition(most)[:most]
    else:
        slots = np.arange(len(cost_s))
    slots.sort()
    return slots.take(cost_s.take(slots).argsort(kind="stable")).tolist()


def _runner_up(
    chosen: Chosen,
    least: list[int],
    cost_s: Floats,
    removed: Mapping[str, Flags],
) -> int:
    """The cheapest but the target that no filter removed, −1 without one."""
    for slot in least:
        if slot != chosen.slot and not any(flags[slot] for flags in removed.values()):
            return slot
    if not removed:
        return -1
    left_s = cost_s.copy()
    for flags in removed.values():
        left_s[flags] = np.inf
    left_s[chosen.slot] = np.inf
    slot = int(left_s.argmin())
    return slot if left_s[slot] < np.inf else -1


def _candidates(
    slots: list[int],
    columns: Columns,
    costs: Costs,
    removed: Mapping[str, Flags],
    weights: TokenPilotPolicy,
    prompt_tokens: int,
) -> list[Candidate]:
    at = np.array(slots)
    now_s, names = columns.now_s, columns.labels.names
    computed_min = uncached_tokens(prompt_tokens, prompt_tokens)
    told: list[Candidate] = []
    for (
        name, (cost_s, ttft_s, wait_s, work_s, saved_s, ratio, kv_s, kv_use), decoding, born_s, cached, p_hit,
        bias_s, surcharge, suspect, sized, pace_s, filtered,
    ) in zip(
        [names[slot] for slot in slots],
        costs.terms.take(at, axis=1).T.tolist(),
        columns.decoding.take(at).tolist(),
        columns.born_s.take(at).tolist(),
        _each(columns.hits, at),
        columns.p_hit.take(at).tolist(),
        _each(costs.bias_s, at),
        _each(columns.fixed.surcharge, at),
        _each(columns.suspect, at),
        _sized(at, columns),
        _each(costs.pace_s, at),
        _removers(at, removed),
        strict=True,
    ):  # fmt: skip
        hit = min(int(cached), prompt_tokens)
        age_s = max(now_s - born_s, 0.0) if born_s == born_s else None
        told.append(
            Candidate(  # by place: a call that names so many fields takes five times as long
                name,
                cost_s,
                ttft_s,
                wait_s,
                work_s,
                bias_s,
                weights.margin_weight * ratio * (wait_s + work_s),
                costs.reuse_price * work_s,
                kv_s,
                weights.decode_price_s * decoding,
                surcharge * ttft_s,
                hit,
                max(prompt_tokens - hit, computed_min),
                p_hit if hit else 0.0,
                saved_s,
                age_s,
                bool(suspect) or age_s is None,
                kv_use if sized else None,
                filtered,
                pace_s,
            )
        )
    return told


def _sized(at: Slots, columns: Columns) -> list[bool]:
    """Whether both what is held and what there is are known, of each slot."""
    if columns.whole:
        return [True] * len(at)
    return (~np.isnan(columns.kv_held.take(at) + columns.fixed.kv_total.take(at))).tolist()


def _removers(at: Slots, removed: Mapping[str, Flags]) -> list[str]:
    """The first filter that removed each slot, empty for none."""
    names = [""] * len(at)
    for name, flags in removed.items():
        names = [first or name * fails for first, fails in zip(names, flags.take(at).tolist(), strict=True)]
    return names


def _each(values: NDArray[Any] | float | None, at: Slots) -> list[Any]:
    """The value of each slot: its own, or one that is all's; 0 where there are none."""
    if isinstance(values, np.ndarray):
        return values.take(at).tolist()
    return [values or 0.0] * len(at)


def _placed_on(slot: int, target: Candidate, columns: Columns) -> PlacedOn:
    """What was believed of the target, for the outcome to carry."""
    return PlacedOn(
        hit_tokens=target.hit_tokens,
        uncached_tokens=target.uncached_tokens,
        queued=int(columns.queued[slot]),
        decoding=int(columns.decoding[slot]),
        context_tokens=_told(float(columns.context_tokens[slot])) or 0.0,
        wait_s=target.wait_s,
        work_s=target.work_s,
        bias_s=target.bias_s,
        kv_state=KV_STATES[int(columns.kv_state[slot])],
    )


def _told(value: float) -> float | None:
    return value if value == value else None
