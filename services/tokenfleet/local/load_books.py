"""Load books: what the load was answered and what it reported, on disk line by line, so that a kill loses none.

`answered.tsv` has a line `decision ID` for each decision answered and `outcome REQUEST ATTEMPT KIND` for each outcome
event that a site has acknowledged; `up` compares them with the rows in PostgreSQL. `load.json` has the counts.
"""

import contextlib
import logging
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from tokenfleet.client.gateway import Answer
from tokenfleet.local.load_stats import ANSWERED, STATS, LoadStats, read_stats
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2

log = logging.getLogger(__name__)


class LoadBooks:
    """Counts and the two files in `folder`; use as a context manager. Times are the caller's monotonic clock."""

    def __init__(self, folder: Path) -> None:
        self.stats = LoadStats()
        self._folder = folder
        self._answered_at_s: float | None = None
        self._broken = False
        self._modes: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        before = read_stats(self._folder)
        self.stats.began_at_s = before.began_at_s if before is not None else None
        self._lines = (self._folder / ANSWERED).open("a", buffering=1, encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been told
            self._lines.close()

    def began(self, *, now_s: float) -> None:
        """The first row is due; a load that was killed and restarted goes on with its first life's begin."""
        self.stats.began_at_s = now_s if self.stats.began_at_s is None else self.stats.began_at_s

    def answered(self, answer: Answer, *, now_s: float) -> None:
        """A request got its answer, by one decision or several."""
        stats = self.stats
        if self._answered_at_s is not None:
            stats.longest_gap_s = max(stats.longest_gap_s, now_s - self._answered_at_s)
        self._answered_at_s = now_s
        stats.answered += 1
        stats.first_decision_at_s = now_s if stats.first_decision_at_s is None else stats.first_decision_at_s
        if answer.admitted:
            stats.admitted += 1
            stats.first_admitted_at_s = now_s if stats.first_admitted_at_s is None else stats.first_admitted_at_s
        for decision in answer.trail:
            self._modes[_word(decision_pb2.Mode.Name(decision.mode), "MODE_")] += 1
            self._verdicts[_word(decision_pb2.Verdict.Name(decision.verdict), "VERDICT_")] += 1
            stats.stale_age_max_s = max(stats.stale_age_max_s, decision.age_s)
            self._write("decision", decision.id)
            if decision.verdict == decision_pb2.VERDICT_REJECT:  # decide itself reports the outcome of a refusal
                self._write("outcome", decision.request, str(decision.attempt), "rejected")

    def acknowledged(self, event: outcomes_pb2.OutcomeEvent) -> None:
        """A site has taken this event for good."""
        kind = _word(outcomes_pb2.OutcomeKind.Name(event.kind), "OUTCOME_KIND_")
        self._write("outcome", event.request, str(event.attempt), kind)

    def save(self, *, open_requests: int, reports_lost: int, last: bool = False) -> None:
        """Write the counts, whole or not at all; the `last` time they say whether the books are."""
        self.stats.whole = last and not self._broken
        self.stats.open = open_requests
        self.stats.reports_lost = reports_lost
        self.stats.modes = dict(self._modes)
        self.stats.verdicts = dict(self._verdicts)
        new = self._folder / f"{STATS}.new"
        try:
            new.write_bytes(msgspec.json.encode(self.stats))
            new.replace(self._folder / STATS)
        except OSError as error:
            self._break(error)

    def _write(self, *columns: str) -> None:
        try:
            self._lines.write("\t".join(columns) + "\n")
        except OSError as error:
            self._break(error)

    def _break(self, error: OSError) -> None:
        """Go on without books: requests must not fail for them, and the report says that they are not whole."""
        if not self._broken:
            log.error("the books in %s can't be written, so what is lost stays unknown: %s", self._folder, error)
        self._broken = True


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()
