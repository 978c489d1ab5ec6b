"""KV memory of an engine's sequences: what each takes, reuses and gives back, told as KV events."""

from tokenfleet.sim.engine.block_cache import BlockCache
from tokenfleet.sim.engine.events import BlocksRemoved, BlocksStored, Event
from tokenfleet.sim.engine.sequences import DecodeBatch, Sequence
from tokenfleet.sim.profiles import Profile

COMPUTED_TOKENS_MIN = 16  # of every prompt, cached or not: the model needs a query to give a first token


class KvMemory:
    """A block cache in terms of sequences; events are appended to the caller's list in order."""

    def __init__(self, profile: Profile) -> None:
        self.cache = BlockCache(profile.kv_blocks)
        self._block_size = profile.block_size
        self._watermark_blocks = profile.watermark_blocks

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self._block_size)

    def admit(self, sequence: Sequence, at_s: float, events: list[Event]) -> int | None:
        """Hold the prompt's cached prefix and room for the rest; the tokens reused.

        None if the uncached blocks and the watermark do not fit in the free and evictable ones.
        """
        hashes = sequence.job.block_hashes
        reusable = max(0, sequence.prefill_tokens - COMPUTED_TOKENS_MIN) // self._block_size
        hit = hashes[: self.cache.match(hashes[:reusable])]
        fresh_blocks = self.blocks(sequence.prefill_tokens) - len(hit)
        available = self.cache.available - self.cache.idle_among(hit)
        if fresh_blocks + self._watermark_blocks > available:
            return None
        self.cache.hold(hit)
        self._reserve(fresh_blocks, at_s, events)
        cached_tokens = len(hit) * self._block_size
        sequence.computed, sequence.shared_blocks = cached_tokens, len(hit)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached_tokens
        return cached_tokens

    def grow(self, decodes: DecodeBatch, ticks: int, at_s: float, events: list[Event]) -> None:
        """Hold the blocks the decodes need for so many ticks more."""
        self._reserve(decodes.growth(ticks), at_s, events)
        decodes.allocated_tick += ticks

    def publish(self, sequence: Sequence, at_s: float, events: list[Event]) -> None:
        """Index the prompt blocks computed by now; a run of blocks new to the index is one event."""
        hashes = sequence.job.block_hashes
        computed_blocks = min(len(hashes), sequence.computed // self._block_size)
        for first, end in self.cache.publish(hashes, first=sequence.shared_blocks, end=computed_blocks):
            events.append(
                BlocksStored(
                    job_id=sequence.job.id,
                    at_s=at_s,
                    first_block=first,
                    hashes=hashes[first:end],
                    parent=hashes[first - 1] if first else None,
                )
            )
        sequence.shared_blocks = max(sequence.shared_blocks, computed_blocks)

    def release(self, sequence: Sequence, blocks: int) -> None:
        """The sequence gives back the so many blocks it holds; computed prompt blocks stay cached."""
        shared = sequence.job.block_hashes[: sequence.shared_blocks]
        self.cache.release(shared, private=blocks - len(shared))
        sequence.shared_blocks = 0

    def _reserve(self, blocks: int, at_s: float, events: list[Event]) -> None:
        evicted = self.cache.reserve(blocks)
        if evicted:
            events.append(BlocksRemoved(at_s=at_s, hashes=evicted))
