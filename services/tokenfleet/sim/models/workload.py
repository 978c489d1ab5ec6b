"""Workload: chat requests for two models from a recorded trace, as dense as their demand asks for."""

from functools import cache
from itertools import accumulate
from random import Random

import numpy as np
from msgspec.structs import replace

from tokenfleet.sim.measure import prefill_row_s
from tokenfleet.sim.mixed.workload import OUTPUT_MIN_TOKENS
from tokenfleet.sim.models.demand import LEN_S, Demand
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import Trace, TraceRow
from tokenfleet.sim.traces.scale import scaled

TALK, READ = "talk", "read"
MODELS = (TALK, READ)
TRACE = "conversation"
PROMPT_TOKENS = {TALK: (1, 8_191), READ: (4_096, 12_287)}  # by model: what its callers send, least and most
RHO_OF_LOAD_1 = 0.72  # prefill seconds a second and slot that slots shared out rightly can just serve


def workload(*, load: float, slots: int, demand: Demand, profile: Profile, seed: int) -> list[TraceRow]:
    """The requests of [0, LEN_S) by arrival.

    Each model has the trace's prompts of its lengths in rotated copies, in whose time demand runs faster and slower;
    together they bring the load all the time.
    """
    rows: list[TraceRow] = []
    for model in MODELS:
        trace, rng = _recorded(*PROMPT_TOKENS[model]), Random(f"{seed}/{model}")
        work_s = sum(prefill_row_s(row, profile, cached_tokens=0) for row in trace.rows)
        span_s = trace.rows[-1].at_s + trace.quantum_s
        copies = 0.5 * load * slots * RHO_OF_LOAD_1 * span_s / work_s
        laid = scaled(
            trace.rows,
            copies=copies,
            quantum_s=trace.quantum_s,
            rng=rng,
            shared_first_block=trace.shared_first_block,
            turned_s=rng.uniform(0.0, span_s),
        )
        rows += [replace(row, request_class="chat", model=model) for row in _timed(laid, demand, first=model == TALK)]
    return sorted(rows, key=lambda row: row.at_s)


def _timed(rows: list[TraceRow], demand: Demand, *, first: bool) -> list[TraceRow]:
    """The rows at the times by which the demand has asked for so much of them, in [0, LEN_S)."""
    times_s = np.arange(0.0, LEN_S + 1.0)
    shares = [demand.share(at_s + 0.5) for at_s in times_s[:-1].tolist()]
    asked_s = list(accumulate((2.0 * (share if first else 1.0 - share) for share in shares), initial=0.0))
    within = [row for row in rows if row.at_s < asked_s[-1]]
    at_s = np.interp([row.at_s for row in within], asked_s, times_s).tolist()
    return [
        replace(row, at_s=time_s, output_tokens=max(row.output_tokens, OUTPUT_MIN_TOKENS))
        for row, time_s in zip(within, at_s, strict=True)
    ]


@cache
def _recorded(tokens_min: int, tokens_max: int) -> Trace:
    """The trace's rows with prompts of so many tokens; read once, for a comparison makes many runs of it."""
    trace = read_trace(TRACE)
    return replace(trace, rows=[row for row in trace.rows if tokens_min <= row.prompt_tokens <= tokens_max])
