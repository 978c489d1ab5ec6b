"""Traces: what requests came when, from recorded traffic.

Scaling to a fleet is by rotated copies, never by compressing time: that would make think time vanish and
flatter caching.
"""

from collections.abc import Iterable, Iterator
from random import Random

import msgspec
from msgspec import Struct

from tokenfleet.core.errors import PolicyError

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_QUANTUM_S = 3.0  # its timestamps are multiples of about 3 s, each shared by some ten requests
HASH_IDS_A_COPY = 10_000_000


class TraceRow(Struct, frozen=True, kw_only=True):
    """One request: arrival since the trace's start, lengths, ids of its blocks (equal id, equal prefix)."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


class _MooncakeLine(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse_mooncake(lines: Iterable[str | bytes], *, source: str) -> Iterator[TraceRow]:
    """Rows of a Mooncake JSONL trace (milliseconds, 512-token blocks).

    Raises PolicyError, naming source and line, for a line that isn't such a row.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise PolicyError(f"{source}, line {number}: {error}") from error
        yield TraceRow(
            at_s=row.timestamp / 1000.0,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            hash_ids=row.hash_ids,
        )


def rotated_copies(rows: list[TraceRow], *, copies: int, quantum_s: float, rng: Random) -> list[TraceRow]:
    """`copies` of the trace laid over each other, copy k rotated by T·k/copies + U(0, T/copies), sorted by arrival.

    Each copy has block ids of its own but for the first block (a system prompt that all share). Arrivals are
    spread over the recorder's quantum by U(0, quantum_s).
    """
    if not rows or copies < 1:
        return []
    span_s = rows[-1].at_s + max(quantum_s, 1e-9)
    laid: list[TraceRow] = []
    for copy in range(copies):
        shift_s = span_s * copy / copies + (rng.uniform(0.0, span_s / copies) if copies > 1 else 0.0)
        base = copy * HASH_IDS_A_COPY
        for row in rows:
            at_s = (row.at_s + shift_s + rng.uniform(0.0, quantum_s)) % span_s
            ids = row.hash_ids[:1] + tuple(i + base for i in row.hash_ids[1:])
            laid.append(msgspec.structs.replace(row, at_s=at_s, hash_ids=ids))
    return sorted(laid, key=lambda row: row.at_s)
