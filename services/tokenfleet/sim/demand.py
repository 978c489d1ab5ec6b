"""Demand: how what is offered moves between two streams of requests, and requests at the times that it asks for."""

import math
from collections.abc import Callable
from itertools import accumulate
from random import Random

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.traces.rows import TraceRow

WAVE_S, SWING = 600.0, 0.2
SIDES_CHANGE_S = 750.0
STEP_S = 300.0
RAMP_S = (200.0, 450.0)
HALF_WAVE_S = 225.0
HALF_WAVES = 40
LOW, HIGH = 0.35, 0.65  # the first stream's share in steps, ramps and square waves


class Demand(Struct, frozen=True, kw_only=True):
    """The first stream's share of what is offered by time, and when it has just changed and stays as it is."""

    share: Callable[[float], float]
    changes_s: tuple[float, ...] = ()


def demand_named(name: str, *, seed: int) -> Demand:
    """The demand of that name; the seed draws the phase of waves. Raises PolicyError for an unknown one."""
    if name not in DEMANDS:
        raise PolicyError(f"--demand {name!r}: there is {listed(DEMANDS)}")
    return DEMANDS[name](Random(f"{seed}/demand"))


def timed(rows: list[TraceRow], level: Callable[[float], float], *, len_s: float) -> list[TraceRow]:
    """Rows of a stream of even density, by arrival, at the times by which so many are asked for: `level` times as many
    as there are. Those of [0, len_s)."""
    times_s = np.arange(0.0, len_s + 1.0)
    asked_s = list(accumulate((level(at_s + 0.5) for at_s in times_s[:-1].tolist()), initial=0.0))
    within = [row for row in rows if row.at_s < asked_s[-1]]
    at_s = np.interp([row.at_s for row in within], asked_s, times_s).tolist()
    return [replace(row, at_s=time_s) for row, time_s in zip(within, at_s, strict=True)]


def _waves(rng: Random) -> Demand:
    """A wave and a half, and a step: near the end the streams change sides."""
    phase = rng.uniform(0.0, 2.0 * math.pi)

    def share(at_s: float) -> float:
        swing = SWING * math.sin(2.0 * math.pi * at_s / WAVE_S + phase)
        return 0.5 + swing if at_s < SIDES_CHANGE_S else 0.5 - swing

    return Demand(share=share)


def _step(rng: Random) -> Demand:
    return Demand(share=lambda at_s: LOW if at_s < STEP_S else HIGH, changes_s=(STEP_S,))


def _ramp(rng: Random) -> Demand:
    from_s, until_s = RAMP_S

    def share(at_s: float) -> float:
        done = min(max((at_s - from_s) / (until_s - from_s), 0.0), 1.0)
        return LOW + done * (HIGH - LOW)

    return Demand(share=share, changes_s=(until_s,))


def _square(rng: Random) -> Demand:
    changes_s = tuple(HALF_WAVE_S * number for number in range(1, HALF_WAVES))
    return Demand(share=lambda at_s: HIGH if int(at_s // HALF_WAVE_S) % 2 else LOW, changes_s=changes_s)


def _steady(rng: Random) -> Demand:
    return Demand(share=lambda at_s: 0.5)


DEMANDS: dict[str, Callable[[Random], Demand]] = {
    "waves": _waves,
    "step": _step,
    "ramp": _ramp,
    "square": _square,
    "steady": _steady,
}
