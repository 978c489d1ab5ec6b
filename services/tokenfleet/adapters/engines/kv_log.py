"""KvLog: the numbered KV records of one instance under one claim of its agent.

A reader that misses a number gives no credit until the next snapshot; so a record that may be lost is followed by a
snapshot with a number of its own, and readers that have heard everything take it for the next change.
"""

from collections.abc import Sequence

from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.kvstate import EngineBlocks
from tokenfleet.core.records import KvDelta, KvDigest, KvRecord, KvSnapshot, Order

PART_BYTES_MAX = 512 * 1024 - 4096  # the rest of a record is a few names


class KvLog:
    """What of an instance's blocks was told, and what must be told next.

    `told` is the digest of what records say so far: the one that heartbeats carry, because readers pass through the
    states of records only.
    """

    def __init__(self, instance: str) -> None:
        self.told = KvDigest()
        self._instance = instance
        self._n = 0
        self._boot = ""
        self._claim = ("", -1)
        self._whole = True

    def tell_whole(self) -> None:
        """What was told may not have arrived: the next records are a snapshot."""
        self._whole = True

    def changes(self, blocks: EngineBlocks, *, boot: str, cluster: str, claim: int) -> Sequence[KvRecord]:
        """The records that bring readers up to date; none if nothing changed."""
        self._begin(boot, cluster, claim)
        change = blocks.take()
        digest = blocks.digest()
        if change is None and not self._whole and digest.state == self.told.state:
            return ()
        self._n += 1
        self.told = digest
        size = len(change.removed) + len(change.stored) if change else 0
        if self._whole or size > PART_BYTES_MAX:
            self._whole = False
            return self._parts(blocks)
        return (
            KvDelta(
                instance=self._instance,
                boot=boot,
                order=self._order(),
                model=blocks.model,
                block_tokens=blocks.block_tokens,
                cleared=change.cleared if change else False,
                removed=change.removed if change else b"",
                stored=change.stored if change else b"",
                state=digest.state,
            ),
        )

    def snapshot(self, blocks: EngineBlocks, *, boot: str, cluster: str, claim: int) -> Sequence[KvRecord]:
        """All keys, for readers that are new or missed something; includes and tells the changes until now."""
        changes = self.changes(blocks, boot=boot, cluster=cluster, claim=claim)
        if changes and isinstance(changes[0], KvSnapshot):
            return changes
        return (*changes, *self._parts(blocks))

    def _begin(self, boot: str, cluster: str, claim: int) -> None:
        if self._claim != (cluster, claim):
            self._claim, self._n, self._whole = (cluster, claim), 0, True
        if self._boot != boot:
            self._boot, self._whole = boot, True

    def _order(self) -> Order:
        return Order(cluster=self._claim[0], claim=self._claim[1], n=self._n)

    def _parts(self, blocks: EngineBlocks) -> Sequence[KvSnapshot]:
        keys = blocks.keys()
        step = PART_BYTES_MAX // KEY_BYTES * KEY_BYTES
        parts = [keys[start : start + step] for start in range(0, len(keys), step)] or [b""]
        return tuple(
            KvSnapshot(
                instance=self._instance,
                boot=self._boot,
                order=self._order(),
                model=blocks.model,
                block_tokens=blocks.block_tokens,
                part=part,
                parts=len(parts),
                keys=packed,
                state=blocks.state,
            )
            for part, packed in enumerate(parts)
        )
