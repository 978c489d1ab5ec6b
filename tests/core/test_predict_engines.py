"""Learning from engines: under a recorded trace, a wrong prior is put right and stays right at every load."""

from collections.abc import Iterable
from functools import cache
from random import Random
from statistics import fmean

import pytest

from tests.core.engine_outcomes import Engines, model_of, slowed, truth, work_s
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.predict.learn import PoolLearner
from tokenfleet.core.predict.sample import sample_of
from tokenfleet.core.records import OutcomeEvent, PlacedOn
from tokenfleet.local.data_files import trace_rows
from tokenfleet.sim.profiles import Profile, profiles
from tokenfleet.sim.traces.rows import TraceRow

PUBLISHED_EVERY = 10  # outcomes: about once a second


@cache
def rows() -> list[TraceRow]:
    return trace_rows(copies=1, rng=Random(0), prompt_tokens_max=200_000)


class Pool:
    """A pool that learns while its engines run on what it published last."""

    def __init__(self, profile: Profile, *, prior_factor: float) -> None:
        self.profile = profile
        model = model_of(profile, prior_factor=prior_factor)
        self.learner = PoolLearner("m@b", "m", model=model, policy=TokenPilotPolicy())
        self.published = self.learner.calibration()
        self.placed: list[PlacedOn] = []
        self.covered: dict[bool, list[bool]] = {False: [], True: []}  # within the margin, by whether it queued

    def learn(self, events: Iterable[OutcomeEvent], *, outcomes: int | None = None) -> None:
        """All first tokens, or so many."""
        for event in events:
            sample = sample_of(event)
            assert sample is not None
            self.learner.observe(sample)
            self.placed.append(sample.placed)
            self._judge(event, sample.placed)
            if len(self.placed) % PUBLISHED_EVERY == 0:
                self.published = self.learner.calibration()
            if len(self.placed) == outcomes:
                return

    def _judge(self, event: OutcomeEvent, placed: PlacedOn) -> None:
        predicted_s = placed.wait_s + placed.work_s
        ratio = self.published.margin_queued if placed.queued else self.published.margin_idle
        off_s = abs(event.attempt_s - predicted_s - placed.bias_s)
        self.covered[placed.queued > 0].append(off_s <= ratio * predicted_s)

    def off(self) -> float:
        """Mean |predicted − true| / true work of the prompts that were placed."""
        found, exact = self.learner.calibration().coefficients, truth(self.profile)
        ratios = [work_s(each, found, self.profile) / work_s(each, exact, self.profile) for each in self.placed[-300:]]
        return fmean(abs(ratio - 1.0) for ratio in ratios)


def pool_after(
    until_s: float,
    *,
    name: str = "L70",
    rate_per_s: float = 11.0,
    count: int = 8,
    prior_factor: float = 2.0,
    outcomes: int | None = None,
    seed: int = 1,
    reporters: int = 1,
) -> Pool:
    profile = profiles()[name]
    pool = Pool(profile, prior_factor=prior_factor)
    engines = Engines(profile, rows(), count=count, seed=seed, reporters=reporters)
    pool.learn(engines.run(until_s, rate_per_s=rate_per_s, believed=lambda: pool.published), outcomes=outcomes)
    return pool


@pytest.mark.parametrize("prior_factor", [0.5, 2.0])
@pytest.mark.parametrize("name", ["L70", "DSV3-DP", "demo", "demo-large"])
def test_work_is_within_a_tenth_after_50_outcomes(name: str, prior_factor: float) -> None:
    assert pool_after(60.0, name=name, rate_per_s=4.0, prior_factor=prior_factor, outcomes=50).off() < 0.1


@pytest.mark.parametrize("prior_factor", [0.5, 2.0])
def test_work_is_within_three_percent_after_a_minute_of_eight_engines(prior_factor: float) -> None:
    assert pool_after(60.0, rate_per_s=11.0, prior_factor=prior_factor).off() < 0.03


@pytest.mark.parametrize(("name", "rate_per_s"), [("L70", 9.5), ("L70", 16.0), ("DSV3-DP", 5.0), ("DSV3-DP", 9.0)])
def test_coefficients_do_not_drift_however_long_the_queues(name: str, rate_per_s: float) -> None:
    """From rho 0.7 to overload; the longer it lasts, the more iterations end one prompt and begin the next."""
    pool = pool_after(180.0, name=name, rate_per_s=rate_per_s)
    assert pool.off() < 0.03
    assert pool.learner.calibration().coefficients.a_s == pytest.approx(truth(pool.profile).a_s, rel=0.05)


@pytest.mark.parametrize(("name", "rate_per_s"), [("demo", 7.0), ("demo-large", 4.5)])
def test_waits_for_kv_memory_are_not_taken_for_work(name: str, rate_per_s: float) -> None:
    """Engines whose memory is full let prompts wait while they only decode: up to seven times the work."""
    pool = pool_after(240.0, name=name, rate_per_s=rate_per_s, count=4)
    assert pool.off() < 0.1


def test_reporters_that_do_not_see_each_other_learn_the_same() -> None:
    pool = pool_after(90.0, reporters=4)
    assert pool.off() < 0.03


@pytest.mark.parametrize(("late_max_s", "kept_share"), [(0.3, 1.0), (0.0, 0.5)])
def test_lost_and_disordered_outcomes_teach_less_but_nothing_wrong(late_max_s: float, kept_share: float) -> None:
    profile, rng = profiles()["L70"], Random(1)
    pool = Pool(profile, prior_factor=2.0)
    events = Engines(profile, rows(), count=8, seed=1).run(90.0, rate_per_s=11.0, believed=lambda: pool.published)
    heard = [(event.at_wall_s + rng.uniform(0.0, late_max_s), event) for event in events if rng.random() < kept_share]
    pool.learn(event for _, event in sorted(heard, key=lambda pair: pair[0]))
    assert pool.off() < 0.03


def test_engines_that_became_slower_are_learned_anew() -> None:
    profile = profiles()["L70"]
    pool = Pool(profile, prior_factor=1.0)
    pool.learn(Engines(profile, rows(), count=8, seed=1).run(60.0, rate_per_s=8.0, believed=lambda: pool.published))
    pool.profile = slowed(profile, 2.0)
    again = Engines(pool.profile, rows(), count=8, seed=2, start_s=60.0)
    pool.learn(again.run(120.0, rate_per_s=4.0, believed=lambda: pool.published))
    assert pool.off() < 0.03


@pytest.mark.parametrize("queued", [False, True])
def test_nine_of_ten_first_tokens_come_within_the_margin(queued: bool) -> None:
    covered = pool_after(180.0).covered[queued]
    assert fmean(covered[len(covered) // 3 :]) == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("rate_per_s", [9.5, 16.0])
def test_the_bias_stays_an_offset_of_milliseconds_however_long_the_queues(rate_per_s: float) -> None:
    assert 0.0 <= pool_after(90.0, rate_per_s=rate_per_s).published.bias_s < 0.05
