"""Bench run: all measures in turn, each beside its goal."""

import asyncio
import os
import platform
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from msgspec import Struct

from tokenfleet.core.compiled import is_available
from tokenfleet.local.bench.calls import BATCH, Cost, asking
from tokenfleet.local.bench.kernel import choice_us, index_mb, kv_events_per_s
from tokenfleet.local.bench.site import prompts_of

Part = Literal["choose", "kv", "memory", "calls"]
PARTS: Final[tuple[Part, ...]] = ("choose", "kv", "memory", "calls")
SIZES: Final = (100, 1_000, 10_000)
REPLICATIONS: Final = (1, 8, 64)
CALLS_SITE: Final = 1_000  # instances behind the server

# (floor, target) of `choose` with prefix walk and snapshot, µs, by instances; of memory, MB, by replication.
CHOOSE_US: Final = {1_000: (120.0, 80.0), 10_000: (600.0, 500.0)}
MEMORY_MB: Final = {1: 90.0, 8: 30.0, 64: 10.0}
KV_BLOCKS_PER_S: Final = 1e6
ROUTE_US: Final = 700.0
ROUTE_OF_ECHO: Final = 0.85
STREAM_US: Final = (160.0, 100.0)
SCHEDULE_OF_ROUTE: Final = 1.5
ADMIT_OF_ROUTE: Final = (1.5, 1.2)
COALESCED_OF_STREAM: Final = 0.7


class Figure(Struct, frozen=True, kw_only=True):
    """One measure. `goal` is the floor and `target` what is tried for, None where there is none; `at_most` says that
    less is better."""

    part: Part
    name: str
    value: float
    unit: str
    goal: float | None = None
    target: float | None = None
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal


class Report(Struct, frozen=True, kw_only=True):
    """All figures, and the machine they are of: its load says how much they can be trusted. `compiled`: numba is
    installed, so loops over pools from COMPILED_FROM on were compiled."""

    figures: tuple[Figure, ...]
    python: str
    cpus: int
    load_before: float
    compiled: bool


def run(parts: Sequence[Part], *, rounds: int, quick: bool) -> Report:
    """Measures `parts` one after another. `quick` asks a hundredth as much: it shows that all runs, not how fast."""
    load = os.getloadavg()[0]
    figures: list[Figure] = []
    for part in parts:
        figures += MEASURES[part](rounds, quick)
    return Report(
        figures=tuple(figures),
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        load_before=load,
        compiled=is_available(),
    )


def _choose(rounds: int, quick: bool) -> Iterator[Figure]:
    for instances in SIZES[:1] if quick else SIZES:
        taken = choice_us(instances, rounds=10 if quick else 60 * rounds)
        floor, target = CHOOSE_US.get(instances, (None, None))
        among = f"among {instances:,}"
        yield Figure(part="choose", name=f"choose {among}", value=taken["choose"], unit="µs")
        yield Figure(
            part="choose",
            name=f"choose with prefix walk and snapshot {among}",
            value=taken["whole"],
            unit="µs",
            goal=floor,
            target=target,
        )
        yield Figure(part="choose", name=f"whole Route decision {among}", value=taken["route"], unit="µs")


def _kv(rounds: int, quick: bool) -> Iterator[Figure]:
    taken = kv_events_per_s(rounds=1 if quick else rounds, instances=16 if quick else 64)
    for name, words in (
        ("store", "KV blocks stored"),
        ("remove", "KV blocks removed"),
        ("store_shared", "KV blocks stored at eight instances each"),
    ):
        yield Figure(part="kv", name=words, value=taken[name], unit="/s", goal=KV_BLOCKS_PER_S, at_most=False)


def _memory(rounds: int, quick: bool) -> Iterator[Figure]:
    for replication in REPLICATIONS[-1:] if quick else REPLICATIONS:
        name = f"a million (block, instance) pairs, {replication} instances a block"
        goal = MEMORY_MB[replication]
        yield Figure(part="memory", name=name, value=index_mb(replication), unit="MB", goal=goal)


def _calls(rounds: int, quick: bool) -> Iterator[Figure]:
    instances, requests = (50, 2 * BATCH) if quick else (CALLS_SITE, 60 * BATCH)
    costs = asyncio.run(_costs(instances, 1 if quick else rounds, requests))
    echo, route, stream = costs["echo"], costs["route"], costs["stream"]
    yield _server("empty echo", echo)
    yield _server(f"Route among {instances:,}", route, goal=ROUTE_US)
    yield _ratio("echo's server CPU of Route's", echo.server_us / route.server_us, ROUTE_OF_ECHO)
    yield _server("Schedule", costs["schedule"])
    schedule_of_route = costs["schedule"].server_us / route.server_us
    yield _ratio("Schedule's server CPU of Route's", schedule_of_route, SCHEDULE_OF_ROUTE, at_most=True)
    yield _server("Admit", costs["admit"])
    admit_of_route, (floor, target) = costs["admit"].server_us / route.server_us, ADMIT_OF_ROUTE
    yield _ratio("Admit's server CPU of Route's", admit_of_route, floor, at_most=True, target=target)
    yield _server(f"RouteStream, {BATCH} a message", stream, goal=STREAM_US[0], target=STREAM_US[1])
    yield _server("Gateway.route, 64 callers", costs["coalesced"])
    yield _ratio(
        "coalesced rate of the hand-batched stream's", costs["coalesced"].per_s / stream.per_s, COALESCED_OF_STREAM
    )


async def _costs(instances: int, rounds: int, requests: int) -> dict[str, Cost]:
    async with asking(instances, prompts_of()) as server:
        return await server.costs(rounds=rounds, requests=requests)


def _server(name: str, cost: Cost, *, goal: float | None = None, target: float | None = None) -> Figure:
    words = f"{name}: server CPU a request ({cost.per_s:,.0f}/s, client {cost.client_us:,.0f} µs)"
    return Figure(part="calls", name=words, value=cost.server_us, unit="µs", goal=goal, target=target)


def _ratio(name: str, value: float, goal: float, *, at_most: bool = False, target: float | None = None) -> Figure:
    return Figure(part="calls", name=name, value=value, unit="×", goal=goal, target=target, at_most=at_most)


MEASURES = {"choose": _choose, "kv": _kv, "memory": _memory, "calls": _calls}
