"""Prefix: which instances hold how much of a request's prefix in their KV cache.

Deltas are applied while their numbers follow one another; a gap, or a digest that goes on disagreeing, takes the
instance's credit until the next complete snapshot. The index is a lower bound of the truth or says nothing.
"""

from collections.abc import Iterable

from tokenfleet.core.block_table import BlockTable, Census
from tokenfleet.core.columns import Depths
from tokenfleet.core.expected import Expected
from tokenfleet.core.hits import Planes, depths_of, planes_of
from tokenfleet.core.kv_stream import KvStream
from tokenfleet.core.records import KvDelta, KvDigest, KvRecord, KvState


class PrefixIndex:
    """Canonical blocks of all instances of one site."""

    def __init__(self, *, keys_max: int = 8_000_000) -> None:
        """`keys_max` bounds memory, about 100 MB a million; an instance whose keys find no room gets no credit."""
        self._table = BlockTable(keys_max=keys_max)
        self._streams: dict[str, KvStream] = {}
        self._instances: dict[int, str] = {}  # slot → instance, of those that get credit
        self._credited = 0
        self._expected = Expected()
        self.changed: set[str] = set()  # instances whose slot or state changed; the reader empties it

    def apply(self, record: KvRecord) -> None:
        """A change or a part of a snapshot of one instance. Old, repeated and foreign lives' records change nothing."""
        stream = self._stream(record.instance)
        before = self._debit(stream)
        if isinstance(record, KvDelta):
            stream.delta(record)
            keys = len(record.stored) // 8
        else:
            stream.snapshot(record)
            keys = len(record.keys) // 8
        if stream.slot != before[0]:
            self._expected.clear(before[0])
        if self._credit(record.instance, stream) != before:
            self.changed.add(record.instance)
        self._table.sweep(min(SWEPT_AT_LEAST + SWEPT_PER_KEY * keys, SWEPT_AT_MOST))

    def verify(self, instance: str, digest: KvDigest, *, boot: str, now_s: float) -> KvState:
        """Compare the index with what a heartbeat says the instance holds; returns the state believed now."""
        if (stream := self._streams.get(instance)) is None:
            return "none"
        before = stream.state
        if stream.verify(digest, boot=boot, now_s=now_s):
            self._expected.clear(stream.slot)
        if stream.state != before:
            self._debit(stream)
            self._credit(instance, stream)
            self.changed.add(instance)
        return stream.state

    def hits(self, keys: bytes) -> dict[str, int]:
        """Instance → blocks of `keys` that it holds, or will hold, from the first on without a break; absent: none."""
        depths = self.depths(keys)
        return {name: int(depths[stream.slot]) for name, stream in self._streams.items() if depths[stream.slot]}

    def expect(self, instance: str, decision: str, keys: bytes, *, now_s: float) -> None:
        """`decision` sends a prompt with these blocks to the instance."""
        self._expected.add(decision, self._stream(instance).slot, keys, now_s=now_s)

    def came(self, decision: str, *, now_s: float) -> None:
        """Its first token came: what was expected is computed, and the engine tells of it soon."""
        self._expected.came(decision, now_s=now_s)

    def unexpect(self, decision: str) -> None:
        """It ended without a first token."""
        self._expected.drop(decision)

    def expire(self, now_s: float) -> None:
        """What was expected and is not there by now is expected no longer."""
        self._expected.expire(now_s)

    def depths(self, keys: bytes) -> Depths:
        """Blocks of `keys` held from the first on without a break, by slot; the last is 0: no credit."""
        return depths_of(self.planes(keys))

    def planes(self, keys: bytes) -> Planes:
        """The same as bit planes."""
        planes = self._table.planes(keys, self._credited, self._expected)
        return planes_of(planes, self._table.slots_opened)

    def slot(self, instance: str) -> int:
        """The instance's place in `depths`, −1 when nothing was ever heard of its blocks."""
        stream = self._streams.get(instance)
        return stream.slot if stream is not None else -1

    def census(self, instances: Iterable[str]) -> Census:
        """The blocks that any of `instances` holds with credit, as of now; it may be counted in another thread."""
        wanted = frozenset(instances)
        return self._table.census(sum(1 << slot for slot, name in self._instances.items() if name in wanted))

    def state(self, instance: str) -> KvState:
        """What may be believed: `none` without credit."""
        stream = self._streams.get(instance)
        return stream.state if stream else "none"

    def block_tokens(self, instance: str) -> int:
        """Tokens of a canonical block of the instance, 0 when unknown."""
        stream = self._streams.get(instance)
        return stream.block_tokens if stream else 0

    def blocks(self, instance: str) -> int:
        """Blocks indexed for the instance, with or without credit."""
        stream = self._streams.get(instance)
        return stream.blocks if stream else 0

    @property
    def blocks_total(self) -> int:
        """(block, instance) pairs indexed."""
        return sum(stream.blocks for stream in self._streams.values())

    def order(self, instance: str) -> tuple[int, int]:
        """(claim, n) of the instance's last record: names the version of its blocks that a decision saw."""
        stream = self._streams.get(instance)
        return stream.order if stream else (-1, -1)

    def drop(self, instance: str) -> None:
        """The instance is gone."""
        if (stream := self._streams.pop(instance, None)) is not None:
            self._debit(stream)
            self._expected.clear(stream.slot)
            stream.close()

    def _stream(self, instance: str) -> KvStream:
        stream = self._streams.get(instance)
        if stream is None:
            stream = self._streams[instance] = KvStream(self._table)
            self.changed.add(instance)
        return stream

    def _debit(self, stream: KvStream) -> tuple[int, KvState]:
        if self._instances.pop(stream.slot, None) is not None:
            self._credited ^= 1 << stream.slot
        return stream.slot, stream.state

    def _credit(self, instance: str, stream: KvStream) -> tuple[int, KvState]:
        if stream.state != "none":
            self._instances[stream.slot] = instance
            self._credited |= 1 << stream.slot
        return stream.slot, stream.state


SWEPT_PER_KEY = 4  # keys looked at for each key stored: a sweep ends before the table has grown by a quarter
SWEPT_AT_LEAST = 16
SWEPT_AT_MOST = 20_000  # about 3 ms
