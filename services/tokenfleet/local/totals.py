"""Totals: the one line of words that says at the end what came of a run."""

from collections.abc import Mapping
from pathlib import Path

from tokenfleet.local.books_check import read_books
from tokenfleet.local.load_stats import read_stats

VERDICTS = {"admit": "admitted", "queue": "queued", "reject": "rejected", "redirect": "redirected"}


def totals(*, decisions: int | None, verdicts: Mapping[str, int | None], outcomes: int | None, rows: str) -> str:
    """`verdicts` count by VERDICTS' keys; what is unknown is called so. `rows` tells of PostgreSQL."""
    counts = ", ".join(f"{_number(verdicts.get(name))} {word}" for name, word in VERDICTS.items())
    return f"{_number(decisions)} decisions: {counts}; {_number(outcomes)} outcome events; {rows}"


def totals_of_books(folder: Path) -> str:
    """What the load was told, without waiting for rows; of its last life where verdicts are counted."""
    books, stats = read_books(folder), read_stats(folder)
    return totals(
        decisions=len(books.decisions),
        verdicts={name: stats.verdicts.get(name, 0) for name in VERDICTS} if stats is not None else {},
        outcomes=len(books.outcomes),
        rows="not compared with the rows (--for and --json do)",
    )


def _number(count: int | None) -> str:
    return "unknown" if count is None else str(count)
