"""Sketch: which blocks does another site's pool cache, roughly?

A Bloom filter over canonical block keys: never misses a key that is there, and takes an absent one for present at
`false_positive_rate` (9.4e-4 at 16 bits a key and 6 probes), which credits a prefix with a block too many and costs
one block's prefill. It travels in chunks on the `sketch` topic and counts only when all its chunks have come.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tokenfleet.core.records import SketchChunk

Words = NDArray[np.uint64]

KEYS_MAX = 1_000_000  # 2 MB of bits; what is beyond gets no credit
BITS_PER_KEY = 16
HASHES = 6  # 11 would halve the false positives and take twice the time, for one block too many in a thousand
BITS_MIN = 512
CHUNK_BITS_BYTES = 500 * 1024  # a chunk with its names stays below the 512 KiB of a batch

_SECOND = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: makes a second hash of the first
_HALF = np.uint64(32)


class Sketch(Struct, frozen=True, kw_only=True):
    """A Bloom filter: `bits` packed little-end first, `hashes` probes a key, made from `keys` keys."""

    bits: bytes
    hashes: int
    keys: int

    @classmethod
    def of(cls, keys: bytes | Words) -> "Sketch":
        """The sketch of distinct block keys (packed little-endian u64), hottest first: KEYS_MAX are kept."""
        words = _words(keys)[:KEYS_MAX]
        size = max(BITS_MIN, -(-len(words) * BITS_PER_KEY // 64) * 64)
        marks = np.zeros(size, dtype=np.bool_)
        first, second = _hashes(words)
        for probe in range(HASHES):
            marks[_positions(first, second, probe, size)] = True
        return cls(bits=np.packbits(marks, bitorder="little").tobytes(), hashes=HASHES, keys=len(words))

    @property
    def false_positive_rate(self) -> float:
        """Chance that an absent key seems present: (1 − e^(−hashes · keys / bits))^hashes."""
        return (1.0 - math.exp(-self.hashes * self.keys / (len(self.bits) * 8))) ** self.hashes

    def holds(self, keys: bytes | Words) -> NDArray[np.bool_]:
        """For each key whether it seems present."""
        words = _words(keys)
        octets = np.frombuffer(self.bits, dtype=np.uint8)
        found = np.full(len(words), bool(self.keys), dtype=np.bool_)
        first, second = _hashes(words)
        for probe in range(self.hashes if self.keys else 0):
            position = _positions(first, second, probe, len(self.bits) * 8)
            found &= (octets[position >> np.uint64(3)] >> (position & np.uint64(7)).astype(np.uint8)) & 1 == 1
        return found

    def prefix_hits(self, keys: bytes | Words) -> int:
        """Blocks in the longest unbroken run from the first key on."""
        found = self.holds(keys)
        return len(found) if found.all() else int(found.argmin())

    def chunks(self, *, site: str, pool: str, cluster: str, epoch: int, n: int) -> tuple[SketchChunk, ...]:
        """The sketch as records of at most 512 KiB, all under one `n`."""
        cuts = range(0, len(self.bits), CHUNK_BITS_BYTES)
        return tuple(
            SketchChunk(
                site=site,
                pool=pool,
                cluster=cluster,
                epoch=epoch,
                n=n,
                part=part,
                parts=len(cuts),
                hashes=self.hashes,
                keys=self.keys,
                bits=self.bits[start : start + CHUNK_BITS_BYTES],
            )
            for part, start in enumerate(cuts)
        )


def assemble(chunks: Sequence[SketchChunk]) -> Sketch | None:
    """The sketch that `chunks`, all of one pool and one `n`, make up in any order; None while a part is missing."""
    parts = {chunk.part: chunk for chunk in chunks}
    if not chunks or len(parts) != chunks[0].parts:  # every part is below `parts`
        return None
    head = chunks[0]
    return Sketch(bits=b"".join(parts[part].bits for part in range(head.parts)), hashes=head.hashes, keys=head.keys)


class Sketches:
    """The newest whole sketch of each pool of the other sites, and the parts of the one that is arriving."""

    def __init__(self) -> None:
        self._arriving: dict[tuple[str, str], dict[int, SketchChunk]] = {}
        self._whole: dict[tuple[str, str], Sketch] = {}

    def heard(self, chunk: SketchChunk) -> None:
        """Takes a chunk in. A greater (epoch, n), or another cluster, begins a new sketch; an older one is ignored."""
        key = (chunk.site, chunk.pool)
        parts = self._arriving.get(key, {})
        if parts:
            head = next(iter(parts.values()))
            if chunk.cluster == head.cluster and (chunk.epoch, chunk.n) < (head.epoch, head.n):
                return
            if (chunk.cluster, chunk.epoch, chunk.n, chunk.parts) != (head.cluster, head.epoch, head.n, head.parts):
                parts = {}
        parts[chunk.part] = chunk
        self._arriving[key] = parts
        if (sketch := assemble(tuple(parts.values()))) is not None:
            self._whole[key] = sketch

    def prefix_hits(self, site: str, pool: str, keys: bytes) -> int:
        """Blocks of the longest cached prefix at `pool` of `site`; 0 when no whole sketch has come."""
        sketch = self._whole.get((site, pool))
        return sketch.prefix_hits(keys) if sketch is not None else 0

    def retain(self, sites: frozenset[str]) -> None:
        """Forgets the sites that the policy no longer names."""
        for table in (self._arriving, self._whole):
            for key in [key for key in table if key[0] not in sites]:
                del table[key]


def _words(keys: bytes | Words) -> Words:
    return np.frombuffer(keys, dtype="<u8").astype(np.uint64, copy=False) if isinstance(keys, bytes) else keys


def _hashes(words: Words) -> tuple[Words, Words]:
    """Two hashes of each key for double hashing (Kirsch and Mitzenmacher 2006); keys are hashes themselves."""
    second = words * _SECOND
    return words, (second ^ (second >> _HALF)) | np.uint64(1)


def _positions(first: Words, second: Words, probe: int, size: int) -> NDArray[Any]:
    """Bit of each key for one probe: the upper half of first + probe · second, scaled to `size` without a division."""
    mixed = first + np.uint64(probe) * second
    return ((mixed >> _HALF) * np.uint64(size)) >> _HALF
