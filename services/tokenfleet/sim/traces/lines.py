"""Lines: what every reader of a trace refuses, with file, line, reason and remedy."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.traces.rows import TraceRow

REMEDY = "correct the line, or leave such lines out with --skip-bad"
TOKENS_MAX = 2**31 - 1  # of a request's prompt or output, as everywhere on the wire
ID_MAX = 2**64 - 1
BAD_SHOWN = 5

Line = str | bytes
ReadLine = Callable[[Line], TraceRow | None]


class LineError(ValueError):
    """A line is no row of its format, or a row that can't be; `str` is the reason alone."""


class BadLines:
    """Lines left out: how many, and where and why for the first BAD_SHOWN of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first: list[str] = []

    def add(self, problem: str) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < BAD_SHOWN:
            self.first.append(problem)


def rows_of(lines: Iterable[Line], read: ReadLine, *, source: str, bad: BadLines | None) -> Iterator[TraceRow]:
    """The rows that `read` makes of the lines, each checked; `read` gives None for a line that holds no row.

    Arrivals must not go back: a clock that was set or two files in one would, sorted, be a load that never was.
    Raises PolicyError at the first bad line, or counts it in `bad` and goes on.
    """
    before = TraceRow(at_s=0.0, prompt_tokens=1, output_tokens=1)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = read(line)
            if row is None:
                continue
            _check(row, before)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, csv.Error, LineError) as error:
            if bad is None:
                raise PolicyError(f"{source}, line {number}: {error}; {REMEDY}") from error
            bad.add(f"line {number}: {error}")
            continue
        before = msgspec.structs.replace(row, line=number)
        yield before


def _check(row: TraceRow, before: TraceRow) -> None:
    if not 0.0 <= row.at_s < math.inf:
        raise LineError(f"the arrival {row.at_s} is no time since the trace's start")
    if row.at_s < before.at_s:
        raise LineError(
            f"arrives at {row.at_s:.7g} s, before line {before.line} at {before.at_s:.7g} s: rows stand by arrival"
        )
    for name, tokens in (("prompt", row.prompt_tokens), ("output", row.output_tokens)):
        if not 1 <= tokens <= TOKENS_MAX:
            raise LineError(f"{tokens} {name} tokens; a request has 1 to {TOKENS_MAX}")
    if not 1 <= row.block_tokens <= TOKENS_MAX:
        raise LineError(f"blocks of {row.block_tokens} tokens")
    if before.line and row.block_tokens != before.block_tokens:
        raise LineError(f"blocks of {row.block_tokens} tokens, those of line {before.line} have {before.block_tokens}")
    blocks = -(-row.prompt_tokens // row.block_tokens)
    ids = row.hash_ids
    if len(ids) > blocks:
        raise LineError(f"{len(ids)} block ids for {row.prompt_tokens} tokens, which are {blocks} blocks")
    if ids and not (min(ids) >= 0 and max(ids) <= ID_MAX):
        raise LineError("a block id is no unsigned 64-bit number")
    if len(set(ids)) < len(ids):
        raise LineError("a block id occurs twice: an id stands for the whole prefix up to its block")


class CsvLines:
    """Splits the lines of a CSV file: the first is the header, the wanted columns are found by name."""

    def __init__(self, wanted: tuple[str, ...], *, source: str) -> None:
        self._wanted = wanted
        self._source = source
        self._at: tuple[int, ...] = ()

    def fields(self, line: Line) -> list[str] | None:
        """The wanted columns of a line, None for the header.

        Raises PolicyError when the header lacks a column, LineError for a line with fewer fields.
        """
        text = line.decode("utf-8-sig") if isinstance(line, bytes) else line
        fields = next(iter(csv.reader([text.rstrip("\r\n")])))
        if not self._at:
            lacking = [name for name in self._wanted if name not in fields]
            if lacking:
                raise PolicyError(
                    f"{self._source}, line 1: no column {', '.join(lacking)}; the header names the columns"
                )
            self._at = tuple(fields.index(name) for name in self._wanted)
            return None
        if len(fields) <= max(self._at):
            raise LineError(f"{len(fields)} fields, too few for the header's columns")
        return [fields[at].strip() for at in self._at]


def whole(text: str, name: str) -> int:
    """A count of a CSV field. Raises LineError for anything else; whether it is positive is asked of every row."""
    if not text:
        raise LineError(f"no {name}")
    try:
        return int(text)
    except ValueError:
        raise LineError(f"{name}: {text[:40]!r} is no whole number") from None
