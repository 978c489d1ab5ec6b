"""Mooncake: the JSONL traces of the Mooncake project (milliseconds, 512-token blocks)."""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.traces.rows import TraceRow

MOONCAKE_QUANTUM_S = 3.0  # its timestamps are multiples of about 3 s, each shared by some ten requests


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
