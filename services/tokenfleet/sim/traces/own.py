"""Own: TokenFleet's own trace format, one JSON object a line; docs/traces.md is its page."""

import struct
from collections.abc import Iterable, Iterator

import msgspec

from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.trace_line import TraceLine
from tokenfleet.sim.traces.lines import BadLines, Line, LineError, rows_of
from tokenfleet.sim.traces.rows import TraceRow


def parse_own(lines: Iterable[Line], *, source: str, bad: BadLines | None = None) -> Iterator[TraceRow]:
    """Rows of a trace in TokenFleet's own format.

    Raises PolicyError, naming source and line, for a line that isn't such a row; with `bad` it is counted there.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    seen: set[str] = set()

    def read(line: Line) -> TraceRow:
        row = decoder.decode(line)
        if row.id in seen:
            raise LineError(f"id {row.id!r} was there before: a line is one request")
        if row.id:
            seen.add(row.id)
        return TraceRow(
            at_s=row.at_s,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            hash_ids=_block_ids(row),
            block_tokens=row.block_tokens,
            session=row.session,
            tenant=row.tenant,
            request_class=row.class_,
        )

    return rows_of(lines, read, source=source, bad=bad)


def _block_ids(row: TraceLine) -> tuple[int, ...]:
    if not row.keys:
        return row.ids
    if row.ids:
        raise LineError("both ids and keys; one of them names the blocks")
    if len(row.keys) % KEY_BYTES:
        raise LineError(f"keys are {len(row.keys)} bytes, no multiple of {KEY_BYTES}")
    return struct.unpack(f"<{len(row.keys) // KEY_BYTES}Q", row.keys)
