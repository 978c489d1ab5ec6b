"""Data files that ship with the local fleet: the recorded trace."""

import lzma
from importlib.resources import files
from random import Random

from tokenfleet.sim.traces.mooncake import MOONCAKE_QUANTUM_S, parse_mooncake
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.sim.traces.scale import rotated_copies

TRACE = "conversation_trace.jsonl.xz"


def trace_rows(*, copies: int, rng: Random, prompt_tokens_max: int) -> list[TraceRow]:
    """The conversation trace laid over itself `copies` times, without prompts longer than `prompt_tokens_max`."""
    packed = files("tokenfleet.local").joinpath("data", TRACE).read_bytes()
    rows = list(parse_mooncake(lzma.decompress(packed).splitlines(), source=TRACE))
    laid = rotated_copies(rows, copies=copies, quantum_s=MOONCAKE_QUANTUM_S, rng=rng)
    return [row for row in laid if row.prompt_tokens <= prompt_tokens_max]
