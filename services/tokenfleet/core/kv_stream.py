"""KV stream: one instance's blocks, from numbered changes, snapshots and digests.

Whether they can be believed follows from three checks: the numbers follow one another without a gap, the heartbeats'
digests agree, and the engine's boot is the one that the blocks belong to.
"""

from collections import deque

from tokenfleet.core.block_table import BlockTable
from tokenfleet.core.records import KvDelta, KvDigest, KvSnapshot, KvState, Order


class KvStream:
    """The blocks of one instance as this reader knows them."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self.slot = table.open()
        self.blocks = 0
        self.block_tokens = 0
        self._xor = 0
        self._boot: str = ""
        self._boot_heard: str = ""  # by the last heartbeat
        self._cluster: str = ""
        self._claim: int = -1
        self._n = NOTHING_HEARD
        self._says: KvState = "none"  # the agent's own word on its source
        self._gapless = True
        self._disagrees = False
        self._doubt: _Doubt | None = None
        self._passed = _Passed()
        self._kept: deque[KvDelta] = deque()
        self._assembly: _Assembly | None = None

    @property
    def state(self) -> KvState:
        """`none` when the blocks get no credit."""
        boots_agree = self._boot_heard in ("", self._boot)
        return self._says if self.trusted and boots_agree else "none"

    @property
    def trusted(self) -> bool:
        """Whether no change is missing as far as numbers and digests tell."""
        return self._gapless and not self._disagrees

    @property
    def order(self) -> tuple[int, int]:
        return self._claim, self._n

    def delta(self, delta: KvDelta) -> None:
        """Apply one change if it is the next; after a gap only a snapshot helps."""
        if not self._admits(delta.order) or delta.order.n <= self._n:
            return
        follows = delta.order.n == self._n + 1 or (self._n == NOTHING_HEARD and delta.order.n == 1)
        if self._gapless and not follows:
            self._gapless = False
            self._forget()
        self._n = delta.order.n
        if not self.trusted:
            self._keep(delta)
        if self._gapless:
            self._change(delta)

    def snapshot(self, part: KvSnapshot) -> None:
        """Collect the parts of a snapshot that can mend the stream, and start anew from it when it is complete."""
        if not self._admits(part.order):
            return
        if self.trusted and part.order.n <= self._n:
            return  # nothing to mend
        if self._assembly is None or not self._assembly.continues(part):
            self._assembly = _Assembly(part)
        if self._assembly.add(part):
            keys, self._assembly = self._assembly.keys(), None
            self._start_from(part, keys)

    def verify(self, digest: KvDigest, *, boot: str, now_s: float) -> bool:
        """Compare with what the agent held when the heartbeat left it; True when it tells for the first time that all
        that was cached is gone, by an empty cache or another boot.

        Changes and heartbeats travel on different topics, so either may be ahead: a digest that the blocks have
        already passed agrees; one that they don't reach within DOUBT_MAX_S disagrees. An empty cache is believed at
        once, whatever is on its way: credit for what is gone costs more than credit withheld for a moment.
        """
        gone = self._boot_heard not in ("", boot)
        self._boot_heard = boot
        said = (digest.blocks, digest.xor)
        self._passed.age(now_s)
        if said in self._passed and digest.block_tokens in (0, self.block_tokens):
            self._agree()
        elif digest.blocks == 0 and self.blocks:
            gone = gone or not self._disagrees
            self._disagrees = True
        elif self._doubt is None:
            self._doubt = _Doubt(said, now_s)
        elif now_s - self._doubt.since_s >= DOUBT_MAX_S:
            self._disagrees = True
        return gone

    def close(self) -> None:
        """Give the blocks up for good."""
        self._table.retire(self.slot)

    def _admits(self, order: Order) -> bool:
        """Whether the record is of the agent's present life; begins a new one: its agent knows nothing yet."""
        if (order.cluster, order.claim) == (self._cluster, self._claim):
            return True
        if order.cluster == self._cluster and order.claim < self._claim:
            return False
        self._cluster = order.cluster
        self._claim = order.claim
        self._n = NOTHING_HEARD
        self._assembly = None
        self._kept.clear()
        self._forget()
        self._pass()
        self._gapless = True
        self._agree()
        return True

    def _change(self, delta: KvDelta) -> None:
        if delta.cleared or delta.boot != self._boot or delta.block_tokens != self.block_tokens:
            self._forget()
        self._boot, self.block_tokens, self._says = delta.boot, delta.block_tokens, delta.state
        removed = self._table.remove(self.slot, delta.removed)
        stored = self._table.store(self.slot, delta.stored)
        self.blocks += stored.blocks - removed.blocks
        self._xor ^= stored.xor ^ removed.xor
        self._pass()

    def _start_from(self, last: KvSnapshot, keys: bytes) -> None:
        self._forget()
        self._boot, self.block_tokens, self._says = last.boot, last.block_tokens, last.state
        stored = self._table.store(self.slot, keys)
        self.blocks, self._xor = stored.blocks, stored.xor
        self._passed = _Passed()
        self._pass()
        self._agree()
        self._gapless = True
        newest, self._n = self._n, last.order.n
        for delta in self._kept:
            if delta.order.n == self._n + 1:
                self._n = delta.order.n
                self._change(delta)
        self._kept.clear()
        if self._n < newest:
            self._gapless, self._n = False, newest
            self._forget()

    def _forget(self) -> None:
        if self.blocks:
            self._table.retire(self.slot)
            self.slot = self._table.open()
        self.blocks = self._xor = 0

    def _pass(self) -> None:
        self._passed.add((self.blocks, self._xor))
        if self._doubt is not None and self._doubt.said == (self.blocks, self._xor):
            self._agree()

    def _agree(self) -> None:
        self._doubt = None
        self._disagrees = False

    def _keep(self, delta: KvDelta) -> None:
        """Keep a change that a snapshot on its way may not include."""
        self._kept.append(delta)
        if len(self._kept) > DELTAS_KEPT_MAX:
            self._kept.popleft()


NOTHING_HEARD = -1
DOUBT_MAX_S = 2.0  # two heartbeats
DIGESTS_KEPT_MAX = 1024  # states passed in DOUBT_MAX_S: five times an agent's 100 records a second
DELTAS_KEPT_MAX = 256
PARTS_MAX = 1024
SNAPSHOT_BYTES_MAX = 8 << 20  # a million blocks


class _Passed:
    """States (blocks, XOR) that the stream was in lately: for DOUBT_MAX_S to twice as long, and always the newest."""

    __slots__ = ("_before", "_newest", "_recent", "_since_s")

    def __init__(self) -> None:
        self._recent: set[tuple[int, int]] = set()
        self._before: set[tuple[int, int]] = set()
        self._newest = (0, 0)
        self._since_s: float | None = None

    def add(self, state: tuple[int, int]) -> None:
        self._newest = state
        self._recent.add(state)
        if len(self._recent) >= DIGESTS_KEPT_MAX:
            self._before, self._recent = self._recent, set()

    def age(self, now_s: float) -> None:
        """Forget, at every DOUBT_MAX_S, what was passed before the last one."""
        if self._since_s is None:
            self._since_s = now_s
        elif now_s - self._since_s >= DOUBT_MAX_S:
            self._before, self._recent, self._since_s = self._recent, set(), now_s

    def __contains__(self, state: tuple[int, int]) -> bool:
        return state == self._newest or state in self._recent or state in self._before


class _Doubt:
    """A digest not passed yet, since when."""

    __slots__ = ("said", "since_s")

    def __init__(self, said: tuple[int, int], since_s: float) -> None:
        self.said = said
        self.since_s = since_s


class _Assembly:
    """Parts of one snapshot, in any order."""

    __slots__ = ("_boot", "_order", "_parts", "_wanted")

    def __init__(self, first: KvSnapshot) -> None:
        self._order = first.order
        self._boot = first.boot
        self._wanted = first.parts
        self._parts: dict[int, bytes] = {}

    def continues(self, part: KvSnapshot) -> bool:
        return (part.order, part.boot, part.parts) == (self._order, self._boot, self._wanted)

    def add(self, part: KvSnapshot) -> bool:
        """True when all parts are there. A snapshot beyond the bounds never is."""
        if part.part < self._wanted <= PARTS_MAX and self._bytes() + len(part.keys) <= SNAPSHOT_BYTES_MAX:
            self._parts[part.part] = part.keys
        return len(self._parts) == self._wanted

    def keys(self) -> bytes:
        return b"".join(self._parts[number] for number in range(self._wanted))

    def _bytes(self) -> int:
        return sum(map(len, self._parts.values()))
