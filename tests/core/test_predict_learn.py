"""Learning a pool: true coefficients, margins and hits are found from first tokens; bad samples are not used."""

from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY
from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.predict.learn import PoolLearner
from tokenfleet.core.predict.sample import FirstTokens, Sample, sample_of
from tokenfleet.core.predict.work import prefill_work_s, prior_coefficients, uncached_tokens
from tokenfleet.core.records import OutcomeEvent, OutcomeKind, PlacedOn

MODEL = POLICY.model("large-chat")
PRIOR = prior_coefficients(MODEL, factor=1.0)


def sample(
    at_s: float = 1.0, *, took_s: float = 0.2, instance: str = "b-0", clock: str = "g-1", **facts: Any
) -> Sample:
    known: dict[str, Any] = {"prompt_tokens": 4096, "cached_tokens": 0, "placed": PlacedOn(work_s=0.2)}
    return Sample(instance=instance, clock=clock, dispatched_s=at_s - took_s, first_token_s=at_s, **(known | facts))


def learner(**policy: Any) -> PoolLearner:
    return PoolLearner("large-chat@b", "large-chat", model=MODEL, policy=TokenPilotPolicy(**policy))


def engine(truth: Coefficients, count: int, *, seed: int = 1, rate: float = 4.0) -> list[Sample]:
    """First tokens of one engine that prefills in order and follows `truth`, with 3 % noise, open-loop arrivals."""
    rng, now_s, free_s = Random(seed), 0.0, 0.0
    firsts: list[float] = []
    made: list[Sample] = []
    for _ in range(count):
        now_s += rng.expovariate(rate)
        prompt = round(min(rng.lognormvariate(7.6, 1.2), 60_000.0))
        hit = prompt // 512 * 512 if rng.random() < 0.3 else 0
        decoding = rng.randrange(0, 40)
        uncached = uncached_tokens(prompt, hit)
        work_s = prefill_work_s(
            uncached,
            hit,
            decoding=decoding,
            context_tokens=decoding * 1500.0,
            coefficients=truth,
            budget_tokens=MODEL.budget_tokens,
        )
        queued = sum(first > now_s for first in firsts)
        start_s = max(now_s, free_s)
        free_s = start_s + work_s * rng.gauss(1.0, 0.03)
        firsts.append(free_s)
        placed = PlacedOn(
            hit_tokens=hit,
            uncached_tokens=uncached,
            queued=queued,
            decoding=decoding,
            context_tokens=decoding * 1500.0,
            wait_s=max(start_s - now_s, 0.0),
            work_s=work_s,
        )
        made.append(
            Sample(
                instance="b-0",
                clock="g-1",
                dispatched_s=now_s,
                first_token_s=free_s,
                prompt_tokens=prompt,
                cached_tokens=hit,
                placed=placed,
            )
        )
    return made


def test_an_unlearned_pool_starts_high() -> None:
    coefficients = learner(unlearned_factor=1.5).calibration().coefficients
    assert coefficients.a_s == pytest.approx(1.5 * PRIOR.a_s)
    assert coefficients.samples == 0.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 4.0])
def test_the_work_coefficient_is_found_in_a_few_hundred_outcomes(factor: float) -> None:
    truth = replace(PRIOR, a_s=PRIOR.a_s * factor, c0_s=PRIOR.c0_s * factor, w_min_s=PRIOR.w_min_s * factor)
    pool = learner()
    for each in engine(truth, 400, rate=3.0 / factor):
        pool.observe(each)
    found = pool.calibration().coefficients
    assert found.a_s == pytest.approx(truth.a_s, rel=0.1)
    assert found.c0_s == pytest.approx(truth.c0_s, rel=0.35)
    assert found.samples > 200


def test_a_coefficient_without_evidence_stays_where_it_started() -> None:
    pool = learner(unlearned_factor=1.5)
    for n in range(300):  # short prompts: attention over the context explains nothing
        pool.observe(sample(float(n), took_s=0.06, prompt_tokens=1024))
    found = pool.calibration().coefficients
    assert found.d_s / PRIOR.d_s == pytest.approx(1.5)
    assert found.b_s / PRIOR.b_s == pytest.approx(1.5)
    assert found.a_s != pytest.approx(1.5 * PRIOR.a_s, rel=0.01)


def test_one_stalled_request_hardly_moves_what_was_learned() -> None:
    pool = learner()
    for each in engine(PRIOR, 400):
        pool.observe(each)
    before = pool.calibration().coefficients.a_s
    for at_s in (10_000.0, 20_000.0):
        pool.observe(sample(at_s, took_s=600.0))
    assert pool.calibration().coefficients.a_s == pytest.approx(before, rel=0.25)


@pytest.mark.parametrize("took_s", [0.0, -1.0, float("nan"), float("inf"), 1e300])
def test_an_impossible_duration_poisons_nothing(took_s: float) -> None:
    pool = learner()
    for at_s in (1.0, 2.0, 3.0):
        pool.observe(sample(at_s, took_s=took_s, clock=""))
    calibration = pool.calibration()
    found = calibration.coefficients
    assert all(0.0 < value < 1.0 for value in (found.c0_s, found.a_s, found.b_s, found.d_s))
    assert 0.0 <= calibration.margin_idle < 10.0
    assert abs(calibration.bias_s) < 1.0


def test_a_prefill_is_measured_from_the_first_token_before_it() -> None:
    stream = FirstTokens()
    stream.add(sample(1.0))
    stream.add(sample(1.5, took_s=0.9))
    released = stream.add(sample(3.0))
    assert released is not None
    assert (released[0].first_token_s, released[1]) == (1.5, 1.0)


def test_first_tokens_of_one_iteration_are_not_learned_from() -> None:
    stream = FirstTokens()
    alone = sample(1.0)
    assert stream.add(alone) is None
    assert stream.add(sample(2.0)) == (alone, 0.8)
    assert stream.add(sample(2.0005)) is None  # neither the one at 2.0 ...
    assert stream.add(sample(3.0)) is None  # ... nor its sibling
    released = stream.add(sample(4.0))
    assert released is not None
    assert released[0].first_token_s == 3.0


def test_work_of_sequences_that_nobody_here_saw_is_not_counted_as_ones_own() -> None:
    stream = FirstTokens()
    behind = replace(sample(2.0, took_s=1.5), placed=PlacedOn(queued=2))
    stream.add(sample(1.0))
    stream.add(behind)  # one of the two ahead was another reporter's
    assert stream.add(sample(3.0)) is None


def test_margins_cover_nine_of_ten() -> None:
    pool, rng = learner(), Random(2)
    offs = [abs(rng.gauss(0.0, 0.2)) for _ in range(500)]
    for n, off in enumerate(offs):
        pool.observe(sample(float(n), took_s=0.2 * (1 + off), placed=PlacedOn(work_s=0.2, queued=n % 2)))
    calibration = pool.calibration()
    for margin, seen in ((calibration.margin_idle, offs[::2]), (calibration.margin_queued, offs[1::2])):
        assert sum(off <= margin + 1e-9 for off in seen) / len(seen) == pytest.approx(0.9, abs=0.02)


def test_a_steady_offset_becomes_the_bias() -> None:
    pool, bias_s = learner(), 0.0
    for n in range(400):
        pool.observe(sample(float(n), took_s=0.25, placed=PlacedOn(work_s=0.2, bias_s=bias_s)))
        bias_s = pool.calibration().bias_s
    assert bias_s == pytest.approx(0.05, rel=0.05)


def test_hits_are_believed_as_far_as_engines_report_them() -> None:
    pool = learner()
    for n in range(1000):
        exact = PlacedOn(work_s=0.2, hit_tokens=1024, kv_state="exact")
        pool.observe(sample(float(n), cached_tokens=1024 if n % 4 else 0, placed=exact))
        pool.observe(sample(n + 0.5, cached_tokens=None, placed=replace(exact, kv_state="approx")))
    calibration = pool.calibration()
    assert calibration.p_hit == pytest.approx(0.75, abs=0.05)
    assert calibration.p_hit_approx == 0.5  # nothing reported: nothing learned


@pytest.mark.parametrize("kind", ["started", "finished", "failed"])
def test_only_first_tokens_are_samples(kind: OutcomeKind) -> None:
    assert sample_of(event(kind)) is None


def test_an_event_is_a_sample_on_its_reporters_clock() -> None:
    made = sample_of(event("first_token", clock="g-1", clock_s=100.0))
    assert made is not None
    assert (made.clock, made.dispatched_s, made.first_token_s) == ("g-1", 99.75, 100.0)
    alone = sample_of(event("first_token"))
    assert alone is not None
    assert (alone.clock, alone.dispatched_s, alone.first_token_s) == ("", 0.0, 0.25)


def event(kind: OutcomeKind, **facts: Any) -> OutcomeEvent:
    return OutcomeEvent(
        request="r",
        attempt=0,
        kind=kind,
        decision="d",
        tenant="acme",
        request_class="chat",
        model="large-chat",
        origin="b",
        instance="b-0",
        at_wall_s=1.8e9,
        elapsed_s=0.3,
        attempt_s=0.25,
        placed=PlacedOn(uncached_tokens=4096, work_s=0.2),
        **facts,
    )


def test_the_work_coefficient_moves_from_the_first_outcomes() -> None:
    pool = learner(unlearned_factor=1.5)
    for n in range(20):
        pool.observe(sample(float(n), took_s=0.166))
    assert pool.calibration().coefficients.a_s < 1.2 * PRIOR.a_s


def test_reported_cached_tokens_are_learned_from_and_not_the_predicted() -> None:
    """The engine computed all 4,096 tokens in the time that they take; the credit was wrong, the model is right."""
    pool = learner(unlearned_factor=1.0)
    for n in range(40):
        pool.observe(sample(float(n), took_s=0.166, placed=PlacedOn(work_s=0.05, hit_tokens=3072)))
    assert pool.calibration().coefficients.a_s == pytest.approx(PRIOR.a_s, rel=0.05)


def test_without_a_clock_only_uncontended_starts_are_learned_from() -> None:
    pool = learner()
    for n in range(10):
        pool.observe(sample(float(n), clock="", placed=PlacedOn(work_s=0.2, queued=1)))
    assert pool.calibration().coefficients.samples == 0
    pool.observe(sample(20.0, clock=""))
    assert pool.calibration().coefficients.samples == 1
