"""Rows: one request of a recorded trace."""

from msgspec import Struct


class TraceRow(Struct, frozen=True, kw_only=True):
    """One request: arrival since the trace's start, lengths, ids of its blocks (equal id, equal prefix)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 512
