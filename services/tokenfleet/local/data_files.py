"""Data files of the local fleet: the recorded trace that its load replays."""

from random import Random

from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.sim.traces.scale import scaled

TRACE = "conversation"


def trace_rows(*, copies: int, rng: Random, prompt_tokens_max: int) -> list[TraceRow]:
    """The conversation trace laid over itself `copies` times, without prompts longer than `prompt_tokens_max`."""
    trace = read_trace(TRACE)
    laid = scaled(
        trace.rows,
        copies=copies,
        quantum_s=trace.quantum_s,
        rng=rng,
        shared_first_block=trace.shared_first_block,
    )
    return [row for row in laid if row.prompt_tokens <= prompt_tokens_max]
