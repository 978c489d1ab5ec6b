"""The simulated engine: what a vLLM-like scheduler does with given jobs at given times."""

import math
from itertools import pairwise
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.sim.engine.events import (
    Admitted,
    BlocksRemoved,
    BlocksStored,
    Cleared,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Job,
    Preempted,
    Stepped,
)
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.engine.stretch import Stretch
from tokenfleet.sim.profiles import Profile, profiles

FOREVER_S = 1e6

TINY = Profile(
    source="round figures: 10 ms a step, 1 ms a token, one block is 16 tokens",
    prefill_base_s=0.010,
    decode_base_s=0.010,
    floor_points=((1, 0.010),),
    token_s=0.001,
    pair_s=0.0,
    context_s=1e-6,
    kv_bytes_per_token=1,
    kv_tokens=16 * 64,
    token_budget=64,
    sequences_max=8,
    block_size=16,
)


def job(name: str, prompt: int = 64, out: int = 4, *, chain: int | None = None, cap: int = 10_000) -> Job:
    """A job whose block hashes are those of conversation `chain`; without one nothing is reusable."""
    hashes = () if chain is None else tuple(chain * 1_000 + i for i in range(prompt // 16))
    return Job(id=name, prompt_tokens=prompt, output_tokens=out, max_tokens=cap, block_hashes=hashes)


def run(machine: EngineMachine, *jobs: Job, at_s: float = 0.0) -> list[Event]:
    machine.advance(at_s)
    for each in jobs:
        machine.submit(each, at_s)
    return machine.advance(at_s + FOREVER_S)


E = TypeVar("E", bound=Event)


def of(events: list[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def test_first_token_ends_the_last_prefill_chunk_and_each_step_gives_one_more() -> None:
    events = run(EngineMachine(TINY), job("a", prompt=100, out=3))
    [first], [last] = of(events, FirstToken), of(events, Finished)
    assert first.at_s == pytest.approx(0.010 + 0.064 + 0.010 + 0.036)  # chunks of 64 and 36 tokens
    assert last.at_s == pytest.approx(first.at_s + 2 * 0.011 + 100e-6 + 101e-6)  # two decodes over 100 and 101 tokens
    assert (last.output_tokens, last.reason) == (3, FinishReason.STOP)


def test_max_tokens_cuts_the_output_and_is_the_reason() -> None:
    [last] = of(run(EngineMachine(TINY), job("a", out=9, cap=2)), Finished)
    assert (last.output_tokens, last.reason) == (2, FinishReason.LENGTH)


def test_a_repeated_prompt_reuses_all_blocks_but_the_one_that_must_be_computed() -> None:
    machine = EngineMachine(TINY)
    run(machine, job("a", prompt=64, chain=1))
    [finished] = of(run(machine, job("b", prompt=64, chain=1), at_s=FOREVER_S), Finished)
    assert finished.cached_tokens == 48
    assert machine.load().cached_tokens == 48


def test_a_block_is_visible_only_when_its_chunk_is_computed() -> None:
    machine = EngineMachine(TINY)
    machine.submit(job("a", prompt=100, chain=1), 0.0)
    first_chunk_ends_s = 0.010 + 0.064
    assert not of(machine.advance(first_chunk_ends_s - 1e-6), BlocksStored)
    machine.submit(job("b", prompt=100, chain=1), first_chunk_ends_s - 1e-6)
    events = machine.advance(first_chunk_ends_s)
    [stored] = of(events, BlocksStored)
    assert stored.hashes == (1_000, 1_001, 1_002, 1_003)
    events += machine.advance(FOREVER_S)
    assert [stored.parent for stored in of(events, BlocksStored)] == [None, 1_003]  # b indexes nothing twice
    assert [admitted.cached_tokens for admitted in of(events, Admitted)] == [64]


def test_the_deepest_block_of_the_oldest_chain_is_evicted_first() -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=8))
    run(machine, job("a", prompt=48, out=1, chain=1))
    events = run(machine, job("b", prompt=48, out=1, chain=2), job("c", prompt=48, out=1, chain=3), at_s=FOREVER_S)
    assert [removed.hashes for removed in of(events, BlocksRemoved)] == [(1_002,)]


def test_the_queue_waits_behind_a_head_that_does_not_fit() -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=10))
    events = run(machine, job("big", prompt=96, out=8), job("head", prompt=96, out=1), job("small", prompt=16, out=1))
    assert [admitted.job_id for admitted in of(events, Admitted)] == ["big", "head", "small"]
    ended = {finished.job_id: finished.at_s for finished in of(events, Finished)}
    assert of(events, Admitted)[1].at_s >= ended["big"]


def test_the_newest_decode_is_preempted_computed_again_and_loses_no_token() -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=8))
    events = run(machine, job("old", prompt=48, out=40), job("new", prompt=48, out=40))
    assert {preempted.job_id for preempted in of(events, Preempted)} == {"new"}
    assert {finished.job_id: finished.output_tokens for finished in of(events, Finished)} == {"old": 40, "new": 40}
    assert [first.job_id for first in of(events, FirstToken)] == ["old", "new"]
    assert machine.load().generation_tokens == 80


def test_a_preempted_job_comes_back_before_those_that_waited() -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=8))
    jobs = job("old", prompt=48, out=40), job("new", prompt=48, out=40), job("late", prompt=48, out=1)
    events = run(machine, *jobs)
    assert [admitted.job_id for admitted in of(events, Admitted)] == ["old", "new", "new", "late"]
    [lost], back = of(events, Preempted), of(events, Admitted)[2]
    assert back.at_s > lost.at_s


@pytest.mark.parametrize(("prompt_blocks", "running"), [(98, 2), (99, 1)])
def test_an_admission_leaves_one_percent_of_memory_free(prompt_blocks: int, running: int) -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=200))
    machine.submit(job("a", prompt=1_599, out=10), 0.0)
    machine.submit(job("b", prompt=16 * prompt_blocks, out=10), 0.0)
    machine.advance(25 * 0.074 + 0.001)  # a's 25 chunks are computed: the budget is free for b
    assert machine.load().running == running


def test_an_arrival_is_taken_in_at_the_next_step_not_at_the_end_of_the_leap() -> None:
    machine = EngineMachine(TINY)
    machine.submit(job("a", prompt=16, out=1_000 - 16), 0.0)
    machine.advance(1.0)
    machine.submit(job("b", prompt=16, out=1), 1.0)
    next_step_s = machine.next_step_at_s()
    assert next_step_s is not None
    [admitted] = of(machine.advance(2.0), Admitted)
    assert admitted.at_s == next_step_s


def test_a_job_alone_takes_as_long_as_it_took_on_a_new_machine() -> None:
    machine = EngineMachine(TINY)
    spans_s: list[float] = []
    for start_s, name in ((0.0, "a"), (100.0, "b")):
        machine.submit(job(name, prompt=50, out=60), start_s)
        events = machine.advance(start_s + 100.0)
        spans_s.append(of(events, Finished)[0].at_s - start_s)
    assert spans_s[1] == pytest.approx(spans_s[0], rel=1e-6)


@given(st.floats(0.0, 1e6), st.floats(1e-4, 1.0), st.floats(0.0, 1e-3), st.integers(1, 2_000), st.integers(1, 2_000))
def test_steps_ended_by_a_moment_are_counted_to_the_last_bit(
    start_s: float, first_s: float, growth_s: float, steps: int, ended: int
) -> None:
    stretch = Stretch(start_s, first_s, growth_s, steps=steps, chunks=[], prefill_tokens=0)
    end_s = stretch.end_s(min(ended, steps))
    assert stretch.steps_by(end_s) == min(ended, steps)
    assert stretch.steps_by(math.nextafter(end_s, -math.inf)) == min(ended, steps) - 1


def test_cancel_frees_memory_at_once_and_lets_the_queue_in() -> None:
    machine = EngineMachine(TINY.sized(block_size=16, kv_blocks=10))
    machine.submit(job("a", prompt=96, out=50), 0.0)
    machine.submit(job("b", prompt=96, out=1), 0.0)
    machine.advance(0.5)
    assert (machine.load().running, machine.load().waiting) == (1, 1)
    ended = machine.cancel("a", 0.5)
    assert ended is not None
    assert (ended.reason, ended.output_tokens) == (
        FinishReason.ABORT,
        machine.generated_tokens("a") or ended.output_tokens,
    )
    assert machine.load().kv_used_blocks == 0
    assert machine.cancel("a", 0.5) is None
    [finished] = of(machine.advance(FOREVER_S), Finished)
    assert finished.job_id == "b"


def test_a_cleared_cache_is_told_with_the_next_step_and_refused_while_in_use() -> None:
    machine = EngineMachine(TINY)
    run(machine, job("a", chain=1))
    assert machine.load().kv_cached_blocks == 4
    assert machine.clear_cache(FOREVER_S)
    assert machine.advance(FOREVER_S) == []
    machine.submit(job("b", chain=1), FOREVER_S)
    first, *rest = machine.advance(2 * FOREVER_S)
    assert isinstance(first, Cleared)
    assert of(rest, Finished)[0].cached_tokens == 0
    machine.submit(job("c"), 2 * FOREVER_S)
    machine.advance(2 * FOREVER_S)
    assert not machine.clear_cache(2 * FOREVER_S)


def test_slow_steps_take_longer() -> None:
    healthy, slow = EngineMachine(TINY), EngineMachine(TINY)
    slow.slow_down(3.0, 0.0)
    [at_s], [slow_at_s] = ([e.at_s for e in of(run(each, job("a")), Finished)] for each in (healthy, slow))
    assert slow_at_s == pytest.approx(3 * at_s)


@pytest.mark.parametrize(
    ("name", "prefill_tokens", "measured_ms"),
    [("L70", 256, 17.1), ("L70", 1_024, 46.2), ("L70", 4_096, 169.6), ("L70", 16_384, 690), ("L70", 65_536, 3_556)],
)
def test_prefill_steps_agree_with_the_measured_kernels(name: str, prefill_tokens: int, measured_ms: float) -> None:
    step_s = profiles()[name].step_s(
        prefill_tokens=prefill_tokens, pairs=prefill_tokens**2 / 2, decodes=0, context_tokens=0
    )
    assert step_s * 1e3 == pytest.approx(measured_ms, rel=0.03)


@pytest.mark.parametrize(
    ("name", "decodes", "context", "measured_ms"),
    [
        ("L70", 1, 1_024, 10.1),
        ("L70", 128, 1_024, 14.6),
        ("L70", 128, 16_384, 40.1),
        ("L70", 256, 16_384, 71.6),
        ("DSV3", 1, 1_024, 11.2),
        ("DSV3", 32, 1_024, 26.2),
        ("DSV3", 256, 1_024, 65.8),
        ("GLM5", 8, 1_024, 21.3),
        ("GLM5", 128, 1_024, 43.5),
        ("GLM5", 256, 16_384, 93.9),
    ],
)
def test_decode_steps_agree_with_the_measured_kernels(
    name: str, decodes: int, context: int, measured_ms: float
) -> None:
    step_s = profiles()[name].step_s(prefill_tokens=0, pairs=0.0, decodes=decodes, context_tokens=decodes * context)
    assert step_s * 1e3 == pytest.approx(measured_ms, rel=0.05)


# Properties: any jobs at any times, with cancels, on an engine so small that it evicts and preempts.

SMALL = TINY.sized(block_size=16, kv_blocks=14)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 400),  # milliseconds since the one before
        st.integers(1, 120),  # prompt tokens
        st.integers(1, 60),  # output tokens
        st.integers(0, 3),  # conversation
        st.one_of(st.none(), st.integers(1, 300)),  # cancelled so many milliseconds after its arrival
    ),
    min_size=1,
    max_size=14,
)
Plan = list[tuple[float, Job | str]]


def plan_of(arrivals: list[tuple[int, int, int, int, int | None]]) -> Plan:
    """Submissions (a Job) and cancels (an id) in order of time."""
    plan: Plan = []
    now_s = 0.0
    for number, (gap_ms, prompt, out, chain, cancel_ms) in enumerate(arrivals):
        now_s += gap_ms / 1e3
        plan.append((now_s, job(str(number), prompt, out, chain=chain)))
        if cancel_ms is not None:
            plan.append((now_s + cancel_ms / 1e3, str(number)))
    return sorted(plan, key=lambda item: item[0])


def drive(plan: Plan, *, tick_s: float | None = None) -> tuple[EngineMachine, list[Event]]:
    """Run a plan to its end; with tick_s the machine is also advanced every tick_s, else only at the plan's moments."""
    machine, events, now_s = EngineMachine(SMALL), list[Event](), 0.0
    for at_s, what in [*plan, (plan[-1][0] + 1_000.0 if tick_s is None else plan[-1][0] + 30.0, "")]:
        while tick_s is not None and now_s + tick_s < at_s:
            now_s += tick_s
            events += machine.advance(now_s)
            check(machine)
        now_s = at_s
        events += machine.advance(at_s)
        check(machine)
        if isinstance(what, Job):
            machine.submit(what, at_s)
        elif (ended := machine.cancel(what, at_s)) is not None:
            events.append(ended)
        check(machine)
    return machine, events


def check(machine: EngineMachine) -> None:
    load = machine.load()
    assert 0 <= load.kv_used_blocks <= load.kv_total_blocks
    assert load.kv_cached_blocks <= load.kv_total_blocks
    assert 0 <= load.running <= SMALL.sequences_max
    assert load.waiting >= 0
    if not load.running:
        assert load.kv_used_blocks == 0


@given(ARRIVALS)
@settings(max_examples=150, deadline=None)
def test_every_job_ends_once_and_all_memory_comes_back(arrivals: list[tuple[int, int, int, int, int | None]]) -> None:
    plan = plan_of(arrivals)
    jobs = {what.id: what for _, what in plan if isinstance(what, Job)}
    machine, events = drive(plan)
    finished = {event.job_id: event for event in of(events, Finished)}
    assert len(of(events, Finished)) == len(jobs) == len(finished)
    for job_id, end in finished.items():
        assert end.output_tokens <= jobs[job_id].output_tokens
        assert end.reason is FinishReason.ABORT or end.output_tokens == jobs[job_id].output_tokens
        assert 0 <= end.cached_tokens <= max(0, jobs[job_id].prompt_tokens - 16)
    load = machine.load()
    assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
    assert load.generation_tokens == sum(event.output_tokens for event in finished.values())
    assert load.iterations == sum(event.steps for event in of(events, Stepped))
    assert all(before.at_s <= after.at_s for before, after in pairwise(of(events, Stepped)))


@given(ARRIVALS)
@settings(max_examples=100, deadline=None)
def test_the_stored_and_removed_events_add_up_to_the_cache(
    arrivals: list[tuple[int, int, int, int, int | None]],
) -> None:
    machine, events = drive(plan_of(arrivals))
    index: set[int] = set()
    for event in events:
        if isinstance(event, BlocksStored):
            assert event.parent is None or event.parent in index
            assert not index & set(event.hashes)
            index |= set(event.hashes)
        elif isinstance(event, BlocksRemoved):
            assert set(event.hashes) <= index
            index -= set(event.hashes)
            assert all(block % 1_000 == 0 or block - 1 in index for block in index)  # no child without its parent
    assert len(index) == machine.load().kv_cached_blocks


@given(ARRIVALS, st.sampled_from([0.003, 0.011, 0.05]))
@settings(max_examples=60, deadline=None)
def test_leaping_equals_stepping(arrivals: list[tuple[int, int, int, int, int | None]], tick_s: float) -> None:
    plan = plan_of(arrivals)
    leapt, leapt_events = drive(plan)
    stepped, stepped_events = drive(plan, tick_s=tick_s)
    timed = (Admitted, FirstToken, Finished, Preempted, BlocksStored)
    assert [e for e in leapt_events if isinstance(e, timed)] == [e for e in stepped_events if isinstance(e, timed)]
    assert removed(leapt_events) == removed(stepped_events)
    assert leapt.load() == stepped.load()


def removed(events: list[Event]) -> list[int]:
    return [block for event in of(events, BlocksRemoved) for block in event.hashes]
