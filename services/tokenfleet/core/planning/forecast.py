"""Forecast: what will be offered in the next steps, as likely as not and at most nine times of ten.

By statsforecast (Nixtla): with two seasons of history the season is taken off by MSTL (Bandara, Hyndman and Bergmeir
2021) and exponential smoothing carries the rest; with less, exponential smoothing alone; with next to nothing the last
value stands, with half of it in reserve.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from statsforecast.models import MSTL, AutoETS

SHORT = 12  # values, below which nothing is fitted
RESERVE = 0.5  # of the last value, where nothing is known of its spread
LEVEL = 80  # per cent between the bounds, so nine of ten lie below the upper one


class Expected(Struct, frozen=True, kw_only=True):
    """A value for each step to come, none below 0."""

    mean: tuple[float, ...]
    p90: tuple[float, ...]


def forecast(history: Sequence[float], *, season: int, steps: int) -> Expected:
    """Of a series whose last value is the latest, `season` values a day or whatever repeats."""
    if len(history) < SHORT:
        last = history[-1] if history else 0.0
        return Expected(mean=(last,) * steps, p90=(last * (1.0 + RESERVE),) * steps)
    smoothing = AutoETS(season_length=1, model="ZZN")
    model: Any = smoothing if len(history) < 2 * season else MSTL(season_length=season, trend_forecaster=smoothing)
    found = model.forecast(y=np.asarray(history, np.float64), h=steps, level=[LEVEL])
    return Expected(mean=_not_below_zero(found["mean"]), p90=_not_below_zero(found[f"hi-{LEVEL}"]))


def _not_below_zero(values: Any) -> tuple[float, ...]:
    return tuple([max(0.0, float(value)) for value in values])
