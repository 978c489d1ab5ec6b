"""Run: one life of `up`, to tell its requests, rows and times from those of others."""

from pathlib import Path

from msgspec import Struct


class Run(Struct, kw_only=True):
    """`id` begins the id of every request of its load; seconds are this machine's monotonic clock.

    `began_wall_s` only labels. `folder` holds the load's books. `load_ended_s` is when the load was asked to stop,
    before its open requests were waited for.
    """

    id: str
    began_s: float
    began_wall_s: float
    folder: Path
    load_began_s: float | None = None
    load_ended_s: float | None = None

    def wall_at(self, at_s: float) -> float:
        """The label of a time of this run."""
        return self.began_wall_s + at_s - self.began_s
