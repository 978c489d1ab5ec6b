"""Block keys: one name for the same prefix at every engine of a site, and no name for anybody without the secret.

Engines' own block hashes differ between engines and processes, so agents recompute keys from the tokens in KV
events and gateways from the tokens of the prompt:

    key[i] = XXH3-64(key[i - 1] as 8 bytes ‖ tokens of block i as little-endian u32, seed), with key[-1] = 0
    seed   = HMAC-SHA256(site secret; model, adapter, cache_salt, media ids), the first 8 bytes, little-endian

The seed stands in every link, not only in the first: from one key on a topic nobody can test guesses of the next
block. Only full blocks have a key.
"""

import hashlib
import hmac
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

CANONICAL_TOKENS_MIN = 256  # at 16 tokens a block, 200 instances would be 16 million (key, instance) pairs
TOKEN_BYTES = 4
KEY_BYTES = 8  # a block key travels as a little-endian u64
NO_PARENT = 0
FORMAT = b"tokenfleet.block.v1"  # part of every seed: another rule of hashing never meets this one's keys


def canonical_block_tokens(engine_block_sizes: Iterable[int]) -> int:
    """Tokens of a canonical block: the smallest multiple of every engine block size that is ≥ 256.

    Raises ValueError for a size below 1.
    """
    sizes = set(engine_block_sizes)
    if any(size < 1 for size in sizes):
        raise ValueError(f"engine block sizes must be ≥ 1, got {sorted(sizes)}")
    step = math.lcm(*sizes)
    return -(-CANONICAL_TOKENS_MIN // step) * step


def chain_seed(secret: bytes, *, model: str, adapter: str = "", cache_salt: str = "", media: Iterable[str] = ()) -> int:
    """The u64 seed of the blocks of one model, adapter and salt that overlap the media named, in their order.

    Media (image, audio) ids seed only the canonical blocks that hold their placeholder tokens; the blocks after are
    told apart by their parent key. Each field is typed and length-prefixed, so that adapter X without salt is not
    the base model with salt X. Absent and empty are the same.
    """
    fields = [(b"m", model), (b"a", adapter), (b"s", cache_salt), *((b"i", medium) for medium in media)]
    message = FORMAT + b"".join(_typed(kind, value) for kind, value in fields if value)
    return int.from_bytes(hmac.digest(secret, message, hashlib.sha256)[:KEY_BYTES], "little")


def _typed(kind: bytes, value: str) -> bytes:
    text = value.encode("utf-8", "surrogatepass")
    return kind + len(text).to_bytes(4, "little") + text


def block_keys(tokens: NDArray[np.uint32], *, seed: int, block_tokens: int, parent: int = NO_PARENT) -> bytes:
    """Keys of the full blocks of `tokens`, packed little-endian u64; a partial last block has none.

    `parent` is the key of the block before the first token, to go on with a chain (media change the seed on the way).
    """
    view = memoryview(tokens.astype("<u4", copy=False).tobytes())
    size = block_tokens * TOKEN_BYTES
    before = parent.to_bytes(KEY_BYTES, "little")
    keys: list[bytes] = []
    for start in range(0, len(view) - size + 1, size):
        before = child_key(before, view[start : start + size], seed)
        keys.append(before)
    return b"".join(keys)


def child_key(parent: bytes, tokens: bytes | memoryview, seed: int) -> bytes:
    """The packed key of one full block: its little-endian u32 `tokens` after the block with the packed key `parent`."""
    return xxh3_64_intdigest(parent + tokens, seed).to_bytes(KEY_BYTES, "little")


def unpacked(keys: bytes) -> NDArray[np.uint64]:
    """The u64 values of packed keys, without a copy."""
    return np.frombuffer(keys, dtype="<u8")


def xor_of(keys: bytes) -> int:
    """XOR of packed keys, 0 for none: the part of a digest that no order of arrival changes."""
    return int(np.bitwise_xor.reduce(unpacked(keys), initial=np.uint64(0)))
