"""Envelopes: up to which of its placements envelopes each replica has been read.

A replica numbers its envelopes over all partitions, and partitions are read at different paces: number k counts as read
when it and all before it were.
"""

from collections import OrderedDict

from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.shard.records import Holder

HOLDERS_MAX = 10_000
AHEAD_MAX = 10_000  # envelopes read behind a missing one; then it is taken for lost (a full spool loses some)


class Envelopes:
    """One for a process that follows `placements`: what it has read of whom."""

    def __init__(self) -> None:
        self._read: OrderedDict[Holder, _Read] = OrderedDict()
        self._caught_up = False

    def read(self, envelope: PlacementEnvelope) -> None:
        """Take in the number of an envelope whose events the ledger has heard."""
        holder = Holder(replica=envelope.replica, start=envelope.start)
        known = self._read.get(holder)
        if known is None:
            # In the middle of an old log, what lies before its beginning is over; a replica heard live began with 1.
            known = self._read[holder] = _Read(0 if self._caught_up else envelope.n - 1, open_below=not self._caught_up)
            if len(self._read) > HOLDERS_MAX:
                self._read.popitem(last=False)
        self._read.move_to_end(holder)
        known.add(envelope.n)

    def caught_up(self) -> None:
        """The log was read to its end: from now on every number of every replica comes by."""
        self._caught_up = True
        for known in self._read.values():
            known.open_below = False

    def begins_anew(self) -> None:
        """The log is another one: what of an old one was not read will not come."""
        self._read.clear()
        self._caught_up = False

    def has_read(self, holder: Holder, number: int) -> bool:
        """Whether all envelopes of `holder` up to `number` were read."""
        known = self._read.get(holder)
        return number <= 0 or (known is not None and known.done >= number)


class _Read:
    """All up to `done` were read, and those in `ahead`. `open_below`: an older one may come and move the start."""

    __slots__ = ("ahead", "done", "first", "open_below")

    def __init__(self, done: int, *, open_below: bool) -> None:
        self.first = self.done = done
        self.ahead: set[int] = set()
        self.open_below = open_below

    def add(self, n: int) -> None:
        if n <= self.first and self.open_below:
            self.ahead |= set(range(self.first + 1, self.done + 1))
            self.first = self.done = n - 1
        if n > self.done:
            self.ahead.add(n)
        if len(self.ahead) > AHEAD_MAX:
            self.done = min(self.ahead) - 1
        while self.done + 1 in self.ahead:
            self.done += 1
            self.ahead.discard(self.done)
