"""Hits: the cached tokens of each instance of a pool, from bit planes over the slots of the prefix index.

The number of blocks that a slot holds has bit k where plane k has the slot's bit; eight slots a byte, least first.
"""

import numpy as np
from numpy.typing import NDArray

from tokenfleet.core.columns import Depths, Floats
from tokenfleet.core.compiled import Twin

Planes = NDArray[np.uint8]  # a row a plane
Places = NDArray[np.int64]  # slot of the prefix index of each instance, −1 for none

PLACES = np.arange(8, dtype=np.uint64)[:, None]


def planes_of(planes: list[int], slots: int) -> Planes:
    """Of bitsets, with room for one slot more than there are: the last holds nothing."""
    size = slots // 8 + 1
    return np.frombuffer(b"".join([plane.to_bytes(size, "little") for plane in planes]), np.uint8).reshape(-1, size)


def depths_of(planes: Planes) -> Depths:
    """Blocks of each slot."""
    depths: Depths = _bytes_of(planes[:8])
    for place in range(8, len(planes), 8):
        depths = np.add(depths, _bytes_of(planes[place : place + 8]).astype(np.uint32) << np.uint32(place))
    return depths


def _bytes_of(planes: Planes) -> NDArray[np.uint8]:
    """The number of each slot, of up to 8 planes, eight slots at a time."""
    bits = np.unpackbits(planes, axis=None, bitorder="little").view(np.uint64).reshape(planes.shape)
    return np.bitwise_or.reduce(bits << PLACES[: len(planes)], axis=0).view(np.uint8)


def by_arrays(planes: Planes, places: Places, block_tokens: int) -> Floats:
    """Tokens of each instance."""
    hits = depths_of(planes).take(places).astype(np.float64)
    hits *= block_tokens
    return hits


def one_by_one(planes: Planes, places: Places, block_tokens: int) -> Floats:
    """The same, an instance at a time, to be compiled."""
    count, size = planes.shape
    hits = np.zeros(len(places))
    for first in range(0, count, 8):
        words = np.zeros(size, np.uint64)
        for plane in range(first, min(first + 8, count)):
            for byte in range(size):
                words[byte] |= spread(planes[plane, byte]) << np.uint64(plane - first)
        numbers = words.view(np.uint8)
        for instance in range(len(places)):
            hits[instance] += numbers[places[instance]] * (block_tokens << first)
    return hits


def spread(byte: np.uint8) -> np.uint64:
    """Bit k of the byte as byte k of a word: all bits are copied to all bytes, each keeps its own, what is left of it
    carries into the highest."""
    own = (np.uint64(byte) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
    return (own + np.uint64(0x7F7F7F7F7F7F7F7F)) >> np.uint64(7) & np.uint64(0x0101010101010101)


def _sample() -> tuple[object, ...]:
    return np.frombuffer(b"\1", np.uint8).reshape(1, 1), np.zeros(1, np.int64), 1


tokens_held = Twin(by_arrays, one_by_one, sample=_sample, formulas=(spread,))
