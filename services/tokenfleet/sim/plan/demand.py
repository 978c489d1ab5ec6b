"""Demand: what each site's users offer over days: a sine a day, out of step with one another, and a trace's noise."""

import math
from random import Random
from statistics import fmean

from tokenfleet.sim.traces.read import read_trace

DAY_S = 86_400.0
MINUTE_S = 60.0
MEAN = 20.0  # replicas' worth of work, at each site


def noise(trace: str = "conversation") -> list[float]:
    """The prompt tokens of each whole minute of a trace, as multiples of their mean."""
    minutes: dict[int, float] = {}
    rows = read_trace(trace).rows
    for row in rows:
        minutes[int(row.at_s // MINUTE_S)] = minutes.get(int(row.at_s // MINUTE_S), 0.0) + row.prompt_tokens
    whole = [minutes.get(minute, 0.0) for minute in range(int(rows[-1].at_s // MINUTE_S))]
    mean = fmean(whole)
    return [tokens / mean for tokens in whole]


def offered(*, sites: int, days: int, peak: float, seed: int) -> list[list[float]]:
    """Work a second of each site in each minute. `peak` is the sine's greatest value over its mean."""
    rng, draws = Random(f"{seed}/demand"), noise()
    per_day = round(DAY_S / MINUTE_S)
    return [
        [
            MEAN * (1.0 + (peak - 1.0) * math.sin(2 * math.pi * (minute / per_day - site / sites))) * rng.choice(draws)
            for minute in range(days * per_day)
        ]
        for site in range(sites)
    ]


def steps_of(minutes: list[float], minutes_a_step: int) -> list[float]:
    """Means over whole steps."""
    return [
        fmean(minutes[at : at + minutes_a_step]) for at in range(0, len(minutes) - minutes_a_step + 1, minutes_a_step)
    ]
