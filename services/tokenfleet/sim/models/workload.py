"""Workload: chat requests for two models from a recorded trace, as dense as their demand asks for."""

from functools import cache, partial
from random import Random

from msgspec.structs import replace

from tokenfleet.sim.demand import Demand, timed
from tokenfleet.sim.measure import prefill_row_s
from tokenfleet.sim.mixed.workload import OUTPUT_MIN_TOKENS
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import Trace, TraceRow
from tokenfleet.sim.traces.scale import scaled

LEN_S = 900.0
TALK, READ = "talk", "read"
MODELS = (TALK, READ)
TRACE = "conversation"
PROMPT_TOKENS = {TALK: (1, 8_191), READ: (4_096, 12_287)}  # by model: what its callers send, least and most
RHO_OF_LOAD_1 = 0.8  # prefill seconds, nothing cached, a second and slot, that slots shared out rightly can just serve


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
        within = timed(laid, partial(_level, demand, model), len_s=LEN_S)
        rows += [_asked_of(model, row) for row in within]
    return sorted(rows, key=lambda row: row.at_s)


def _level(demand: Demand, model: str, at_s: float) -> float:
    """How much is asked of the model, as a multiple of half the load."""
    share = demand.share(at_s)
    return 2.0 * (share if model == TALK else 1.0 - share)


def _asked_of(model: str, row: TraceRow) -> TraceRow:
    tokens = max(row.output_tokens, OUTPUT_MIN_TOKENS)
    return replace(row, request_class="chat", model=model, output_tokens=tokens)


@cache
def _recorded(tokens_min: int, tokens_max: int) -> Trace:
    """The trace's rows with prompts of so many tokens; read once, for a comparison makes many runs of it."""
    trace = read_trace(TRACE)
    return replace(trace, rows=[row for row in trace.rows if tokens_min <= row.prompt_tokens <= tokens_max])
