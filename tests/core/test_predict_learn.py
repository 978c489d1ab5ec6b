"""Learning a pool: true coefficients, margins and hits are found from first tokens; bad samples are not used."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.pools import POLICY
from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.goodput.lessons import Lessons
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.predict.learn import PoolLearner
from tokenfleet.core.predict.margin import Bias
from tokenfleet.core.predict.sample import FirstTokens, Sample, Span, sample_of
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


def engine(truth: Coefficients, count: int) -> list[Sample]:
    """First tokens of prompts that find one engine idle but for its decodes and follow `truth`, with 3 % noise."""
    rng = Random(1)
    made: list[Sample] = []
    for n in range(count):
        prompt = round(min(rng.lognormvariate(7.6, 1.2), 60_000.0))
        hit = prompt // 512 * 512 if rng.random() < 0.3 else 0
        uncached = uncached_tokens(prompt, hit)
        work_s = prefill_work_s(
            uncached, hit, decoding=0, context_tokens=0.0, coefficients=truth, budget_tokens=MODEL.budget_tokens
        )
        placed = PlacedOn(hit_tokens=hit, uncached_tokens=uncached, work_s=work_s)
        took_s = work_s * rng.gauss(1.0, 0.03)
        made.append(sample(100.0 * (n + 1), took_s=took_s, prompt_tokens=prompt, cached_tokens=hit, placed=placed))
    return made


def test_an_unlearned_pool_starts_high() -> None:
    coefficients = learner(unlearned_factor=1.5).calibration().coefficients
    assert coefficients.a_s == pytest.approx(1.5 * PRIOR.a_s)
    assert coefficients.samples == 0.0


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0, 4.0])
def test_the_work_coefficient_is_found_in_a_few_hundred_outcomes(factor: float) -> None:
    truth = replace(PRIOR, a_s=PRIOR.a_s * factor, c0_s=PRIOR.c0_s * factor, w_min_s=PRIOR.w_min_s * factor)
    pool = learner()
    for each in engine(truth, 400):
        pool.observe(each)
    found = pool.calibration().coefficients
    assert found.a_s == pytest.approx(truth.a_s, rel=0.1)
    assert found.c0_s == pytest.approx(truth.c0_s, rel=0.35)
    assert found.samples > 200


def test_a_coefficient_without_evidence_keeps_its_proportion_to_the_work() -> None:
    pool = learner(unlearned_factor=1.5)
    for n in range(300):  # short prompts: attention over the context explains nothing
        pool.observe(sample(float(n), took_s=0.092, prompt_tokens=1024))
    found = pool.calibration().coefficients
    assert found.a_s / PRIOR.a_s > 1.6
    assert found.d_s / PRIOR.d_s == pytest.approx(found.a_s / PRIOR.a_s)
    assert found.b_s / PRIOR.b_s == pytest.approx(found.a_s / PRIOR.a_s)


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


BUDGET = 4096


def spans(*samples: Sample) -> list[Span | None]:
    """What each first token tells of the one before it."""
    stream = FirstTokens(BUDGET)
    return [stream.add(each) for each in samples]


def test_a_prefill_is_measured_from_the_first_token_before_it() -> None:
    span = spans(sample(1.0), sample(1.5, took_s=0.6), sample(3.0))[2]
    assert span is not None
    assert span.seconds == pytest.approx(0.5)
    assert (span.tokens, span.iterations, span.from_rest) == (4096.0, 1, False)


def test_a_prefill_that_finds_the_engine_idle_is_measured_from_its_dispatch() -> None:
    span = spans(sample(1.0), sample(2.0, took_s=0.2), sample(3.0))[2]
    assert span is not None
    assert (span.seconds, span.from_rest) == (pytest.approx(0.2), True)


def test_what_an_iteration_leaves_is_the_head_of_the_prompt_that_waited() -> None:
    """5,000 tokens take two iterations of 4,096; 3,192 of the next prompt's 6,000 are computed in the second."""
    ahead = sample(1.0, took_s=0.4, prompt_tokens=5000)
    behind = sample(1.2, took_s=0.55, prompt_tokens=6000)
    _, first, second = spans(ahead, behind, sample(3.0))
    assert first is not None
    assert second is not None
    assert (first.iterations, first.tokens) == (2, 2 * 4096)
    assert first.pairs == 5000**2 / 2 + 3192**2 / 2
    assert (second.iterations, second.tokens) == (1, 2808)
    assert second.pairs == 6000**2 / 2 - 3192**2 / 2


def test_a_prompt_that_came_within_the_last_iteration_begins_after_it() -> None:
    ahead = sample(1.0, took_s=0.4, prompt_tokens=5000)
    behind = sample(1.5, took_s=0.65, prompt_tokens=6000)  # dispatched at 0.85, the iteration had begun at 0.8
    _, first, second = spans(ahead, behind, sample(3.0))
    assert first is not None
    assert second is not None
    assert (first.iterations, first.tokens) == (2, 5000)
    assert (second.iterations, second.tokens) == (2, 6000)


def test_decodes_take_their_tokens_of_every_iteration() -> None:
    decoding = replace(sample(1.0), placed=PlacedOn(work_s=0.2, decoding=96), prompt_tokens=4001)
    assert [span and span.iterations for span in spans(decoding, sample(2.0))] == [None, 2]


def test_first_tokens_of_one_iteration_are_not_learned_from() -> None:
    alone, last = sample(1.0), sample(4.0)
    found = spans(alone, sample(2.0), sample(2.0005), sample(3.0), last)
    assert [span and span.tokens for span in found] == [None, 4096.0, None, None, 4096.0]


def test_a_first_token_out_of_order_is_left_out() -> None:
    assert spans(sample(2.0), sample(1.0)) == [None, None]


def test_work_of_sequences_that_nobody_here_saw_is_not_counted_as_ones_own() -> None:
    behind = replace(sample(2.0, took_s=1.5), placed=PlacedOn(queued=2))  # one of the two was another reporter's
    assert spans(sample(1.0), behind, sample(3.0))[2] is None


def test_margins_cover_nine_of_ten() -> None:
    pool, rng = learner(), Random(2)
    offs = [abs(rng.gauss(0.0, 0.2)) for _ in range(500)]
    for n, off in enumerate(offs):
        pool.observe(sample(float(n), took_s=0.2 * (1 + off), placed=PlacedOn(work_s=0.2, queued=n % 2)))
    calibration = pool.calibration()
    for margin, seen in ((calibration.margin_idle, offs[::2]), (calibration.margin_queued, offs[1::2])):
        assert sum(off <= margin + 1e-9 for off in seen) / len(seen) == pytest.approx(0.9, abs=0.02)


def test_a_steady_offset_becomes_the_bias() -> None:
    pool = learner()
    for n in range(100):
        pool.observe(sample(float(n), took_s=0.25))
    assert pool.calibration().bias_s == pytest.approx(0.05)


def test_one_stalled_request_is_no_offset() -> None:
    pool = learner()
    for n in range(100):
        pool.observe(sample(100.0 * n, took_s=60.0 if n % 4 == 0 else 0.21))
    assert pool.calibration().bias_s == pytest.approx(0.01)


def test_what_queues_take_longer_is_not_charged_to_idle_instances() -> None:
    pool = learner()
    for n in range(100):
        pool.observe(sample(float(n), took_s=30.0, placed=PlacedOn(work_s=0.2, wait_s=10.0, queued=20)))
    assert pool.calibration().bias_s == 0.0


@given(st.lists(st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 1e3), st.floats(1e-3, 1e3)), max_size=30))
def test_the_bias_never_eats_a_prompts_own_work(seen: list[tuple[float, float, float]]) -> None:
    """However early first tokens come: no more than the longest wait is ever taken back."""
    bias = Bias()
    for actual_s, wait_s, work_s in seen:
        bias.observe(actual_s, wait_s=wait_s, work_s=work_s)
    assert bias.value_s() >= -max((wait_s for _, wait_s, _ in seen), default=0.0)


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


@pytest.mark.parametrize("changed", [{"a_s": 2.0 * MODEL.a_s}, {"budget_tokens": 2 * MODEL.budget_tokens}])
def test_a_model_that_the_policy_describes_anew_is_learned_anew_and_others_go_on(changed: dict[str, Any]) -> None:
    lessons = Lessons()
    for model in ("large-chat", "small-chat"):
        told = replace(event("first_token"), model=model, pool=f"{model}@b")
        lessons.observe([replace(told, clock_s=10.0 * n) for n in range(100)], POLICY)
    assert lessons.follow(replace(POLICY, revision=2)) == ()
    before = {pool.pool: pool for pool in lessons.feedback(at_wall_s=1.8e9).pools}
    assert before["large-chat@b"].coefficients.samples > 0
    policy = replace(POLICY, revision=3, models=POLICY.models | {"large-chat": replace(MODEL, **changed)})
    assert lessons.follow(policy) == ("large-chat@b",)
    assert {pool.pool: pool for pool in lessons.feedback(at_wall_s=1.8e9).pools} == {
        "small-chat@b": before["small-chat@b"]
    }
    lessons.observe([replace(event("first_token"), model="large-chat", pool="large-chat@b")], policy)
    [anew] = [pool for pool in lessons.feedback(at_wall_s=1.8e9).pools if pool.model == "large-chat"]
    expected = policy.tokenpilot.unlearned_factor * policy.models["large-chat"].a_s
    assert (anew.coefficients.samples, anew.coefficients.a_s) == (1.0, pytest.approx(expected, rel=0.3))
    gone = replace(policy, models={"large-chat": policy.models["large-chat"]})
    assert lessons.follow(gone) == ("small-chat@b",)
