"""KV events: what an engine says of its prefix cache, normalised and without the wire's dialects."""

from msgspec import Struct


class BlockStored(Struct, frozen=True, kw_only=True):
    """Engine blocks now cached, in the order of their chain.

    `hashes` are normalised to u64; `parent` is None at the start of a prompt. `tokens` are little-endian u32 of all the
    blocks, None where the engine doesn't tell. `adapter` is empty for the base model. `salt` and `media` come from the
    blocks' extra keys: the salt stands in a prompt's first block only, `media` has the ids of each block or is empty.
    `group` is the engine's KV-cache group.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes | None
    block_size: int
    adapter: str = ""
    salt: str = ""
    media: tuple[tuple[str, ...], ...] = ()
    group: int = 0


class BlockRemoved(Struct, frozen=True, kw_only=True):
    """One physical copy of each of these engine blocks is gone."""

    hashes: tuple[int, ...]
    group: int = 0


class AllBlocksCleared(Struct, frozen=True, kw_only=True):
    """The whole prefix cache of the rank that says so is gone."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvBatch(Struct, frozen=True, kw_only=True):
    """Events of one engine step, in order; `rank` is the data-parallel rank that they are of."""

    rank: int
    events: tuple[KvEvent, ...]
