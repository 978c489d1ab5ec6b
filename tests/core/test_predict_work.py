"""Work: the time model against the engine's fitted profile, and its edges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.pools import POLICY
from tokenfleet.core.predict.work import (
    decode_iteration_s,
    prefill_iterations,
    prefill_work_s,
    prior_coefficients,
    uncached_tokens,
)

LARGE = prior_coefficients(POLICY.model("large-chat"), factor=1.0)


def work(
    uncached: int, hit: float = 0, *, decoding: float = 0, context_tokens: float = 0.0, budget_tokens: int = 4096
) -> float:
    return prefill_work_s(
        uncached,
        hit,
        decoding=decoding,
        context_tokens=context_tokens,
        coefficients=LARGE,
        budget_tokens=budget_tokens,
    )


@pytest.mark.parametrize(
    ("prompt", "measured_s"), [(256, 0.0172), (1024, 0.0465), (4096, 0.166), (16_384, 0.693), (65_536, 3.546)]
)
def test_an_idle_prefill_takes_what_the_profile_measured(prompt: int, measured_s: float) -> None:
    """Llama-3.1-70B on 8 H100 in one chunk, the fit of the simulator's L70 profile."""
    assert work(prompt, budget_tokens=prompt) == pytest.approx(measured_s, rel=0.03)


def test_a_cached_prefix_still_costs_attention() -> None:
    assert work(1024, 31_744) > work(1024)
    assert work(1024, 31_744) < 0.1 * work(32_768)


def test_each_chunk_pays_its_iteration() -> None:
    assert work(16_384) - work(16_384, budget_tokens=16_384) == pytest.approx(3 * LARGE.c0_s)


def test_decodes_leave_less_of_each_iteration() -> None:
    assert prefill_iterations(4096, decoding=0, budget_tokens=4096) == 1
    assert prefill_iterations(4096, decoding=1, budget_tokens=4096) == 2
    assert prefill_iterations(10, decoding=5000, budget_tokens=4096) == 10


@given(prompt=st.integers(0, 200_000), hit=st.integers(0, 200_000))
def test_something_is_always_computed(prompt: int, hit: int) -> None:
    uncached = uncached_tokens(prompt, hit)
    assert uncached >= min(max(prompt, 1), 16)
    assert work(uncached, min(hit, prompt)) > 0.0


@given(prompt=st.integers(17, 200_000), hits=st.tuples(st.integers(0, 200_000), st.integers(0, 200_000)))
def test_a_longer_cached_prefix_never_costs_more(prompt: int, hits: tuple[int, int]) -> None:
    shorter, longer = sorted(min(hit, prompt) for hit in hits)
    assert work(uncached_tokens(prompt, longer), longer) <= work(uncached_tokens(prompt, shorter), shorter) * (1 + 1e-3)


def test_an_iteration_of_nothing_takes_no_time() -> None:
    assert decode_iteration_s(decoding=0, context_tokens=0, coefficients=LARGE) == 0.0
    alone = decode_iteration_s(decoding=1, context_tokens=1000, coefficients=LARGE)
    assert alone == pytest.approx(0.0101, rel=0.02)
