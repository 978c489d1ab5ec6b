"""Claim: a writer's place in a log that one writer at a time should write.

Its first message carries no epoch and claims the log: the offset where it lands is the epoch of all that follow, and
readers refuse a lower one.
"""

EPOCH_UNKNOWN = -1


class Claim:
    """Epoch and number of this writer's messages in one partition; one batch holds one message."""

    def __init__(self) -> None:
        self.epoch = EPOCH_UNKNOWN
        self.n = 0
        self._cluster: str = ""
        self._offset = EPOCH_UNKNOWN

    def next(self, cluster: str) -> int:
        """The number of the next message; another cluster's log is claimed anew."""
        if cluster != self._cluster:
            self._cluster, self.epoch = cluster, EPOCH_UNKNOWN
        self.n += 1
        return self.n

    def written(self, offset: int) -> None:
        """The last message lies at `offset`. If another's lies right before it, the next one claims the log again.

        A deposed writer that had paused may have claimed it after us, and readers would refuse us for ever. Should two
        take turns, that ends when the deposed one learns that it is.
        """
        if self.epoch == EPOCH_UNKNOWN:
            self.epoch = offset
        elif offset != self._offset + 1:
            self.epoch = EPOCH_UNKNOWN
        self._offset = offset
