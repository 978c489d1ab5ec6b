"""Compiled: the loops that serve large pools give the bits that the arrays give."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.pools import POLICY, instance, pool, request, route, weights
from tests.core.test_tokenpilot_kernel import facts
from tokenfleet.core import compiled
from tokenfleet.core.backlogs import backlogs_s
from tokenfleet.core.hits import depths_of, planes_of, tokens_held
from tokenfleet.core.load import Load, Standing
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.cost import weigh
from tokenfleet.core.tokenpilot.kernel import least_of

SECONDS = st.floats(0.0, 50.0)


@pytest.fixture(scope="module", autouse=True)
def loops() -> None:
    assert compiled.load()


@settings(max_examples=150)
@given(data=st.data(), prompt=st.integers(0, 140_000), bias_s=st.sampled_from([0.0, -0.3, 0.7]))
def test_a_choice_is_the_same_to_the_last_bit(data: st.DataObject, prompt: int, bias_s: float) -> None:
    each = data.draw(st.lists(facts(), min_size=1, max_size=14))
    view = pool(*[instance(f"b-{n:02d}", **facts) for n, facts in enumerate(each)], bias_s=bias_s, margin_queued=0.6)
    columns = st.none() | st.lists(SECONDS, min_size=len(each), max_size=len(each)).map(np.array)
    options: dict[str, Any] = {
        "ahead_s": data.draw(columns),
        "pace_s": data.draw(columns),
        "allowed": data.draw(st.none() | st.just(np.arange(len(each)) % 2 == 0)),
        "policy": data.draw(st.sampled_from([POLICY, weights(candidates_kept=3, decode_price_s=0.02)])),
        "last_instance": data.draw(st.sampled_from(["", "b-01"])),
    }
    asked = request(prompt, first_key=data.draw(st.none() | st.integers(0, 9)))
    by_arrays, by_loops = [route(view, asked, **options) for _ in forms()]
    assert by_loops == by_arrays


@pytest.mark.parametrize("size", [1, 8, 9, 10, 600, 1300])
def test_so_are_all_terms_of_any_pool(size: int) -> None:
    view = crowd(size)
    able = np.arange(size) % 5 > 0 if size > 5 else None
    by_arrays, by_loops = [weighed(view, able) for _ in forms()]
    assert by_loops == by_arrays
    costs = weigh(9000, view, POLICY.tokenpilot, able, output_q50=100.0)
    slots = [slot for slot in range(size) if able is None or able[slot]]
    least = sorted(slots, key=lambda slot: (costs.cost_s[slot], slot))[: POLICY.tokenpilot.candidates_kept + 1]
    assert costs.least == least  # equal costs in the order of the names


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=9), SECONDS)
def test_so_is_the_backlog(standings: list[tuple[float, float, float]], now_s: float) -> None:
    work_s, began_s, head_s = np.array(standings).T.copy()
    by_arrays, by_loops = [backlogs_s.of(len(standings))(work_s, began_s, head_s, now_s) for _ in forms()]
    assert by_loops.tolist() == by_arrays.tolist()
    assert by_loops.tolist() == [
        Standing(load=Load(backlog_s=work), head_began_s=began, head_work_s=head).at(now_s).backlog_s
        for work, began, head in standings
    ]


@given(st.lists(st.lists(st.booleans(), min_size=20, max_size=20), max_size=11))
def test_hits_are_the_same_too(held: list[list[bool]]) -> None:
    bitsets = [sum(has << slot for slot, has in enumerate(plane)) for plane in held] or [0]
    planes = planes_of(bitsets, 20)
    places = np.array([-1, *range(20), 3, -1])
    by_arrays, by_loops = [tokens_held.of(len(places))(planes, places, 256) for _ in forms()]
    assert by_loops.tolist() == by_arrays.tolist()
    counted = [sum((bitset >> slot & 1) << bit for bit, bitset in enumerate(bitsets)) for slot in range(20)]
    assert by_loops.tolist() == [256 * (counted[place] if place >= 0 else 0) for place in places.tolist()]
    assert depths_of(planes)[:20].tolist() == counted


@given(st.lists(st.integers(0, 40), min_size=600, max_size=900), st.integers(1, 12))
def test_the_least_of_many_are_the_first_of_the_sorted(costs: list[int], number: int) -> None:
    slots = sorted(range(len(costs)), key=lambda slot: (costs[slot], slot))
    assert least_of(np.array(costs, np.float64), number).tolist() == slots[:number]


def test_without_a_compiler_or_a_folder_for_its_work_all_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = compiled.Twin(lambda number: -number, lambda number: number, sample=lambda: (1,))  # other than alike: seen
    monkeypatch.setattr(compiled, "_twins", [twin])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        assert not compiled.load()
    assert twin.of(1 << 20)(3) == -3
    twin.compile(Unkept, lambda formula: formula)
    assert (twin.of(1 << 20)(3), twin.of(compiled.COMPILED_FROM - 1)(3)) == (3, -3)


class Unkept:
    """A compiler that finds no folder to keep its work in."""

    def __init__(self, *, error_model: str, cache: bool = False) -> None:
        if cache:
            raise RuntimeError("no locator available")

    def __call__(self, loop: Any) -> Any:
        return Loop(loop)


class Loop:
    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def __call__(self, *args: Any) -> Any:
        return self._loop(*args)

    def disable_compile(self) -> None:
        pass


def forms() -> Any:
    """Once with nothing but arrays, once with nothing but loops."""
    with pytest.MonkeyPatch.context() as patch:
        for compiled_from in (1 << 40, 0):
            patch.setattr(compiled, "COMPILED_FROM", compiled_from)
            yield


def crowd(size: int) -> PoolView:
    """Instances in pairs that cost the same; some say little."""
    return pool(
        *[
            instance(
                f"b-{slot:04d}",
                backlog_s=n * 7919 % 97 / 9,
                queued=n % 3,
                hit_tokens=1000 * (n % 11),
                p_hit=0.9,
                kv_held_tokens=None if n % 50 == 7 else 3e3 * (n % 401),
                age_s=n % 17 / 2,
                weight=1.0 + (n % 4),
            )
            for slot in range(size)
            for n in (slot // 2,)
        ]
    )


def weighed(view: PoolView, able: Any) -> tuple[Any, ...]:
    costs = weigh(9000, view, POLICY.tokenpilot, able, output_q50=100.0)
    return costs.terms.tobytes(), costs.least, costs.all_least, costs.most_wait_s, costs.most_ttft_s
