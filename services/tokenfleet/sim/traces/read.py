"""Read: a trace by its name or path, whatever its format."""

import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.traces import azure, bailian, burstgpt, mooncake, own
from tokenfleet.sim.traces.lines import BadLines, Line
from tokenfleet.sim.traces.rows import Trace, TraceRow

SHIPPED = {
    "azure-code": "azure2023_code.csv.xz",
    "azure-conv": "azure2023_conv.csv.xz",
    "conversation": "conversation_trace.jsonl.xz",
    "synthetic": "synthetic_trace.jsonl.xz",
}

LINES_LOOKED_AT = 20  # to tell the format: the first of them may be broken
BAD_SHARE_MAX = 0.5  # with more of its lines bad a file is not what it was taken for
SHARED_SHARE_MIN = 0.5  # of the rows begin with the same block: a system prompt


class Parse(Protocol):
    """A reader of one format."""

    def __call__(self, lines: Iterator[Line], *, source: str, bad: BadLines | None) -> Iterator[TraceRow]: ...


# By the keys or columns that only this format has, the narrower first.
FORMATS: dict[str, tuple[frozenset[str], Parse]] = {
    "TokenFleet JSONL": (frozenset({"at_s"}), own.parse_own),
    "Qwen-Bailian JSONL": (frozenset({"timestamp", "chat_id"}), bailian.parse_bailian),
    "Mooncake JSONL": (frozenset({"timestamp", "input_length"}), mooncake.parse_mooncake),
    "Azure CSV": (frozenset(azure.COLUMNS), azure.parse_azure),
    "BurstGPT CSV": (frozenset(burstgpt.COLUMNS), burstgpt.parse_burstgpt),
}


def read_trace(path_or_name: str | Path, *, skip_bad: bool = False) -> Trace:
    """The trace of that name (one of SHIPPED) or in that file, plain or packed with xz or gzip.

    The format is told by the first lines. With `skip_bad` lines that can't be used are left out and counted.
    Raises PolicyError with file, line, reason and remedy when there is no such trace, a line is bad, nothing is in the
    file, or more than BAD_SHARE_MAX of its lines had to be left out.
    """
    name = str(path_or_name)
    source = SHIPPED.get(name, name)
    lines = lines_of(name)
    form = _format_of(lines, source)
    bad = BadLines() if skip_bad else None
    rows = list(FORMATS[form][1](iter(lines), source=source, bad=bad))
    skipped = bad.count if bad else 0
    first = bad.first if bad else []
    if skipped > BAD_SHARE_MAX * (skipped + len(rows)):
        raise PolicyError(
            f"{source}: {skipped} of {skipped + len(rows)} lines are bad as {form}; {' '.join(first[:1])}"
        )
    if not rows:
        raise PolicyError(f"{source}: no requests in it; a trace has at least one row below its header")
    return Trace(
        rows=_from_zero(rows),
        name=name if name in SHIPPED else Path(name).name,
        quantum_s=_quantum_s(rows, form),
        shared_first_block=_first_block_share(rows) > SHARED_SHARE_MIN,
        bad=skipped,
        bad_first=tuple(first),
        repeats=sum(msgspec.structs.replace(b, line=a.line) == a for a, b in pairwise(rows)),
    )


def lines_of(name: str) -> list[bytes]:
    """The file's lines, unpacked. Raises PolicyError when there is no such trace or it can't be read."""
    path = Path(name)
    try:
        shipped = SHIPPED.get(name)
        data = (files("tokenfleet.sim") / "data" / shipped).read_bytes() if shipped else path.read_bytes()
    except FileNotFoundError:
        known = f"there is: {listed(SHIPPED)}, or the path of a file"
        raise PolicyError(f"no trace {name!r}: neither a file nor a trace that ships; {known}") from None
    except OSError as error:
        raise PolicyError(f"{name}: {error.strerror}; a trace is a file that can be read") from error
    try:
        return _unpacked(data).splitlines()
    except (lzma.LZMAError, EOFError, OSError, zlib.error) as error:
        raise PolicyError(f"{name}: can't be unpacked ({error}); is it whole? Fetch it anew") from error


def _unpacked(data: bytes) -> bytes:
    if data.startswith(b"\xfd7zXZ\x00"):
        data = lzma.decompress(data)
    elif data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    return data.removeprefix(b"\xef\xbb\xbf")


def _format_of(lines: list[bytes], source: str) -> str:
    if not any(line.strip() for line in lines):
        raise PolicyError(f"{source}: the file is empty")
    for line in islice((line for line in lines if line.strip()), LINES_LOOKED_AT):
        columns = _columns(line)
        for name, (wanted, _) in FORMATS.items():
            if wanted <= columns:
                return name
    raise PolicyError(
        f"{source}: not a trace that can be read; it begins {lines[0][:60].decode(errors='replace')!r}. "
        f"Formats: {listed(FORMATS)}; docs/traces.md tells what each holds"
    )


def _columns(line: bytes) -> frozenset[str]:
    """Keys of a JSON object, else the fields of a CSV line."""
    if line.lstrip().startswith(b"{"):
        try:
            return frozenset(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
        except (msgspec.DecodeError, RecursionError):
            return frozenset()
    return frozenset(field.strip() for field in line.decode(errors="replace").split(","))


def _from_zero(rows: list[TraceRow]) -> list[TraceRow]:
    first_s = rows[0].at_s
    return [msgspec.structs.replace(row, at_s=row.at_s - first_s) for row in rows] if first_s else rows


def _quantum_s(rows: list[TraceRow], form: str) -> float:
    """The recorder's step: known of BurstGPT; of Mooncake's traces one is in steps that many rows share."""
    if form == "BurstGPT CSV":
        return burstgpt.QUANTUM_S
    moments = sorted({row.at_s for row in rows})
    if form != "Mooncake JSONL" or len(moments) < 2 or 2 * len(moments) > len(rows):
        return 0.0
    return median(after - before for before, after in pairwise(moments))


def _first_block_share(rows: list[TraceRow]) -> float:
    firsts = Counter(row.hash_ids[0] for row in rows if row.hash_ids)
    return max(firsts.values(), default=0) / len(rows)
