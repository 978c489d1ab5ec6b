"""Links: what arrives, when and in which order."""

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.sim.links import Link, LinkTerms

SHARES = st.floats(0.0, 1.0)
SENT_S = [number * 0.01 for number in range(2_000)]


def arrivals(seed: int = 0, **terms: float) -> list[tuple[float, ...]]:
    link = Link(LinkTerms(**terms), Random(seed))
    return [link.arrivals_s(sent_s) for sent_s in SENT_S]


def test_a_constant_delay_is_that_and_once() -> None:
    assert arrivals(delay_s=0.25) == [(sent_s + 0.25,) for sent_s in SENT_S]


def test_jitter_keeps_the_order_of_sending() -> None:
    came_s = [at_s for (at_s,) in arrivals(delay_s=0.01, jitter_s=0.5)]
    assert all(before <= after for before, after in pairwise(came_s))
    assert max(at_s - sent_s for at_s, sent_s in zip(came_s, SENT_S, strict=True)) > 0.4


def test_a_reordered_record_is_overtaken() -> None:
    came_s = [at_s for (at_s,) in arrivals(delay_s=0.01, reorder=0.1, late_s=1.0)]
    assert 0.02 < sum(before > after for before, after in pairwise(came_s)) / len(came_s) < 0.2


def test_loss_and_duplicates_are_the_shares_asked_for() -> None:
    numbers = [len(times) for times in arrivals(loss=0.3, duplicate=0.2)]
    assert 0.27 < numbers.count(0) / len(numbers) < 0.33
    assert 0.11 < numbers.count(2) / len(numbers) < 0.17  # of what is not lost


@given(st.integers(0, 99), SHARES, SHARES, SHARES, st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_nothing_arrives_before_the_delay_and_equal_seeds_agree(
    seed: int, loss: float, duplicate: float, reorder: float, delay_s: float, jitter_s: float
) -> None:
    terms = {"loss": loss, "duplicate": duplicate, "reorder": reorder, "delay_s": delay_s, "jitter_s": jitter_s}
    came = arrivals(seed, **terms)[:50]
    assert came == arrivals(seed, **terms)[:50]
    for sent_s, times in zip(SENT_S, came, strict=False):
        assert all(sent_s + delay_s <= at_s <= sent_s + delay_s + 2.5 + jitter_s for at_s in times)
