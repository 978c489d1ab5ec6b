"""Measure: what two models on one site came to, and how their slots moved."""

from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.slomax.shares import Kind
from tokenfleet.sim.control import Control, control_of
from tokenfleet.sim.demand import Demand
from tokenfleet.sim.measure import Quantiles
from tokenfleet.sim.mixed.measure import Counts, Throughput
from tokenfleet.sim.models.following import Followed
from tokenfleet.sim.models.workload import LEN_S, MODELS, TALK
from tokenfleet.sim.served import Served
from tokenfleet.sim.slots import Move

ALL = "all"


class Revised(Struct, frozen=True, kw_only=True):
    """A revision of the shares: decided at, in force from (None: never), of what kind, what they are then, and why."""

    number: int
    at_s: float
    applied_s: float | None
    kind: Kind
    slots: dict[str, int]
    why: str


class Result(Struct, frozen=True, kw_only=True):
    """One run of two models; figures by model have the keys `all`, `talk` and `read`, and are as in mixed.measure.

    `shares` are the slots that serve each model from each time on: one that drains, sleeps or wakes serves none.
    `control` tells how slots were moved, None where they stay.
    """

    seed: int
    design: str
    demand: str
    split: int
    instances: int
    load: float
    profile: str
    window_s: float
    makespan_s: float
    rho: float
    requests: dict[str, Counts]
    rejected: int
    attainment_offered: dict[str, float | None]
    attainment_admitted: dict[str, float | None]
    goodput_tokens_per_s: dict[str, float]
    throughput_tokens_per_s: Throughput
    waste_tokens: int
    cost_per_million_goodput_tokens: float | None
    ttft_s: dict[str, Quantiles]
    tpot_s: dict[str, Quantiles]
    e2e_s: dict[str, Quantiles]
    hit_ratio: float
    requests_per_cpu_s: float
    shares: tuple[tuple[float, dict[str, int]], ...]
    moves: tuple[Move, ...]
    revisions: tuple[Revised, ...]
    reversals: int
    control: Control | None


def by_model(served: Sequence[Served]) -> dict[str, list[Served]]:
    """The requests of each model, and all."""
    return {ALL: list(served)} | {name: [each for each in served if each.model == name] for name in MODELS}


def shares_of(serving: Sequence[str], moves: Sequence[Move]) -> tuple[tuple[float, dict[str, int]], ...]:
    """The slots that serve each model, from each time on at which it changes."""
    counts = Counter(serving)
    shares = [(0.0, {name: counts[name] for name in MODELS})]
    changes = [(move.begun_s, move.source, -1) for move in moves]
    changes += [(move.ready_s, move.target, 1) for move in moves if move.ready_s is not None]
    for at_s, name, by in sorted(changes):
        counts[name] += by
        shares.append((at_s, {model: counts[model] for model in MODELS}))
    return tuple(shares)


def revised(followed: Sequence[Followed], *, slots: int) -> tuple[Revised, ...]:
    """The revisions as a run tells of them."""
    return tuple(
        Revised(
            number=each.revision.number,
            at_s=each.revision.at_s,
            applied_s=each.applied_s,
            kind=each.revision.kind,
            slots={name: round(share * slots) for name, share in each.revision.new.shares.items()},
            why=each.revision.why,
        )
        for each in followed
    )


def control_of_slots(split: int, moves: Sequence[Move], demand: Demand, *, slots: int) -> Control:
    """The first model's slots as they were given, those on their way counted when they arrive.

    They are where they belong within one slot of what is asked for.
    """
    series: list[tuple[float, float]] = [(0.0, float(split))]
    for move in moves:
        if move.ready_s is not None and move.ready_s < LEN_S:
            series.append((move.ready_s, series[-1][1] + (1.0 if move.target == TALK else -1.0)))

    def off(at_s: float, value: float) -> bool:
        return abs(value - demand.share(at_s) * slots) >= 1.0

    return control_of("slots", series, changes_s=demand.changes_s, until_s=LEN_S, off=off)
