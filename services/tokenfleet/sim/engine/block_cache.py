"""One engine's KV memory: which blocks are held, which are cached and free to take, which go first."""

from collections.abc import Iterable, Sequence
from itertools import islice


class BlockCache:
    """KV blocks of one instance, by count and by hash.

    A block is private (held by one job, in no index), shared (indexed, held by >= 1 job) or
    idle (indexed, held by none, evictable in LRU order); the rest is free.
    A child is never held without its parent, so the deepest block of a chain goes first.
    """

    def __init__(self, blocks_total: int) -> None:
        self.blocks_total = blocks_total
        self.private = 0
        self._holders: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # oldest first

    @property
    def cached(self) -> int:
        """Indexed blocks, held or idle."""
        return len(self._holders)

    @property
    def used(self) -> int:
        """Blocks that running jobs hold."""
        return self.private + len(self._holders) - len(self._idle)

    @property
    def available(self) -> int:
        """Free and idle blocks."""
        return self.blocks_total - self.used

    def match(self, hashes: Sequence[int]) -> int:
        """Length of the longest indexed prefix of hashes."""
        holders = self._holders
        for depth, block in enumerate(hashes):
            if block not in holders:
                return depth
        return len(hashes)

    def idle_among(self, hashes: Iterable[int]) -> int:
        """How many of these blocks are idle: holding them makes them unavailable."""
        return sum(block in self._idle for block in hashes)

    def hold(self, hashes: Iterable[int]) -> None:
        """One more job holds these indexed blocks."""
        for block in hashes:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def reserve(self, blocks: int) -> tuple[int, ...]:
        """Make blocks private; the idle blocks evicted for them, oldest first. The caller checked `available`."""
        free = self.blocks_total - self.private - len(self._holders)
        evicted = tuple(islice(self._idle, max(0, blocks - free)))
        for block in evicted:
            del self._idle[block], self._holders[block]
        self.private += blocks
        assert self.private + len(self._holders) <= self.blocks_total, "reserved more than was available"
        return evicted

    def publish(self, hashes: Sequence[int], *, first: int, end: int) -> list[tuple[int, int]]:
        """A job's private blocks first..end are computed: index them, or join the copy another job indexed before.

        The runs (first, end) of blocks that the index did not know.
        """
        runs: list[tuple[int, int]] = []
        for position in range(first, end):
            block = hashes[position]
            self.private -= 1
            if block in self._holders:
                self.hold((block,))
                continue
            self._holders[block] = 1
            start = runs.pop()[0] if runs and runs[-1][1] == position else position
            runs.append((start, position + 1))
        return runs

    def release(self, hashes: Sequence[int], *, private: int) -> None:
        """A job lets go of its indexed and private blocks."""
        for block in reversed(hashes):  # deepest first, so that it is evicted first
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None
        self.private -= private
        assert self.private >= 0, "released more private blocks than were held"

    def clear(self) -> bool:
        """Forget all cached blocks; refused while a job holds any, as vLLM does."""
        if self.used:
            return False
        self._holders.clear()
        self._idle.clear()
        return True
