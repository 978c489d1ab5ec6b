"""Azure: the CSV traces of Azure's LLM inference services (wall-clock times, lengths, no blocks)."""

import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from tokenfleet.sim.traces.lines import BadLines, CsvLines, Line, LineError, rows_of, whole
from tokenfleet.sim.traces.rows import TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?", re.ASCII)


def parse_azure(lines: Iterable[Line], *, source: str, bad: BadLines | None = None) -> Iterator[TraceRow]:
    """Rows of an Azure CSV trace, arrivals since its first row; times without a zone are taken as UTC.

    Raises PolicyError, naming source and line, for a line that isn't such a row; with `bad` it is counted there.
    """
    table = CsvLines(COLUMNS, source=source)
    first: tuple[int, float] | None = None

    def read(line: Line) -> TraceRow | None:
        nonlocal first
        fields = table.fields(line)
        if fields is None:
            return None
        at, prompt, output = fields
        moment = _moment(at)
        prompt_tokens, output_tokens = whole(prompt, COLUMNS[1]), whole(output, COLUMNS[2])
        first = first or moment
        at_s = (moment[0] - first[0]) + (moment[1] - first[1])
        return TraceRow(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)

    return rows_of(lines, read, source=source, bad=bad)


def _moment(text: str) -> tuple[int, float]:
    """Whole seconds and the rest: as one float of today's seconds the recorder's 100 ns digits would be lost."""
    found = _TIMESTAMP.fullmatch(text)
    if found is None:
        raise LineError(f"TIMESTAMP: {text[:40]!r} is not like 2023-11-16 18:15:46.6805900")
    day, clock, fraction, zone = found.groups()
    try:
        moment = datetime.fromisoformat(f"{day} {clock}{zone or '+00:00'}")
    except ValueError as error:
        raise LineError(f"TIMESTAMP: {error}") from None
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return since.days * 86_400 + since.seconds, float(fraction or 0)
