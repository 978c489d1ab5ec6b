"""Fence: which of the owners' records on a partition stand.

A record of an epoch is void if a claim with a higher offset lies before it. That is a function of the log alone, so
every reader agrees, and an owner that was deposed without knowing hands out nothing: its records lie behind its
successor's claim. An acknowledgement says nothing of that; reading them back does.
"""

from tokenfleet.core.records import Order
from tokenfleet.core.shard.records import At, Record, ShardClaim


class Fence:
    """Reads one partition in order. `claim` is the offset of the last claim, -1 before any."""

    def __init__(self) -> None:
        self.cluster = ""
        self.claim = -1

    def read(self, record: Record, at: At) -> bool:
        """Take in the next record; whether it stands. What holders write always does.

        A log of another cluster replaces all. A reader that begins in the middle learns of a claim before its beginning
        by the records of that epoch.
        """
        if at.cluster != self.cluster:
            self.cluster, self.claim = at.cluster, -1
        if isinstance(record, ShardClaim):
            self.claim = at.offset
            return True
        order: Order | None = getattr(record, "order", None)
        if order is None:
            return True
        if order.cluster != self.cluster or order.claim < self.claim or order.claim >= at.offset:
            return False
        self.claim = order.claim
        return True
