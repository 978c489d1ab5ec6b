"""Mooncake: the JSONL traces of the Mooncake project (milliseconds, 512-token blocks)."""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct

from tokenfleet.sim.traces.lines import BadLines, Line, rows_of
from tokenfleet.sim.traces.rows import TraceRow

BLOCK_TOKENS = 512


class _MooncakeLine(Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def parse_mooncake(lines: Iterable[Line], *, source: str, bad: BadLines | None = None) -> Iterator[TraceRow]:
    """Rows of a Mooncake JSONL trace (milliseconds, 512-token blocks).

    Raises PolicyError, naming source and line, for a line that isn't such a row; with `bad` it is counted there.
    """
    decoder = msgspec.json.Decoder(_MooncakeLine)

    def read(line: Line) -> TraceRow:
        row = decoder.decode(line)
        return TraceRow(
            at_s=row.timestamp / 1000.0,
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            hash_ids=row.hash_ids,
            block_tokens=BLOCK_TOKENS,
        )

    return rows_of(lines, read, source=source, bad=bad)
