"""Load stats: the files that the load writes its books to, and how to read its counts."""

from pathlib import Path

import msgspec
from msgspec import Struct

ANSWERED = "answered.tsv"
STATS = "load.json"


class LoadStats(Struct, kw_only=True):
    """The whole of `load.json`, of one life of the load.

    `answered` counts requests that got an answer, `unanswered` those whose call failed for good, `shed` rows not sent
    because too many were open. `modes` and `verdicts` count decisions. `began_at_s` (of the
    first life) and `first_decision_at_s` are this machine's monotonic clock. `whole`: written at
    the end, and all that was answered before stands in the books.
    """

    answered: int = 0
    admitted: int = 0
    finished: int = 0
    unanswered: int = 0
    engine_errors: int = 0
    shed: int = 0
    reports_lost: int = 0
    modes: dict[str, int] = {}
    verdicts: dict[str, int] = {}
    began_at_s: float | None = None
    first_decision_at_s: float | None = None
    first_admitted_at_s: float | None = None
    stale_age_max_s: float = 0.0
    longest_gap_s: float = 0.0
    open: int = 0
    whole: bool = False


def read_stats(folder: Path) -> LoadStats | None:
    """The counts that a load last wrote; None if it has not written any."""
    try:
        return msgspec.json.decode((folder / STATS).read_bytes(), type=LoadStats)
    except (OSError, msgspec.DecodeError):
        return None
