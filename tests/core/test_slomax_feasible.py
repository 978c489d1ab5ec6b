"""The feasibility gate: calibrated, soft, probed, and off when it refuses what could have been served."""

from random import Random
from typing import Any

import pytest

from tokenfleet.core.slomax.feasible import Ahead, Gate
from tokenfleet.core.slomax.terms import GatePolicy

TERMS = GatePolicy()


def gate(*ratios: float, **terms: Any) -> Gate:
    """A gate that saw outcomes take these times their prediction."""
    made = Gate("large-chat@b", GatePolicy(**terms))
    for ratio in ratios:
        made.first_token(predicted_s=2.0, actual_s=2.0 * ratio)
    return made


def ahead(wait_s: float = 1.0, prefill_s: float = 0.5, *, ttft_max_s: float | None = 2.0, **facts: Any) -> Ahead:
    return Ahead(wait_s=wait_s, prefill_s=prefill_s, ttft_max_s=ttft_max_s, **facts)


EVEN = [i / 100 for i in range(1, 201)]  # ratios evenly between 0 and 2


def test_the_chance_is_the_share_of_outcomes_that_would_have_been_in_time() -> None:
    judged = gate(*EVEN).judge("r", ahead(1.5, 0.5))  # a ratio of up to 1 is in time
    assert judged.chance == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("ttft_max_s", "answer"),
    [(2.1, "pass"), (1.9, "queue"), (0.9, "queue"), (0.7, "reject"), (0.0, "reject"), (None, "pass")],
)
def test_it_passes_from_a_half_refuses_below_a_fifth_and_queues_between(ttft_max_s: float, answer: str) -> None:
    assert gate(*EVEN).judge("r", ahead(1.5, 0.5, ttft_max_s=ttft_max_s)).answer == answer


def test_time_passed_and_the_way_to_the_client_count() -> None:
    assert gate(*EVEN).judge("r", ahead(ttft_max_s=2.0, elapsed_s=0.6)).answer == "queue"
    assert gate(*EVEN).judge("r", ahead(ttft_max_s=2.0, rtt_s=0.6)).answer == "queue"
    assert gate(*EVEN).judge("r", ahead(ttft_max_s=2.0)).answer == "pass"


def test_nothing_is_refused_on_too_few_outcomes_but_what_is_late_already() -> None:
    few = gate(*EVEN[:29])
    assert few.judge("r", ahead(100.0)).answer == "queue"
    assert few.judge("r", ahead(0.1)).answer == "pass"
    assert few.judge("r", ahead(0.1, elapsed_s=2.1)).answer == "reject"


def test_a_wrong_estimate_is_put_right_by_its_outcomes() -> None:
    """Predicted ten times too long: after thirty outcomes nobody is refused for it."""
    assert gate(*[0.1] * 30).judge("r", ahead(10.0, 5.0)).answer == "pass"


def test_only_the_last_five_hundred_outcomes_count() -> None:
    made = gate(*[5.0] * 400)
    for _ in range(500):
        made.first_token(predicted_s=1.0, actual_s=0.5)
    assert made.judge("r", ahead(2.5, 0.5)).chance == 1.0
    assert len(made._ordered) == 500
    assert made._ordered == sorted(made._recent)


def test_a_deadline_asks_for_the_long_output_to_pass_and_for_the_short_one_to_refuse() -> None:
    made = gate(*[1.0] * 100)
    terms: dict[str, Any] = {"ttft_max_s": None, "tpot_s": 0.05, "output_q50_tokens": 100, "output_q90_tokens": 400}
    assert made.judge("r", ahead(deadline_s=21.6, **terms)).answer == "pass"  # 1.5 s and 400 tokens in 20 s
    assert made.judge("r", ahead(deadline_s=21.4, **terms)).answer == "queue"
    assert made.judge("r", ahead(deadline_s=6.6, **terms)).answer == "queue"  # 100 tokens fit
    assert made.judge("r", ahead(deadline_s=6.4, **terms)).answer == "reject"


def test_a_token_rate_beyond_the_agreed_one_queues_and_is_no_refusal() -> None:
    made = gate(*EVEN).judge("r", ahead(tpot_s=0.07, tpot_max_s=0.06))
    assert (made.answer, made.why) == ("queue", "70 ms a token with it, 60 agreed")


def test_two_in_a_hundred_of_those_to_be_refused_run_and_always_the_same_ones() -> None:
    first, second = gate(*EVEN), gate(*EVEN)
    late = ahead(ttft_max_s=0.1)
    answers = {f"r-{i}": first.judge(f"r-{i}", late).answer for i in range(20_000)}
    assert set(answers.values()) == {"reject", "probe"}
    assert 0.017 <= list(answers.values()).count("probe") / 20_000 <= 0.023
    assert {name: second.judge(name, late).answer for name in answers} == answers
    other = Gate("small-chat@b", TERMS)
    for ratio in EVEN:
        other.first_token(predicted_s=1.0, actual_s=ratio)
    assert {name: other.judge(name, late).answer for name in answers} != answers


def run(made: Gate, requests: int, *, in_time: float, now_s: float, rng: Random, name: str = "r") -> None:
    """So many hopeless requests are judged; of those that run, this share is in time."""
    for i in range(requests):
        request = f"{name}-{now_s}-{i}"
        if made.judge(request, ahead(ttft_max_s=0.1)).answer != "reject":
            made.ended(request, in_time=rng.random() < in_time, now_s=now_s)


def test_a_gate_that_refuses_what_could_have_been_served_stops_and_says_why() -> None:
    made, rng = gate(*EVEN), Random(1)
    run(made, 2_000, in_time=0.9, now_s=10.0, rng=rng)
    assert made.queues_only == ""  # 40 probes prove nothing yet
    run(made, 1_000, in_time=0.9, now_s=20.0, rng=rng)
    assert "of 50 that it would have refused were in time" in made.queues_only
    judged = made.judge("r", ahead(ttft_max_s=0.1))
    assert judged.answer == "queue"
    assert made.queues_only in judged.why


def test_a_gate_that_is_right_goes_on_refusing() -> None:
    made = gate(*EVEN)
    run(made, 50_000, in_time=0.05, now_s=10.0, rng=Random(2))
    assert made.queues_only == ""
    assert made.false_reject_share == pytest.approx(0.05, abs=0.05)


def test_it_refuses_again_by_itself_when_hardly_any_of_those_is_in_time_and_not_soon() -> None:
    made, rng = gate(*EVEN), Random(3)
    run(made, 5_000, in_time=0.9, now_s=10.0, rng=rng)
    assert made.queues_only
    run(made, 1_000, in_time=0.02, now_s=609.0, rng=rng)  # all of those queue, so all are seen
    assert made.queues_only  # not yet ten minutes
    run(made, 1_000, in_time=0.2, now_s=609.5, rng=rng)
    run(made, 1_000, in_time=0.2, now_s=700.0, rng=rng)
    assert made.queues_only
    run(made, 1_000, in_time=0.02, now_s=800.0, rng=rng)
    assert made.queues_only == ""
    assert made.judge("x", ahead(ttft_max_s=0.1)).answer == "reject"


def test_only_what_was_judged_counts_and_each_once() -> None:
    made = gate(*EVEN, probe_share=1.0, probes_min=1)
    made.ended("never-seen", in_time=True, now_s=0.0)
    assert made.false_reject_share is None
    assert made.judge("r", ahead(ttft_max_s=0.1)).answer == "probe"
    for in_time in (False, True, True):
        made.ended("r", in_time=in_time, now_s=0.0)
    assert made.false_reject_share == 0.0


@pytest.mark.parametrize("predicted_s", [0.0, -1.0, float("nan")])
def test_no_number_is_a_residual(predicted_s: float) -> None:
    made = gate()
    made.first_token(predicted_s=predicted_s, actual_s=1.0)
    made.first_token(predicted_s=1.0, actual_s=float("nan"))
    made.first_token(predicted_s=1.0, actual_s=float("inf"))
    assert made._ordered == [100.0]


def test_memory_is_bounded_though_no_request_ever_ends() -> None:
    made = gate(*EVEN, probe_share=1.0)
    for i in range(30_000):
        made.judge(f"r-{i}", ahead(ttft_max_s=0.1))
    assert len(made._watched) == 10_000


def test_what_it_saw_before_it_stopped_refusing_does_not_count_afterwards() -> None:
    made = gate(*EVEN, probe_share=1.0, again_after_s=0.0)
    for i in range(50):
        made.judge(f"a-{i}", ahead(ttft_max_s=0.1))
        made.ended(f"a-{i}", in_time=i >= 44, now_s=0.0)
    assert made.queues_only
    for i in range(50):
        made.judge(f"b-{i}", ahead(ttft_max_s=0.1))
        made.ended(f"b-{i}", in_time=False, now_s=0.0)
    assert made.queues_only == ""
