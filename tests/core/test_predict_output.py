"""Output estimates: quantiles, shrinkage to the wider estimate, bounds."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.pools import POLICY
from tokenfleet.core.accounts import OutputEstimate
from tokenfleet.core.predict.lengths import Lengths
from tokenfleet.core.predict.output import ROUTES_MAX, OutputLearner, OutputTable, input_bucket

MODEL = POLICY.model("small-chat")


def quantiles(table: OutputTable, *, tenant: str = "acme", prompt: int = 1000, budget: int = 0) -> tuple[float, float]:
    return table.quantiles(tenant=tenant, model="small-chat", prior=MODEL, prompt_tokens=prompt, budget_tokens=budget)


def filled(*tokens: int) -> Lengths:
    lengths = Lengths()
    for each in tokens:
        lengths.add(each)
    return lengths


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bucket_of_the_exact_one(tokens: list[int], q: float) -> None:
    exact = sorted(tokens)
    rank = q * len(tokens)
    low, high = exact[max(int(rank) - 2, 0)], exact[min(int(rank) + 1, len(tokens) - 1)]
    assert low / 1.06 <= filled(*tokens).quantile(q) <= high * 1.06


def test_old_lengths_are_forgotten() -> None:
    lengths = filled(*[100] * 3000, *[1000] * 3000)
    assert lengths.quantile(0.5) == pytest.approx(1000, rel=0.06)
    assert lengths.samples <= 2000


def test_millions_of_lengths_keep_their_scale() -> None:
    lengths = filled(*[100] * 600_000)
    assert lengths.quantile(0.5) == pytest.approx(100, rel=0.06)
    assert lengths.samples == pytest.approx(2000, rel=0.01)


def test_nothing_learned_gives_the_policys_prior() -> None:
    assert quantiles(OutputTable()) == (256.0, 640.0)


def test_a_route_is_believed_as_far_as_it_has_samples() -> None:
    model = OutputEstimate(model="small-chat", q50=100, q90=200, samples=1e9)
    route = OutputEstimate(tenant="acme", model="small-chat", bucket=input_bucket(1000), q50=500, q90=800, samples=50)
    table = OutputTable([model, route])
    assert quantiles(table) == pytest.approx((300.0, 500.0))  # 50 / (50 + 50): half way
    assert quantiles(table, tenant="globex") == pytest.approx((100.0, 200.0))
    assert quantiles(table, prompt=5000) == pytest.approx((100.0, 200.0))


def test_the_budget_is_a_bound_and_never_the_estimate() -> None:
    assert quantiles(OutputTable(), budget=50) == (50.0, 50.0)
    assert quantiles(OutputTable(), budget=2**31 - 1) == (256.0, 640.0)
    assert quantiles(OutputTable(), prompt=MODEL.context_max_tokens) == (1.0, 1.0)


def test_learned_quantiles_reach_the_reader() -> None:
    learner, rng = OutputLearner(), Random(3)
    for _ in range(4000):
        learner.observe(
            tenant="acme", model="small-chat", prompt_tokens=1000, output_tokens=round(rng.lognormvariate(4.6, 0.7))
        )
    q50, q90 = quantiles(OutputTable(learner.estimates()))
    assert q50 == pytest.approx(99.5, rel=0.1)  # e^4.6
    assert q90 == pytest.approx(244.0, rel=0.15)  # e^(4.6 + 1.2816 · .7)


def test_names_made_up_by_callers_take_bounded_memory() -> None:
    learner = OutputLearner()
    for n in range(ROUTES_MAX + 500):
        learner.observe(tenant=f"t{n}", model="small-chat", prompt_tokens=10, output_tokens=10)
    assert len(learner.estimates()) == ROUTES_MAX + 2
