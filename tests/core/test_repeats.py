"""Repeats: a repeated call places nothing twice, and nobody gets another's answer."""

import pytest

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, ROUTE, SCHEDULE
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.repeats import ANSWERS_KEPT_S, ANSWERS_MAX, Repeats


def test_a_repeated_call_gets_its_answer_again_for_a_while() -> None:
    b, repeats = Town("b", small=1), Repeats()
    request = asked("r1")
    decision = b.decide(request).decision
    repeats.answer(request, SCHEDULE, decision, now_s=0.0)
    assert repeats.answered(request, SCHEDULE, now_s=ANSWERS_KEPT_S) is decision
    assert repeats.answered(request, SCHEDULE, now_s=ANSWERS_KEPT_S + 0.1) is None


def test_another_attempt_question_or_tenant_is_another_call() -> None:
    b, repeats = Town("b", small=1), Repeats()
    repeats.answer(asked("r1"), ROUTE, b.decide(asked("r1")).decision, now_s=0.0)
    assert repeats.answered(asked("r1"), ROUTE, now_s=0.0) is not None
    assert repeats.answered(asked("r1"), ADMIT, now_s=0.0) is None
    assert repeats.answered(asked("r1", attempt=1), ROUTE, now_s=0.0) is None
    assert repeats.answered(asked("r1", tenant="globex"), ROUTE, now_s=0.0) is None


@pytest.mark.parametrize("other", [{"prompt_tokens": 999}, {"block_keys": b"\1" * 8}, {"model": "large-chat"}])
def test_one_id_for_two_prompts_is_refused(other: dict[str, object]) -> None:
    b, repeats = Town("b", small=1), Repeats()
    repeats.answer(asked("r1"), SCHEDULE, b.decide(asked("r1")).decision, now_s=0.0)
    with pytest.raises(BadRequestError, match="another prompt or model"):
        repeats.answered(asked("r1", **other), SCHEDULE, now_s=0.0)
    assert repeats.answered(asked("r1", elapsed_s=1.0), SCHEDULE, now_s=0.0) is not None


def test_a_refused_caller_is_asked_anew() -> None:
    b, repeats = Town("b"), Repeats()
    refused = b.decide(asked("r1")).decision
    assert refused.verdict == "reject"
    repeats.answer(asked("r1"), SCHEDULE, refused, now_s=0.0)
    assert repeats.answered(asked("r1"), SCHEDULE, now_s=0.0) is None


def test_answers_are_bounded_in_number_and_age() -> None:
    decision, repeats = Town("b", small=1).decide(asked("r")).decision, Repeats()
    for n in range(ANSWERS_MAX + 100):
        repeats.answer(asked(f"r{n}"), SCHEDULE, decision, now_s=0.0)
    assert len(repeats) == ANSWERS_MAX
    repeats.answer(asked("later"), SCHEDULE, decision, now_s=ANSWERS_KEPT_S + 0.1)
    assert len(repeats) == 1


def test_a_held_call_is_answered_queue_for_as_long_as_it_is_held() -> None:
    b, repeats = Town("b", small=1), Repeats()
    b.place(asked("running", prompt_tokens=60_000), steps=ROUTE)
    request = asked("r1", wait_max_s=60.0)
    queue = b.decide(request, steps=ROUTE).decision
    assert queue.verdict == "queue"
    repeats.waits(request, ROUTE, queue, now_s=0.0)
    assert repeats.answered(request, ROUTE, now_s=10 * ANSWERS_KEPT_S) is queue
    with pytest.raises(BadRequestError, match="another prompt or model"):
        repeats.answered(asked("r1", prompt_tokens=999), ROUTE, now_s=0.0)
    repeats.leaves(request, ROUTE)
    assert repeats.answered(request, ROUTE, now_s=0.0) is None
    final = b.decide(asked("r1"), steps=ROUTE).decision
    repeats.answer(request, ROUTE, final, now_s=60.0)
    assert repeats.answered(request, ROUTE, now_s=60.0) is final
