"""EngineBlocks: which canonical blocks one instance caches, made of what its engine announces.

An engine announces blocks of its own size under opaque hashes; the fleet speaks of canonical blocks of
`block_tokens` tokens (core.blocks). A canonical key is stored when all its engine blocks are there and removed when the
first goes. The engine's hash serves only to find parents and to remove.
"""

from msgspec import Struct

from tokenfleet.core.blocks import KEY_BYTES, TOKEN_BYTES, chain_seed, child_key
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch
from tokenfleet.core.netkeys import KvChange, NetKeys
from tokenfleet.core.records import KvDigest, KvState

ROOT = bytes(KEY_BYTES)  # the packed key before a chain's first block
SEEDS_KEPT_MAX = 4096  # (adapter, salt, media) of one engine whose seed is remembered, ≈ 1 MB

Identity = tuple[int, int, int]  # data-parallel rank, KV-cache group, engine hash


class _Chain(Struct, frozen=True):
    """What a block hands down to its children: the adapter and the salt of its prompt."""

    adapter: str
    salt: str


class _Whole:
    """One canonical block: its key and how many of its engine blocks are missing."""

    __slots__ = ("key", "missing")

    def __init__(self, key: bytes, missing: int) -> None:
        self.key = key
        self.missing = missing


class _Block:
    """One engine block.

    `parent` and `children` count within the same canonical block, whose parent key is `before`; `slot` is the place in
    it. `copies` 0 marks a block that is gone but whose tokens later ones of the same canonical block still need.
    `wholes` are the canonical blocks it is part of, `whole` the one it completes.
    """

    __slots__ = (
        "before", "chain", "children", "copies", "identity", "media", "parent", "slot", "tokens", "whole", "wholes"
    )  # fmt: skip

    def __init__(
        self,
        identity: Identity,
        parent: "_Block | None",
        before: bytes,
        chain: _Chain,
        tokens: bytes,
        media: tuple[str, ...],
    ) -> None:
        self.identity = identity
        self.parent = parent
        self.slot = parent.slot + 1 if parent else 0
        self.before = before
        self.chain = chain
        self.tokens = tokens
        self.media = media
        self.copies = 0
        self.children = 0
        self.whole: _Whole | None = None
        self.wholes: list[_Whole] = []

    def members(self) -> list["_Block"]:
        """The blocks of its canonical block up to this one, in the order of their tokens."""
        members: list[_Block] = [self]
        while (parent := members[-1].parent) is not None:
            members.append(parent)
        return members[::-1]


class EngineBlocks:
    """State of one instance's prefix cache; `apply` is the door in, `take` and `digest` the doors out.

    `block_tokens` must be a multiple of the engine's block size. `blocks_max` is the engine's block total, 0 when
    unknown: no more copies than that are believed, because a second BlockStored may only report a reuse.
    """

    def __init__(self, *, secret: bytes, model: str, block_tokens: int, blocks_max: int = 0) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.blocks_max = blocks_max
        self._secret = secret
        self._states: dict[int, KvState] = {}  # by rank
        self._blocks: dict[Identity, _Block] = {}
        self._copies = 0
        self._seeds: dict[tuple[_Chain, tuple[str, ...]], int] = {}
        self._keys = NetKeys()

    @property
    def state(self) -> KvState:
        """exact: all of the cache is known; approx: a lower bound; none: nothing was heard yet, or no tokens came."""
        states = set(self._states.values())
        return "none" if not states or "none" in states else "approx" if "approx" in states else "exact"

    def heard_from_start(self, rank: int = 0) -> None:
        """Every event of the rank since its start, or since its cache was empty, has been or will be applied."""
        self._states[rank] = "exact"

    def lost(self, rank: int = 0) -> None:
        """Events of the rank are missing for good: what is known is dropped, what follows is a lower bound."""
        self._empty(rank)
        self._states[rank] = "approx"

    def apply(self, batch: KvBatch) -> None:
        """Take one batch; events before `heard_from_start` leave the rank at `approx`."""
        self._states.setdefault(batch.rank, "approx")
        for event in batch.events:
            match event:
                case BlockStored():
                    self._store(batch.rank, event)
                case BlockRemoved():
                    self._remove(batch.rank, event)
                case AllBlocksCleared():
                    self._empty(batch.rank)
                    self.heard_from_start(batch.rank)

    def take(self) -> KvChange | None:
        """The net change since the last call, None when there is none."""
        return self._keys.take()

    def keys(self) -> bytes:
        """All canonical keys held, packed, in no order."""
        return b"".join(self._keys.chains)

    def digest(self) -> KvDigest:
        keys = self._keys
        return KvDigest(blocks=len(keys.chains), xor=keys.xor, state=self.state, block_tokens=self.block_tokens)

    def _store(self, rank: int, event: BlockStored) -> None:
        size = event.block_size * TOKEN_BYTES
        if event.tokens is None or len(event.tokens) < size * len(event.hashes) or self.block_tokens % event.block_size:
            self._states[rank] = "none"  # no key can be made of such blocks
            return
        if self._states[rank] == "none":
            self._states[rank] = "approx"
        before = None if event.parent is None else self._blocks.get((rank, event.group, event.parent))
        if event.parent is not None and before is None:
            self._states[rank] = "approx"  # the chain began before we listened
            return
        for at, digest in enumerate(event.hashes):
            identity = (rank, event.group, digest)
            if (block := self._blocks.get(identity)) is None:
                media = event.media[at] if event.media else ()
                block = self._linked(identity, before, event, event.tokens[at * size : (at + 1) * size], media)
            self._count(block)
            before = block

    def _linked(
        self, identity: Identity, before: _Block | None, event: BlockStored, tokens: bytes, media: tuple[str, ...]
    ) -> _Block:
        if before is None:
            block = _Block(identity, None, ROOT, _Chain(event.adapter, event.salt), tokens, media)
        elif before.whole is not None:
            block = _Block(identity, None, before.whole.key, before.chain, tokens, media)
        else:
            block = _Block(identity, before, before.before, before.chain, tokens, media)
            before.children += 1
        self._blocks[identity] = block
        if block.slot == self.block_tokens // event.block_size - 1:
            self._complete(block)
        return block

    def _complete(self, last: _Block) -> None:
        members = last.members()
        media = tuple(dict.fromkeys(medium for member in members for medium in member.media))
        key = child_key(last.before, b"".join(member.tokens for member in members), self._seed(last.chain, media))
        last.whole = _Whole(key, missing=sum(member.copies == 0 for member in members))
        for member in members:
            member.wholes.append(last.whole)

    def _seed(self, chain: _Chain, media: tuple[str, ...]) -> int:
        if (seed := self._seeds.get((chain, media))) is None:
            if len(self._seeds) >= SEEDS_KEPT_MAX:
                self._seeds.clear()
            seed = chain_seed(self._secret, model=self.model, adapter=chain.adapter, cache_salt=chain.salt, media=media)
            self._seeds[chain, media] = seed
        return seed

    def _count(self, block: _Block) -> None:
        if block.copies and self.blocks_max and self._copies >= self.blocks_max:
            return  # more copies than the engine has blocks: a report of reuse
        block.copies += 1
        self._copies += 1
        if block.copies > 1:
            return
        for whole in block.wholes:
            whole.missing -= 1
            if whole.missing == 0:
                self._keys.hold(whole.key)
        if self.blocks_max and self._copies > self.blocks_max:
            self._believe_single_copies()

    def _believe_single_copies(self) -> None:
        """Which of the second copies were reports of reuse can't be told; without them the count fits again."""
        for block in self._blocks.values():
            block.copies = min(block.copies, 1)
        self._copies = sum(block.copies for block in self._blocks.values())

    def _remove(self, rank: int, event: BlockRemoved) -> None:
        for digest in event.hashes:
            block = self._blocks.get((rank, event.group, digest))
            if block is None or block.copies == 0:
                continue
            block.copies -= 1
            self._copies -= 1
            if block.copies == 0:
                for whole in block.wholes:
                    whole.missing += 1
                    if whole.missing == 1:
                        self._keys.release(whole.key)
                self._forget_unneeded(block)

    def _forget_unneeded(self, block: _Block | None) -> None:
        """Drop a block that is gone, unless later ones of its canonical block need its tokens; then those before it."""
        while block is not None and block.copies == 0 and block.children == 0:
            del self._blocks[block.identity]
            if block.whole is not None:
                for member in block.members():
                    member.wholes.remove(block.whole)
            block = block.parent
            if block is not None:
                block.children -= 1

    def _empty(self, rank: int) -> None:
        mine = [block for block in self._blocks.values() if block.identity[0] == rank]
        if len(mine) == len(self._blocks):
            self._keys.clear()
        else:
            for block in mine:
                if block.whole is not None and block.whole.missing == 0:
                    self._keys.release(block.whole.key)
        for block in mine:
            self._copies -= block.copies
            del self._blocks[block.identity]
