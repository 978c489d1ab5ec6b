"""Rows: one request of a recorded trace, and the trace they make up."""

from msgspec import Struct


class TraceRow(Struct, frozen=True, kw_only=True):
    """One request: arrival since the trace's start, lengths, ids of its blocks (equal id, equal prefix).

    `hash_ids` are u64, one for each block of `block_tokens` from the first on; the last one may be partly filled.
    `session` names the conversation; it, `tenant`, `request_class` and `model` are empty when the trace doesn't tell.
    Offline work has to end within `deadline_s` of its arrival, None is interactive. `line` is the row's place in its
    file, from 1.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 512
    session: str = ""
    tenant: str = ""
    request_class: str = ""
    model: str = ""
    deadline_s: float | None = None
    line: int = 0


class Trace(Struct, frozen=True, kw_only=True):
    """What read_trace found: rows by arrival, the first at 0.

    `quantum_s` is the step of the recorder's clock, over which a replay spreads arrivals; 0 when it is fine enough.
    `shared_first_block`: most rows begin with the same block, a system prompt. `bad` counts lines left out, `bad_first`
    says of the first of them where and why. `repeats` counts rows equal to one just before them: a retry looks like
    that, and so does a line written twice.
    """

    rows: list[TraceRow]
    name: str
    quantum_s: float
    shared_first_block: bool
    bad: int = 0
    bad_first: tuple[str, ...] = ()
    repeats: int = 0
