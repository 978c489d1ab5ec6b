"""Replay: does a recorded decision still follow from its own evidence, and would other weights have chosen otherwise?

A decision keeps the terms of its best candidates, the counts of the filters and the seed of its chance. What these
leave open (the home among ties that were not kept, the drawn loads of suspects) is said to be unknown, not the same.
"""

import math
from collections.abc import Mapping
from random import Random
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.asked import chance_of
from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.columns import hashes_of
from tokenfleet.core.decision import Candidate, Decision, How
from tokenfleet.core.errors import BadRequestError, listed
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.tokenpilot.choose import home_of
from tokenfleet.core.tokenpilot.filters import refusal_of
from tokenfleet.core.tokenpilot.rules import RULES

SECONDS_EQUAL = 1e-9  # relative and absolute: sums of recorded terms are taken in another order

# same: the recorded evidence gives the choice again. different: it gives another one. unknown: it is too little for
# either. no_choice: nothing was chosen, so there is nothing to replay.
Outcome = Literal["same", "different", "unknown", "no_choice"]

# Weights that scale a recorded term or bound the choice; the others change terms in ways that no record shows.
REWEIGHED = (
    "margin_weight",
    "reuse_base",
    "reuse_slope_per_s",
    "reuse_max",
    "decode_price_s",
    "tie_min_s",
    "tie_margin_share",
    "tie_max_s",
    "session_gain_min_s",
    "session_gain_min_share",
)


class Rescored(Struct, frozen=True, kw_only=True):
    """One decision replayed: `target` is what the evidence gives (empty: a refusal or no choice), `why` in words.

    `candidates` are those that could have been chosen, with their terms under other weights.
    """

    decision: Decision
    outcome: Outcome
    target: str = ""
    how: How = ""
    why: str = ""
    candidates: tuple[Candidate, ...] = ()


def rescored(decision: Decision, weights: TokenPilotPolicy) -> Rescored:
    """`decision` chosen again from what it recorded; `weights` are those of the policy revision that made it."""
    if not decision.candidates or decision.verdict != "admit":
        return _refused(decision)
    how = decision.how
    if problem := _inconsistent(decision):
        return Rescored(decision=decision, outcome="different", how=how, why=problem)
    chosen, rivals = decision.candidates[0], _rivals(decision)
    best = min((chosen, *rivals), key=_rank)
    limit_s = best.cost_s + _tie_s(best, weights, ratio_weight=weights.margin_weight)
    known = Rescored(decision=decision, outcome="same", target=chosen.instance, how=how)
    match how:
        case "least_cost" if best is chosen:
            return known
        case "least_cost":
            why = f"{best.instance} costs {_apart(chosen, best)} less"
            return replace(known, outcome="different", target=best.instance, why=why)
        case "session":
            return _stayed(known, chosen, best, weights)
        case "near_tie" | "prefix_home" if chosen.cost_s > limit_s + SECONDS_EQUAL:
            why = f"{best.instance} costs {_apart(chosen, best)} less, which is no near-tie"
            return replace(known, outcome="different", target=best.instance, why=why)
        case "near_tie" | "prefix_home":
            return _among(known, [each for each in (chosen, *rivals) if each.cost_s <= limit_s])
        case "suspect" | "off":
            return replace(known, outcome="unknown", why="drawn by load; the loads of the drawn are not recorded")
        case "power_of_two" | "least_requests" | "round_robin" | "random":
            return replace(known, outcome="unknown", why=f"by the rule {how}, which no recorded term shows")
        case _:
            return replace(known, outcome="unknown", why="it doesn't say how it was found: an older record")


def reweighed(decision: Decision, weights: TokenPilotPolicy, changed: Mapping[str, float]) -> Rescored:
    """What the candidates that `decision` kept would have given under `changed` weights, by name in REWEIGHED.

    `different` when the recorded target would no longer be chosen or tied. Only kept candidates can win.
    """
    new = other_weights(weights, changed)
    how = decision.how
    if not decision.candidates or decision.verdict != "admit":
        return Rescored(decision=decision, outcome="no_choice")
    if how in ("suspect", "off", *RULES):
        why = "no weight was asked"
        return Rescored(decision=decision, outcome="no_choice", target=decision.target, how=how, why=why)
    if (price := _reuse_price(decision, weights, new)) is None:
        why = "the price of reuse stood at its bound, so the waiting behind it is not known"
        return Rescored(decision=decision, outcome="unknown", target=decision.target, how=how, why=why)
    chosen = _again(decision.candidates[0], weights, new, price)
    rivals = [_again(each, weights, new, price) for each in _rivals(decision)]
    best = min((chosen, *rivals), key=_rank)
    known = Rescored(decision=decision, outcome="same", target=chosen.instance, how=how, candidates=(chosen, *rivals))
    if how == "session":
        return _stayed(known, chosen, best, new)
    if chosen.cost_s <= best.cost_s + _tie_s(best, new, ratio_weight=new.margin_weight):
        return known
    why = f"{best.instance} would cost {_apart(chosen, best)} less"
    return replace(known, outcome="different", target=best.instance, why=why)


def other_weights(weights: TokenPilotPolicy, changed: Mapping[str, float]) -> TokenPilotPolicy:
    """`weights` with `changed` ones. Raises BadRequestError for a name that can't be re-weighed or a value below 0."""
    for name, value in changed.items():
        if name not in REWEIGHED:
            there_is = name in weights.__struct_fields__
            problem = "changes terms that no decision records" if there_is else "is no weight of TokenPilot"
            raise BadRequestError("weights", f"{name[:40]!r} {problem}; there is: {listed(REWEIGHED)}")
        if not 0.0 <= value < math.inf:
            raise BadRequestError("weights", f"{name} = {value:g} is not a number from 0 on")
    return replace(weights, **changed)


def _refused(decision: Decision) -> Rescored:
    """A refusal by the hard filters follows from their counts; others, and what is held, chose nothing yet."""
    removed = sum(decision.excluded.values())
    if decision.verdict != "reject" or not removed or removed != decision.considered:
        return Rescored(decision=decision, outcome="no_choice")
    reason = refusal_of(decision.excluded)
    if reason == decision.reason:
        return Rescored(decision=decision, outcome="same")
    return Rescored(decision=decision, outcome="different", why=f"the filters' counts give {reason}")


def _rivals(decision: Decision) -> list[Candidate]:
    """The kept candidates that could have been chosen instead."""
    return [each for each in decision.candidates[1:] if not each.filtered]


def _inconsistent(decision: Decision) -> str:
    """What contradicts itself in the evidence, empty if nothing does."""
    for each in decision.candidates:
        ttft_s = each.wait_s + each.work_s + each.bias_s
        cost_s = each.ttft_s + each.margin_s + each.reuse_s + each.kv_s + each.decode_s + each.weight_s + each.pace_s
        if not (_equal(ttft_s, each.ttft_s) and _equal(cost_s, each.cost_s)):
            return f"the terms of {each.instance} don't add up to its cost"
    if decision.candidates[0].instance != decision.target:
        return f"its first candidate is {decision.candidates[0].instance}"
    second = next((each for each in decision.candidates if each.instance == decision.runner_up), None)
    if (
        second is None
        or decision.gap_s is None
        or _equal(second.cost_s - decision.candidates[0].cost_s, decision.gap_s)
    ):
        return ""
    return f"the gap to {second.instance} is not the difference of their costs"


def _stayed(known: Rescored, last: Candidate, best: Candidate, weights: TokenPilotPolicy) -> Rescored:
    """Whether a session's last instance is kept against the best."""
    if last.cost_s - best.cost_s <= max(weights.session_gain_min_s, weights.session_gain_min_share * last.cost_s):
        return known
    why = f"{best.instance} costs {_apart(last, best)} less, enough to leave a session's instance"
    return replace(known, outcome="different", target=best.instance, why=why)


def _among(known: Rescored, near: list[Candidate]) -> Rescored:
    """The draw, or the prefix's home, among near-ties again: of the draw its recorded part is enough."""
    decision = known.decision
    if known.how == "near_tie" and decision.drawn is not None and not _falls_to(decision.drawn, _chance(decision)):
        return replace(known, outcome="different", target="", why="the seeded draw does not fall to it")
    if len(near) < decision.near_ties:
        if known.how == "near_tie" and decision.drawn is not None:
            return known
        return replace(known, outcome="unknown", why="the prefix's home among more near-ties than were kept")
    near.sort(key=lambda each: each.instance)
    if known.how == "near_tie":
        target, words = _draw(near, _chance(decision)).instance, "the seeded draw gives"
    elif first_key := decision.block_keys[:KEY_BYTES]:
        target, words = _home(near, first_key).instance, "the prefix's home is"
    else:
        return replace(known, outcome="unknown", why="the prefix that chose among near-ties is not recorded")
    if decision.target == target:
        return known
    return replace(known, outcome="different", target=target, why=f"{words} {target}")


def _falls_to(part: tuple[float, float], rng: Random) -> bool:
    return part[0] <= rng.random() < part[1]


def _chance(decision: Decision) -> Random:
    """The chance that the request's id seeds; whatever FleetMind draws, it draws only for requests that leave."""
    hop = 0 if decision.origin == decision.site else 1
    return chance_of(decision.request, decision.attempt, hop)


def _draw(near: list[Candidate], rng: Random) -> Candidate:
    """One of them, by operator's weight."""
    return rng.choices(near, weights=[_share(each) for each in near])[0]


def _home(near: list[Candidate], first_key: bytes) -> Candidate:
    shares = np.array([_share(each) for each in near])
    return near[home_of(hashes_of([each.instance for each in near]), shares, first_key)]


def _share(candidate: Candidate) -> float:
    """The operator's weight behind weight_s = (1/share − 1) · ttft."""
    return 1.0 / (1.0 + candidate.weight_s / candidate.ttft_s) if candidate.ttft_s > 0.0 else 1.0


def _tie_s(best: Candidate, weights: TokenPilotPolicy, *, ratio_weight: float) -> float:
    """How far above the least a cost may lie and be called equal, from the margin that `ratio_weight` weighed."""
    spread_s = best.margin_s / ratio_weight if ratio_weight else 0.0
    return min(max(weights.tie_min_s, weights.tie_margin_share * spread_s), max(weights.tie_min_s, weights.tie_max_s))


def _reuse_price(decision: Decision, old: TokenPilotPolicy, new: TokenPilotPolicy) -> float | None:
    """μ under the new weights; None when the old one stood at its bound and hides the mean backlog behind it."""
    with_work = next((each for each in decision.candidates if each.work_s > 0.0), None)
    if with_work is None:
        return 0.0
    price = with_work.reuse_s / with_work.work_s
    if (new.reuse_base, new.reuse_slope_per_s, new.reuse_max) == (old.reuse_base, old.reuse_slope_per_s, old.reuse_max):
        return price
    at_bound = price >= old.reuse_max - SECONDS_EQUAL
    mean_s = (price - old.reuse_base) / old.reuse_slope_per_s if old.reuse_slope_per_s else 0.0
    again = new.reuse_base + new.reuse_slope_per_s * mean_s
    if again >= new.reuse_max:  # at its bound now, whatever more the mean was
        return new.reuse_max
    if at_bound or (not old.reuse_slope_per_s and new.reuse_slope_per_s):
        return None
    return again


def _again(candidate: Candidate, old: TokenPilotPolicy, new: TokenPilotPolicy, price: float) -> Candidate:
    """The candidate with its terms under the new weights."""
    margin_s = candidate.margin_s * _factor(old.margin_weight, new.margin_weight)
    decode_s = candidate.decode_s * _factor(old.decode_price_s, new.decode_price_s)
    reuse_s = price * candidate.work_s
    cost_s = candidate.ttft_s + margin_s + reuse_s + candidate.kv_s + decode_s + candidate.weight_s + candidate.pace_s
    return replace(candidate, cost_s=cost_s, margin_s=margin_s, reuse_s=reuse_s, decode_s=decode_s)


def _factor(old: float, new: float) -> float:
    """A term that weighed nothing left no trace, so it can't be given weight."""
    return new / old if old else 1.0


def _rank(candidate: Candidate) -> tuple[float, str]:
    return candidate.cost_s, candidate.instance


def _apart(dear: Candidate, cheap: Candidate) -> str:
    return f"{(dear.cost_s - cheap.cost_s) * 1000:,.1f} ms"


def _equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SECONDS_EQUAL, abs_tol=SECONDS_EQUAL)
