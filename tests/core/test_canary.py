"""Canary: a good one is let through, a bad one is stopped, and asking every second costs nothing."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.canary import (
    CONFIDENCE,
    SAMPLES_MIN,
    SLOWER_RATIO,
    Arm,
    bucket_of,
    judged,
    least_share,
    loss_bound,
    quantile_s,
)
from tokenfleet.core.revisions import MARGIN_S

counts = st.integers(0, 5000)


def arm(requests: int, *, met: float = 1.0, failed: int = 0, ttft_s: tuple[float, ...] = ()) -> Arm:
    """`met` is the share of its requests, all chat, within their level."""
    times: dict[int, int] = {}
    for seconds in ttft_s:
        times[bucket_of(seconds)] = times.get(bucket_of(seconds), 0) + 1
    return Arm(
        requests=requests, failed=failed, met={"chat": round(met * requests)}, offered={"chat": requests}, ttft=times
    )


def verdict(base: Arm, canary: Arm, *, elapsed_s: float = 60.0, for_s: float = 600.0) -> tuple[str, str]:
    return judged(base, canary, elapsed_s=elapsed_s, for_s=for_s)


def test_equal_arms_run_their_time_and_are_promoted() -> None:
    base, canary = arm(9000, met=0.95), arm(1000, met=0.95)
    assert verdict(base, canary, elapsed_s=599.0) == ("running", "1000 requests beside 9000, 1 s to go")
    assert verdict(base, canary, elapsed_s=600.0) == ("promoted", "no worse over 1000 requests beside 9000 in 600 s")


def test_a_canary_that_misses_its_service_level_ends_at_once_and_says_by_how_much() -> None:
    assert verdict(arm(2700, met=0.97), arm(300, met=0.6)) == (
        "rolled_back",
        "chat within service level 60.0% of 300, 97.0% of 2700",
    )


def test_one_class_that_suffers_is_enough() -> None:
    base, canary = arm(9000, met=0.97), arm(1000, met=0.97)
    base.met["batch"], base.offered["batch"] = 950, 1000
    canary.met["batch"], canary.offered["batch"] = 10, 110
    assert verdict(base, canary)[1].startswith("batch within service level 9.1%")


def test_failures_end_it_with_few_samples_if_the_others_do_not_fail_too() -> None:
    assert verdict(arm(100), arm(10, failed=10)) == (
        "rolled_back",
        "10 of its 10 requests failed, 0 of 100 of the others",
    )
    assert verdict(arm(100, failed=90), arm(10, failed=10))[0] == "running"
    assert verdict(arm(100), arm(9, failed=9))[0] == "running"
    assert verdict(arm(9000, failed=9), arm(1000, failed=200))[1].startswith("20.0% failed, 0.1%")


@pytest.mark.parametrize(("ratio", "ends"), [(1.0, "running"), (SLOWER_RATIO - 0.05, "running"), (2.0, "rolled_back")])
def test_slower_first_tokens_end_it_beyond_a_tenth(ratio: float, ends: str) -> None:
    rng = Random(1)
    base = arm(5000, ttft_s=tuple(rng.lognormvariate(-1.5, 0.6) for _ in range(5000)))
    canary = arm(1000, ttft_s=tuple(ratio * rng.lognormvariate(-1.5, 0.6) for _ in range(1000)))
    ended, reason = verdict(base, canary)
    assert ended == ends
    assert ended == "running" or reason.startswith("p50 of time to first token")


def test_a_longer_tail_ends_it_too() -> None:
    base, canary = arm(9000, ttft_s=(0.1,) * 9000), arm(1000, ttft_s=(0.1,) * 850 + (2.0,) * 150)
    assert verdict(base, canary)[1] == "p95 of time to first token 2000 ms, 101 ms of the others"


def test_too_few_samples_are_no_promotion_and_an_unjudged_end_is_none() -> None:
    few = arm(SAMPLES_MIN - 1)
    assert verdict(arm(9000), few, elapsed_s=600.0) == (
        "rolled_back",
        "99 requests beside 9000 in 600 s, at least 100 of each are needed",
    )
    assert verdict(arm(9000), arm(1000), elapsed_s=600.0 + MARGIN_S)[1] == "nobody judged it within 60 s of its end"


@given(bad=counts, good=counts, bad_other=counts, good_other=counts)
def test_the_bound_lies_below_the_difference_and_more_of_the_same_raises_it(
    bad: int, good: int, bad_other: int, good_other: int
) -> None:
    of, of_other = bad + good + 1, bad_other + good_other + 1
    bound = loss_bound(bad, of, bad_other, of_other, alpha=0.01)
    assert bound < bad / of - bad_other / of_other
    assert bound <= loss_bound(4 * bad, 4 * of, 4 * bad_other, 4 * of_other, alpha=0.01)
    assert bound <= loss_bound(bad, of, bad_other, of_other, alpha=0.1)
    if of == of_other:
        assert loss_bound(bad, of, bad, of, alpha=0.01) < 0.0


@given(
    requests=st.integers(1, 10**6),
    failed=st.floats(0.0, 1.0),
    met=st.floats(0.0, 1.0),
    elapsed_s=st.floats(0.0, 1e6),
    for_s=st.floats(1.0, 1e5),
)
def test_a_canary_like_the_other_arm_is_never_called_worse(
    requests: int, failed: float, met: float, elapsed_s: float, for_s: float
) -> None:
    same = arm(requests, met=met, failed=round(failed * requests), ttft_s=(0.1, 0.2))
    ended, reason = verdict(same, same, elapsed_s=elapsed_s, for_s=for_s)
    assert ended != "rolled_back" or "are needed" in reason or "nobody judged" in reason


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_asked_after_every_few_requests_a_good_canary_is_stopped_no_oftener_than_stated(share: float) -> None:
    """400 trials of 2,000 requests an arm, asked 100 times each."""
    stopped, trials = 0, 400
    for seed in range(trials):
        rng = Random(seed)
        bad = bad_other = 0
        for n in range(1, 101):
            bad += sum(rng.random() < share for _ in range(20))
            bad_other += sum(rng.random() < share for _ in range(20))
            if loss_bound(bad, 20 * n, bad_other, 20 * n, alpha=0.05) > 0.0:
                stopped += 1
                break
    assert stopped / trials <= 0.05


@given(part=st.integers(1, 10**6), rest=counts, alpha=st.floats(1e-6, 0.5))
def test_the_least_share_is_where_the_mixture_outweighs_it_by_one_to_alpha(part: int, rest: int, alpha: float) -> None:
    """∫ p^part (1 − p)^rest dp = part! · rest! / (part + rest + 1)!, against the share's own likelihood."""
    of = part + rest
    least = least_share(part, of, alpha=alpha)
    assert 0.0 < least < part / of
    mixture = math.lgamma(part + 1) + math.lgamma(rest + 1) - math.lgamma(of + 2)
    own = part * math.log(least) + rest * math.log1p(-least)
    assert mixture - own == pytest.approx(-math.log(alpha), rel=1e-3, abs=1e-3)
    assert least_share(0, of, alpha=alpha) == 0.0


def test_the_loss_is_bounded_by_the_least_of_one_arm_and_the_most_of_the_other() -> None:
    """Each arm takes half of the chance of error; beside an arm that is known well only one's own counts."""
    alone = least_share(30, 100, alpha=0.01)
    assert loss_bound(30, 100, 0, 10**9, alpha=0.02) == pytest.approx(alone, abs=1e-6)
    assert loss_bound(10**9, 10**9, 70, 100, alpha=0.02) == pytest.approx(alone, abs=1e-6)


@pytest.mark.parametrize(("requests", "loss"), [(100, 0.2), (200, 0.13), (1000, 0.055), (5000, 0.025)])
def test_what_loss_is_found_among_so_many_requests(requests: int, loss: float) -> None:
    base = arm(9 * requests, met=0.95)
    assert verdict(base, arm(requests, met=0.95 - loss))[0] == "rolled_back"
    assert verdict(base, arm(requests, met=0.95 - 0.5 * loss))[0] == "running"
    assert CONFIDENCE == 0.99


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
def test_a_quantile_is_exact_to_a_bucket(times_s: list[float], share: float) -> None:
    quantile = quantile_s(arm(1, ttft_s=tuple(times_s)).ttft, share)
    assert quantile is not None
    below = sum(seconds <= quantile * 1.0000001 for seconds in times_s)
    assert below >= share * len(times_s) - 1e-9
    assert sum(seconds <= quantile / 1.0443 / 1.0000001 for seconds in times_s) < share * len(times_s) + 1e-9
    assert quantile_s({}, share) is None
