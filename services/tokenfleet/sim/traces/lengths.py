"""Lengths: the CSV of prompt and output lengths that ships for offline work; it has no times and no blocks."""

import lzma
from importlib.resources import files
from typing import NamedTuple

from tokenfleet.sim.traces.lines import CsvLines, whole

FILE = "arxiv_summ.csv.xz"
COLUMNS = ("num_prefill_tokens", "num_decode_tokens")


class Lengths(NamedTuple):
    """One request, in tokens."""

    prompt_tokens: int
    output_tokens: int


def summarisation_lengths() -> list[Lengths]:
    """The pairs of the arXiv summarisation set, in the file's order."""
    table = CsvLines(COLUMNS, source=FILE)
    text = lzma.decompress((files("tokenfleet.sim") / "data" / FILE).read_bytes())
    rows = (table.fields(line) for line in text.splitlines())
    return [Lengths(whole(row[0], COLUMNS[0]), whole(row[1], COLUMNS[1])) for row in rows if row]
