"""Workload: chat, long-context and batch requests of one cluster, as dense as its load and size ask for."""

import math
from functools import cache, partial
from random import Random

from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.demand import Demand, timed
from tokenfleet.sim.traces.lengths import summarisation_lengths
from tokenfleet.sim.traces.lines import TOKENS_MAX
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import Trace, TraceRow
from tokenfleet.sim.traces.scale import scaled

LEN_S = 600.0
INSTANCES_OF_LOAD_1 = 4  # that the rates below are for
CHAT_PER_S = 20.0  # of USUAL_CHAT
LONG_PER_S = 0.75
BULK_JOBS = 720
LONG_PROMPT_MIN_TOKENS = 16_384
OUTPUT_MIN_TOKENS = 2  # else there is no time per token
BULK_FIRST_S, BULK_PERIOD_S, BULK_SPREAD_S = 15.0, 120.0, 2.0
BULKS = math.ceil((LEN_S - BULK_FIRST_S) / BULK_PERIOD_S)
BULK_STARTS_S = tuple(BULK_FIRST_S + number * BULK_PERIOD_S for number in range(BULKS))
BATCH_OUTPUT_MAX_TOKENS = 1_024
STREAM_ENDS_MIN_S = 480.0  # a chat trace that would be used up earlier is laid over itself

# Traces that can be the chat stream, and the longest prompt that is taken of each for chat.
CHATS = {"azure-conv": TOKENS_MAX, "azure-code": TOKENS_MAX, "conversation": 8_191}
USUAL_CHAT = "azure-conv"


def workload(
    *,
    load: float,
    instances: int,
    seed: int,
    chat: str,
    batch_deadline_s: float,
    tenants: int = 1,
    flood: float = 1.0,
    demand: Demand | None = None,
) -> list[TraceRow]:
    """The requests of [0, LEN_S) by arrival; load 1 is what the fleet can just serve.

    The seed moves long and batch; the chat stream has its own timestamps, sped up to a mean rate over the whole of it,
    and ends when it is used up. Every stream brings as many prompt tokens a second as the usual one. Requests fall to
    so many `tenants` by chance, of whom the first sends `flood` times its chat.
    With a `demand` chat comes as dense as that asks of its first stream, half being the load.
    Raises PolicyError for an unknown chat stream.
    """
    if chat not in CHATS:
        raise PolicyError(f"--chat {chat!r}: there is {listed(CHATS)}")
    scale = load * instances / INSTANCES_OF_LOAD_1
    chats = _chat(_chat_stream(chat), _chat_per_s(chat) * scale, Random(f"{seed}/chat"))
    if demand is not None:
        chats = timed(chats, partial(_level, demand), len_s=LEN_S)
    rows = [
        *chats,
        *_long(LONG_PER_S * scale, Random(f"{seed}/long")),
        *_batch(round(BULK_JOBS * scale), batch_deadline_s, Random(f"{seed}/batch")),
    ]
    if tenants > 1:
        rows = _shared_out(rows, tenants, Random(f"{seed}/tenants"))
        extra_per_s = _chat_per_s(chat) * scale * (flood - 1.0) / tenants
        rows += [replace(row, tenant=tenant_name(0)) for row in _flood(chat, extra_per_s, seed)]
    within = [_with_output(row) for row in rows if row.at_s < LEN_S]
    return sorted(within, key=lambda row: row.at_s)


def tenant_name(number: int) -> str:
    return f"t{number}"


def _shared_out(rows: list[TraceRow], tenants: int, rng: Random) -> list[TraceRow]:
    """A session is one tenant's; so is a batch job or a request without one."""
    of_session = dict[str, str]()
    shared = list[TraceRow]()
    for row in rows:
        tenant = tenant_name(rng.randrange(tenants))
        if row.session:
            tenant = of_session.setdefault(row.session, tenant)
        shared.append(replace(row, tenant=tenant))
    return shared


def _flood(chat: str, per_s: float, seed: int) -> list[TraceRow]:
    return _chat(_chat_stream(chat), per_s, Random(f"{seed}/flood")) if per_s > 0.0 else []


def _level(demand: Demand, at_s: float) -> float:
    return 2.0 * demand.share(at_s)


def _chat_stream(chat: str) -> Trace:
    return _recorded(chat, tokens_max=CHATS[chat])


def _chat_per_s(chat: str) -> float:
    """The stream's rate at load 1."""
    usual, its = _chat_stream(USUAL_CHAT), _chat_stream(chat)
    return CHAT_PER_S * _mean_prompt_tokens(usual) / _mean_prompt_tokens(its)


def _mean_prompt_tokens(trace: Trace) -> float:
    return sum(row.prompt_tokens for row in trace.rows) / len(trace.rows)


def _chat(trace: Trace, per_s: float, rng: Random) -> list[TraceRow]:
    """Without blocks: in compressed time caches would look better than they are."""
    span_s = trace.rows[-1].at_s + trace.quantum_s
    recorded_per_s = len(trace.rows) / span_s
    copies = max(1, math.ceil(STREAM_ENDS_MIN_S * per_s / len(trace.rows)))
    rows = scaled(trace.rows, copies=copies, quantum_s=trace.quantum_s, rng=rng, shared_first_block=False)
    speed = per_s / (copies * recorded_per_s)
    return [replace(row, at_s=row.at_s / speed, request_class="chat", hash_ids=(), session="") for row in rows]


def _long(per_s: float, rng: Random) -> list[TraceRow]:
    trace = _recorded("conversation", tokens_min=LONG_PROMPT_MIN_TOKENS)
    span_s = trace.rows[-1].at_s + trace.quantum_s
    rows = scaled(
        trace.rows,
        copies=per_s * span_s / len(trace.rows),
        quantum_s=trace.quantum_s,
        rng=rng,
        shared_first_block=trace.shared_first_block,
        turned_s=rng.uniform(0.0, span_s),
    )
    return [replace(row, request_class="long") for row in rows]


def _batch(jobs_a_bulk: int, deadline_s: float, rng: Random) -> list[TraceRow]:
    lengths = _recorded_lengths()
    rows: list[TraceRow] = []
    for start_s in BULK_STARTS_S:
        for pair in rng.choices(lengths, k=jobs_a_bulk):
            rows.append(
                TraceRow(
                    at_s=start_s + rng.uniform(0.0, BULK_SPREAD_S),
                    prompt_tokens=pair.prompt_tokens,
                    output_tokens=min(pair.output_tokens, BATCH_OUTPUT_MAX_TOKENS),
                    request_class="batch",
                    deadline_s=deadline_s,
                )
            )
    return rows


@cache
def _recorded(name: str, *, tokens_min: int = 1, tokens_max: int = TOKENS_MAX) -> Trace:
    """The trace's rows with prompts of so many tokens; read once, for a comparison makes many runs of it."""
    trace = read_trace(name)
    return replace(trace, rows=[row for row in trace.rows if tokens_min <= row.prompt_tokens <= tokens_max])


_recorded_lengths = cache(summarisation_lengths)


def _with_output(row: TraceRow) -> TraceRow:
    return row if row.output_tokens >= OUTPUT_MIN_TOKENS else replace(row, output_tokens=OUTPUT_MIN_TOKENS)
