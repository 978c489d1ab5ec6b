"""The allowance: it follows what the guarded class attains, turns round at most once a minute and comes to rest."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from statistics import median

import pytest

from tests.core.paced_towns import PACED
from tokenfleet.core.slomax.allowance import Allowance
from tokenfleet.sim.control import Control, turns
from tokenfleet.sim.demand import demand_named
from tokenfleet.sim.mixed.allowances import BAND, control_of_allowance

LEN_S = 900.0
REQUESTS_PER_S = 15
LAG_S = 10  # a request was placed so long before it ends
STRAIN_S = 4  # misses come in bursts: one long prompt costs all who decode beside it
Level = Callable[[float], float]


class Chat:
    """Chat beside an allowance, in virtual time: it misses the more the more is offered (1: all that can be served) and
    the more is allowed, in bursts."""

    def __init__(self, level: Level, *, seed: int) -> None:
        self.allowance = Allowance(PACED)
        self.series: list[tuple[float, float]] = []
        self._level, self._rng = level, Random(seed)
        self._allowed = deque([self.allowance.share] * LAG_S, maxlen=LAG_S)

    def run(self, until_s: float) -> "Chat":
        strain = 0.0
        for second in range(round(until_s)):
            if second % STRAIN_S == 0:
                strain = self._rng.expovariate(1.0)
            missed = 0.02 * strain * self._level(second) ** 6 * (0.5 + 3.0 * self._allowed[0])
            for _ in range(REQUESTS_PER_S):
                self.allowance.settled(met=self._rng.random() >= missed, now_s=float(second))
            self.allowance.advance(PACED, float(second))
            self._allowed.append(self.allowance.share)
            self.series.append((float(second), self.allowance.share))
        return self


def level_of(name: str) -> Level:
    """What is offered: from 0.56 to 1.04 of what can be served, as `sim run mixed --load 0.8 --demand` has it."""
    share = demand_named(name, seed=1).share
    return lambda at_s: 1.6 * share(at_s)


def controlled(name: str, *, seed: int) -> Control:
    series = Chat(level_of(name), seed=seed).run(LEN_S).series
    return control_of_allowance(series, demand_named(name, seed=1), until_s=LEN_S)


@pytest.mark.parametrize("name", ["step", "ramp", "square"])
def test_under_a_step_a_ramp_and_a_square_wave_it_turns_once_a_minute_at_most_and_comes_to_rest(name: str) -> None:
    controls = [controlled(name, seed=seed) for seed in range(1, 9)]
    assert all(control.worst_minute <= 1 for control in controls)
    assert all(control.changes > 10 for control in controls)
    settled_s = [within_s for control in controls for within_s in control.settled_s if within_s is not None]
    assert len(settled_s) == sum(len(control.settled_s) for control in controls)
    assert max(settled_s) <= 300.0
    assert median(settled_s) <= 120.0


def told(attained: Sequence[float], *, requests: int = 1_000) -> list[float]:
    """The share after each period in which so much was attained."""
    allowance, shares = Allowance(PACED), list[float]()
    for number, share in enumerate(attained):
        for n in range(requests):
            allowance.settled(met=n < share * requests, now_s=number * PACED.allowance_period_s + 1.0)
        allowance.advance(PACED, number * PACED.allowance_period_s)
        allowance.advance(PACED, (number + 1) * PACED.allowance_period_s)
        shares.append(allowance.share)
    return shares


def test_it_rises_while_the_guarded_are_served_and_falls_by_parts_when_they_miss() -> None:
    shares = told([1.0] * 7 + [0.9] * 40)
    assert shares[:2] == pytest.approx([0.09, 0.15])
    assert shares[6] == PACED.allowance_max
    assert shares[7] == pytest.approx(0.4 * (1.0 - 0.3 / 2))  # half a cut: it has just turned
    assert shares[8] == pytest.approx(shares[7] * (1.0 - 0.3 * 0.6))
    assert shares[-1] == PACED.allowance_min
    assert told([0.985] * 3) == [0.03] * 3  # neither


def test_an_idle_minute_tells_of_no_misses() -> None:
    assert told([0.0], requests=0) == pytest.approx([0.09])
    assert told([0.0], requests=1) == pytest.approx([0.021])


def test_it_turns_once_a_minute_at_most_and_in_smaller_steps_each_time() -> None:
    shares = told([1.0, 1.0, 0.9] * 40)
    series = [(number * PACED.allowance_period_s, share) for number, share in enumerate(shares)]
    turned = turns(series)
    assert len(turned) > 4
    assert all(later - earlier >= PACED.allowance_turn_s for earlier, later in pairwise(turned))
    late = [share for at_s, share in series if at_s > 300.0]
    assert max(late) - min(late) <= 2 * BAND


def test_it_goes_all_the_way_when_it_must() -> None:
    shares = told([1.0, 0.9] * 40 + [0.9] * 40)
    assert shares[-1] == PACED.allowance_min
