"""The bounds: a request alone on an engine with a cache that all share."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.test_engine import FOREVER_S
from tokenfleet.sim.bounds import SharedCache, bounded, decode_alone_s, prefill_alone_s
from tokenfleet.sim.engine.events import Finished, FirstToken, Job
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.traces.rows import TraceRow

L70 = profiles()["L70"]
BLOCK = L70.block_size


def row(at_s: float, *ids: int, output: int = 1) -> TraceRow:
    return TraceRow(at_s=at_s, prompt_tokens=BLOCK * len(ids), output_tokens=output, hash_ids=ids)


@pytest.mark.parametrize(("prompt", "output"), [(100, 1), (5_000, 2), (70_001, 300)])
@pytest.mark.parametrize("profile", ["L70", "DSV3", "GLM5"])
def test_alone_takes_as_long_as_the_engine_itself(profile: str, prompt: int, output: int) -> None:
    of = profiles()[profile]
    machine = EngineMachine(of)
    machine.submit(Job(id="j", prompt_tokens=prompt, output_tokens=output, max_tokens=output), 0.0)
    events = machine.advance(FOREVER_S)
    first_s = next(event.at_s for event in events if isinstance(event, FirstToken))
    end_s = next(event.at_s for event in events if isinstance(event, Finished))
    assert prefill_alone_s(of, prompt_tokens=prompt, cached_tokens=0) == pytest.approx(first_s)
    assert decode_alone_s(of, prompt_tokens=prompt, output_tokens=output) == pytest.approx(end_s - first_s)


def test_a_prompt_is_cached_for_the_next_whoever_served_it() -> None:
    first, second = bounded([row(0.0, 1, 2, 3), row(0.1, 1, 2, 3, 4)], L70, blocks_max=None)
    assert (first.cached_tokens, second.cached_tokens) == (0, 3 * BLOCK)
    assert second.ttft_s == prefill_alone_s(L70, prompt_tokens=4 * BLOCK, cached_tokens=3 * BLOCK)
    assert second.ttft_s < first.ttft_s


def test_the_last_tokens_of_a_cached_prompt_are_computed_all_the_same() -> None:
    _, again = bounded([row(0.0, 1, 2), row(1.0, 1, 2)], L70, blocks_max=None)
    assert again.cached_tokens == BLOCK


def test_a_single_token_has_no_time_per_token() -> None:
    one, more = bounded([row(0.0, 1, output=1), row(0.0, 1, output=3)], L70, blocks_max=None)
    assert (one.tpot_s, one.e2e_s) == (None, one.ttft_s)
    assert more.tpot_s is not None
    assert more.e2e_s == pytest.approx(more.ttft_s + 2 * more.tpot_s)


def test_the_oldest_prompt_loses_its_deepest_block_first() -> None:
    cache = SharedCache(4)
    cache.use((1, 2, 3), reusable=3)
    cache.use((11, 12), reusable=2)
    assert cache.use((1, 2, 3), reusable=3) == 2


@given(
    prompts=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True), max_size=30),
    room=st.integers(1, 20),
)
def test_more_room_never_finds_less(prompts: Sequence[Sequence[int]], room: int) -> None:
    rows = [row(float(n), *chain(ids)) for n, ids in enumerate(prompts)]
    small = bounded(rows, L70, blocks_max=room)
    large = bounded(rows, L70, blocks_max=None)
    assert all(s.cached_tokens <= u.cached_tokens and s.ttft_s >= u.ttft_s for s, u in zip(small, large, strict=True))


def chain(ids: Sequence[int]) -> tuple[int, ...]:
    """Block ids that name the whole prefix, as a trace's do."""
    return tuple(hash(tuple(ids[: depth + 1])) & 0xFFFF_FFFF for depth in range(len(ids)))
