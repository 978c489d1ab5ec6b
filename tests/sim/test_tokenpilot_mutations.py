"""Mutations: each part of TokenPilot shows in how a small fleet is served, and leaving it out spoils that.

A fact here is a figure and its bound. The fleet as it is stays within the bound, and the fleet whose policy was bent
in one place does not: what holds either way would say nothing about the policy.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core import pool_table
from tokenfleet.core.asked import Turn
from tokenfleet.core.columns import Columns, Flags
from tokenfleet.core.decision import Request
from tokenfleet.core.expected import Expected
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.load import Load, Standing
from tokenfleet.core.policy import LateBindingPolicy, TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot import choose, due, held
from tokenfleet.core.tokenpilot.cost import Costs
from tokenfleet.core.tokenpilot.evidence import Chosen
from tokenfleet.core.tokenpilot.held import Waiting
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.rows import TraceRow

BLOCK = 512
SEEDS = (2, 3)  # a figure is the mean over these

Patch = pytest.MonkeyPatch
World = Callable[[int], Sequence[Served]]  # a seed → what became of its requests


# --- worlds -------------------------------------------------------------------------------------------------------


def asked(at_s: float, *blocks: int, out: int) -> TraceRow:
    """A request of these blocks, the last of which is not full."""
    return TraceRow(at_s=at_s, prompt_tokens=BLOCK * len(blocks) - 17, output_tokens=out, hash_ids=blocks)


def served(rows: Sequence[TraceRow], seed: int, **terms: Any) -> Sequence[Served]:
    known: dict[str, Any] = {"profile": profiles()["L70"], "instances": 4}
    return Fleet(FleetTerms(**(known | terms)), Pilot, seed=seed).serve(rows)


def arrivals(number: int, *, per_s: float, rng: Random) -> list[float]:
    at_s, made = 0.5, list[float]()
    for _ in range(number):
        at_s += rng.expovariate(per_s)
        made.append(at_s)
    return made


def strangers(number: int, *, per_s: float, rng: Random) -> list[TraceRow]:
    """Prompts of 8 to 24 blocks that nobody else asks."""
    return [
        asked(at_s, *range(1000 * n, 1000 * n + rng.randint(8, 24)), out=rng.randint(20, 200))
        for n, at_s in enumerate(arrivals(number, per_s=per_s, rng=rng), start=1)
    ]


def conversations(number: int, *, per_s: float, chains: int, rng: Random) -> list[TraceRow]:
    """Prompts of 8 to 24 blocks, all but the last of which are one of `chains` conversations'."""
    rows: list[TraceRow] = []
    for n, at_s in enumerate(arrivals(number, per_s=per_s, rng=rng)):
        chain = 1000 * rng.randint(1, chains)
        rows.append(asked(at_s, *range(chain, chain + rng.randint(7, 23)), 10**9 + n, out=rng.randint(5, 20)))
    return rows


def busy(seed: int) -> Sequence[Served]:
    """Four instances at about four fifths of what they can do, without anything to reuse."""
    return served(strangers(300, per_s=8.0, rng=Random(seed)), seed)


def busy_behind_four_gateways(seed: int) -> Sequence[Served]:
    """Eight such instances whose telemetry comes every other second."""
    rows = strangers(300, per_s=16.5, rng=Random(seed))
    return served(rows, seed, instances=8, gateways=4, telemetry_period_s=2.0)


def talkative(seed: int) -> Sequence[Served]:
    return served(conversations(400, per_s=9.0, chains=40, rng=Random(seed)), seed)


def overloaded(seed: int) -> Sequence[Served]:
    """More conversations at once than four instances keep up with."""
    return served(conversations(500, per_s=32.0, chains=100, rng=Random(seed)), seed)


def overloaded_and_bound_at_once(seed: int) -> Sequence[Served]:
    weights = TokenPilotPolicy(late=LateBindingPolicy(enabled=False))
    return served(conversations(500, per_s=24.0, chains=100, rng=Random(seed)), seed, weights=weights)


def bursts(seed: int) -> Sequence[Served]:
    """Every half second eight requests with one long prompt that is new."""
    rng = Random(seed)
    rows = [
        asked(1.0 + 0.5 * b + rng.uniform(0.0, 0.2), *range(1000 * b, 1000 * b + 23), 10**9 + 8 * b + n, out=40)
        for b in range(1, 21)
        for n in range(8)
    ]
    return served(sorted(rows, key=lambda row: row.at_s), seed)


def long_and_short(seed: int) -> Sequence[Served]:
    """Three prompts in ten are 16 times as long as the others, and there is more to do than can be done at once."""
    rng = Random(seed)
    rows = [
        asked(at_s, *range(1000 * n, 1000 * n + (32 if rng.random() < 0.3 else 2)), out=rng.randint(5, 20))
        for n, at_s in enumerate(arrivals(300, per_s=18.0, rng=rng), start=1)
    ]
    return served(rows, seed)


def idle(seed: int) -> Sequence[Served]:
    """Each request ends before the next one comes, and no two are of one prefix."""
    return served([asked(float(n), n, out=2) for n in range(1, 121)], seed)


# --- figures ------------------------------------------------------------------------------------------------------


def waits_s(requests: Sequence[Served]) -> list[float]:
    """Times to first token, least first."""
    return sorted(each.first_token_s - each.row.at_s for each in requests if each.first_token_s is not None)


def p50_s(requests: Sequence[Served]) -> float:
    return waits_s(requests)[len(requests) // 2]


def p95_s(requests: Sequence[Served]) -> float:
    return waits_s(requests)[len(requests) * 95 // 100]


def largest_share(requests: Sequence[Served]) -> float:
    """The share of all requests that the most used instance got."""
    return max(Counter(each.instance for each in requests).values()) / len(requests)


# --- mutations ----------------------------------------------------------------------------------------------------


def without_the_ledger(patch: Patch) -> None:
    def nothing(ledger: Ledger, instance: str, *, believed_after_s: float = 0.0) -> Standing:
        return Standing(load=Load())

    patch.setattr(Ledger, "standing", nothing)


def without_the_hit_term(patch: Patch) -> None:
    patch.setattr(pool_table, "p_hit", lambda calibration, state: 0.0)


def ties_to_the_lowest_index(patch: Patch) -> None:
    def lowest(
        request: Request,
        columns: Columns,
        costs: Costs,
        left: Flags | None,
        weights: TokenPilotPolicy,
        *,
        rng: Random,
        last: int,
    ) -> Chosen:
        near = costs.cost_s <= costs.cost_s.min() + weights.tie_min_s
        return Chosen(int(np.flatnonzero(near)[0]), "near_tie")

    patch.setattr(choose, "_cheapest", lowest)


def blind_to_other_replicas(patch: Patch) -> None:
    patch.setattr(Ledger, "hear", lambda *envelope, **where: None)


def with_reuse_free_in_the_choice(patch: Patch) -> None:
    weigh = choose.weigh

    def weigh_free(prompt_tokens: int, pool: PoolView, weights: TokenPilotPolicy, *able: Any, **terms: Any) -> Costs:
        return weigh(prompt_tokens, pool, _free(weights), *able, **terms)

    patch.setattr(choose, "weigh", weigh_free)


def with_reuse_free_in_the_plan(patch: Patch) -> None:
    turns = held.Held.turns

    def turns_free(
        requests: held.Held, pool: PoolView, look: held.Look, weights: TokenPilotPolicy, now_s: float
    ) -> Iterator[tuple[Waiting, Turn]]:
        return turns(requests, pool, look, _free(weights), now_s)

    patch.setattr(held.Held, "turns", turns_free)


def _free(weights: TokenPilotPolicy) -> TokenPilotPolicy:
    return replace(weights, reuse_base=0.0, reuse_slope_per_s=0.0)


def without_expected_blocks(patch: Patch) -> None:
    patch.setattr(Expected, "add", lambda *placed, **when: None)


def most_work_first(patch: Patch) -> None:
    patch.setattr(held, "rank", lambda *waiting: -due.rank(*waiting))


def first_come_first_served(patch: Patch) -> None:
    def longest_wait(work_s: float, age_s: float, due_s: float, terms: LateBindingPolicy) -> float:
        return -age_s

    patch.setattr(held, "rank", longest_wait)


def nobody_is_ever_due(patch: Patch) -> None:
    patch.setattr(due.Due, "due_s", 0.0)


def bound_at_once(patch: Patch) -> None:
    patch.setattr(held.Held, "off", lambda *now: "late binding is off")


class Fact(Struct, frozen=True):
    """The figure of a world is at most `most`, and more than that under `mutation`."""

    world: World
    figure: Callable[[Sequence[Served]], float]
    most: float
    mutation: Callable[[Patch], None]


FACTS = (
    Fact(busy, p95_s, 1.2, without_the_ledger),
    Fact(talkative, p50_s, 0.06, without_the_hit_term),
    Fact(idle, largest_share, 0.4, ties_to_the_lowest_index),
    Fact(busy_behind_four_gateways, p95_s, 1.2, blind_to_other_replicas),
    Fact(overloaded, p50_s, 0.8, with_reuse_free_in_the_plan),
    Fact(overloaded, p95_s, 4.0, nobody_is_ever_due),
    Fact(overloaded_and_bound_at_once, p50_s, 0.6, with_reuse_free_in_the_choice),
    Fact(bursts, p50_s, 1.1, without_expected_blocks),
    Fact(long_and_short, p95_s, 6.0, most_work_first),
    Fact(long_and_short, p50_s, 0.85, first_come_first_served),
    Fact(long_and_short, p50_s, 0.85, bound_at_once),
)


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.world.__name__} {fact.mutation.__name__}")
def test_the_fleet_is_served_well_and_with_the_policy_bent_it_is_not(
    fact: Fact, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fmean(fact.figure(fact.world(seed)) for seed in SEEDS) <= fact.most
    fact.mutation(monkeypatch)
    assert fmean(fact.figure(fact.world(seed)) for seed in SEEDS) > fact.most
