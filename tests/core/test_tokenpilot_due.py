"""Due: the time that most requests keep, and the order that follows from it."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.policy import LateBindingPolicy
from tokenfleet.core.tokenpilot.due import HEARD_MAX, Due, rank

TERMS = LateBindingPolicy()
TICKS = st.integers(0, 6400)  # of 1/64 s: sums of them are exact


def test_what_95_of_the_last_keep_is_learned_and_follows_the_load() -> None:
    due, chance = Due(), Random(1)
    for load in (1.0, 4.0, 0.1):
        for _ in range(HEARD_MAX):
            due.heard(load * chance.random())
        assert 0.94 * load < due.due_s < 0.96 * load


def test_before_the_first_report_nothing_is_due_and_after_it_that_one_is() -> None:
    due = Due()
    assert due.due_s == 0.0
    due.heard(3.0)
    assert due.due_s == 3.0


def test_without_a_due_time_or_a_weight_the_order_is_work_less_ageing() -> None:
    unweighted = LateBindingPolicy(due_weight=0.0)
    assert rank(2.0, 4.0, 0.0, TERMS) == rank(2.0, 4.0, 7.0, unweighted) == 2.0 - 4.0 * TERMS.age_gain


@given(work=TICKS, age=TICKS, due=TICKS, part=st.integers(0, 64))
def test_of_two_with_equal_slack_the_one_with_less_work_goes_first(work: int, age: int, due: int, part: int) -> None:
    less = work * part // 64
    earlier = age + work - less  # it has waited by so much longer
    assert rank(less / 64, earlier / 64, due / 64, TERMS) <= rank(work / 64, age / 64, due / 64, TERMS)


def test_a_long_prompt_gains_as_it_nears_its_due_time_and_loses_all_when_it_is_past() -> None:
    places = [rank(2.0, age_s, 4.0, TERMS) for age_s in (0.0, 1.0, 1.9)]
    assert places == sorted(places, reverse=True)
    assert places[-1] < 0.1 < 1.8 < rank(2.0, 2.1, 4.0, TERMS)
