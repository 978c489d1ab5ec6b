"""BurstGPT: the CSV traces of a campus's ChatGPT and GPT-4 requests (whole seconds, lengths, no blocks)."""

from collections.abc import Iterable, Iterator

from tokenfleet.sim.traces.lines import BadLines, CsvLines, Line, LineError, rows_of, whole
from tokenfleet.sim.traces.rows import TraceRow

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
QUANTUM_S = 1.0


def parse_burstgpt(lines: Iterable[Line], *, source: str, bad: BadLines | None = None) -> Iterator[TraceRow]:
    """Rows of a BurstGPT CSV trace; its failed requests (no response tokens) are bad lines.

    Raises PolicyError, naming source and line, for a line that isn't such a row; with `bad` it is counted there.
    """
    table = CsvLines(COLUMNS, source=source)

    def read(line: Line) -> TraceRow | None:
        fields = table.fields(line)
        if fields is None:
            return None
        at, prompt, output = fields
        try:
            at_s = float(at)
        except ValueError:
            raise LineError(f"Timestamp: {at[:40]!r} is no number of seconds") from None
        return TraceRow(at_s=at_s, prompt_tokens=whole(prompt, COLUMNS[1]), output_tokens=whole(output, COLUMNS[2]))

    return rows_of(lines, read, source=source, bad=bad)
