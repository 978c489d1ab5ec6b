"""Forecast: a season is found, spread is told, and little history is taken with reserve."""

import math
from random import Random

import pytest

from tokenfleet.core.planning.forecast import forecast

DAY = 24


def day(days: int, *, noise: float = 0.05, seed: int = 1) -> list[float]:
    rng = Random(seed)
    return [10.0 * (1.5 + math.sin(2 * math.pi * n / DAY)) * rng.gauss(1.0, noise) for n in range(days * DAY)]


def test_a_season_that_has_been_seen_twice_is_expected_again() -> None:
    found = forecast(day(7), season=DAY, steps=12)
    true = [10.0 * (1.5 + math.sin(2 * math.pi * n / DAY)) for n in range(12)]
    assert found.mean == pytest.approx(true, rel=0.25)
    assert all(high > mean for mean, high in zip(found.mean, found.p90, strict=True))


def test_wider_noise_is_told_as_more_in_reserve() -> None:
    calm, wild = (forecast(day(7, noise=noise), season=DAY, steps=6) for noise in (0.02, 0.2))
    assert wild.p90[0] - wild.mean[0] > calm.p90[0] - calm.mean[0]


@pytest.mark.parametrize(("history", "mean", "p90"), [([], 0.0, 0.0), ([4.0], 4.0, 6.0), ([1.0, 2.0, 8.0], 8.0, 12.0)])
def test_with_next_to_no_history_the_last_value_stands_with_half_in_reserve(
    history: list[float], mean: float, p90: float
) -> None:
    found = forecast(history, season=DAY, steps=3)
    assert (found.mean, found.p90) == ((mean,) * 3, (p90,) * 3)


@pytest.mark.parametrize("history", [[0.0] * 100, [5.0] * 100, [5.0] * 30 + [0.0] * 10, day(1)])
def test_no_history_makes_a_forecast_that_is_no_number_or_below_zero(history: list[float]) -> None:
    found = forecast(history, season=DAY, steps=12)
    assert all(math.isfinite(value) and value >= 0.0 for value in (*found.mean, *found.p90))
