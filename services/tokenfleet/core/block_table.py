"""Block table: who holds which block, as one dict from key to a bitset of holders.

A bitset is an int whose bit k stands for slot k. A holder that forgets everything gets a new slot, which costs
nothing at once: the old slot's bits stay behind, are masked out by whoever asks, and are swept away step by step. A
slot's own bit is one object shared by all keys that only it holds; keys stored in a row share their bitsets too.
"""

from collections.abc import Iterator
from functools import cache
from itertools import repeat

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tokenfleet.core.expected import Expected


class Change(Struct, frozen=True):
    """How many keys a call really stored or removed, and their XOR."""

    blocks: int
    xor: int


class Census(Struct, frozen=True):
    """A copy of the table and whose blocks are to be counted in it."""

    holders: dict[int, int]
    among: int

    def keys(self) -> bytes:
        """The keys that any of those hold, the ones with most holders first."""
        found = [((held & self.among).bit_count(), key) for key, held in self.holders.items() if held & self.among]
        found.sort(reverse=True)
        return np.array([key for _, key in found], dtype="<u8").tobytes()


class BlockTable:
    """Block keys of many holders. Keys travel as packed little-endian u64."""

    def __init__(self, *, keys_max: int) -> None:
        """Beyond `keys_max` different keys, keys that nobody holds yet are not stored."""
        self._keys_max = keys_max
        self._holders: dict[int, int] = {}
        self._bits: list[int] = []
        self._free: list[int] = []
        self._retired = 0
        self._sweep: Iterator[int] | None = None
        self._sweeping = 0

    def __len__(self) -> int:
        """Different keys held, those not yet swept included."""
        return len(self._holders)

    @property
    def slots_opened(self) -> int:
        """All slots lie below it."""
        return len(self._bits)

    def open(self) -> int:
        """A slot that holds nothing."""
        if self._free:
            return self._free.pop()
        self._bits.append(1 << len(self._bits))
        return len(self._bits) - 1

    def retire(self, slot: int) -> None:
        """The holder of `slot` has forgotten everything; its bits are swept later and the slot then used again."""
        self._retired |= self._bits[slot]

    def store(self, slot: int, keys: bytes) -> Change:
        """Add `slot` to the holders of each key; storing a key twice changes nothing."""
        holders, bit = self._holders, self._bits[slot]
        packed = np.frombuffer(keys, "<u8")
        wanted: list[int] = packed.tolist()
        if len(holders) + len(wanted) > self._keys_max:
            wanted = [key for key in wanted if key in holders]
        new: list[int] = []
        last_held, last_joined = 0, bit
        for key in wanted:
            held = holders.get(key, 0)
            if held & bit:
                continue
            if held is not last_held:
                last_held, last_joined = held, held | bit if held else bit
            holders[key] = last_joined
            new.append(key)
        return _change(new, packed)

    def remove(self, slot: int, keys: bytes) -> Change:
        """Take `slot` from the holders of each key that it holds."""
        holders, bit = self._holders, self._bits[slot]
        packed = np.frombuffer(keys, "<u8")
        gone: list[int] = []
        for key in packed.tolist():
            held = holders.get(key, 0)
            if not held & bit:
                continue
            self._put(key, held ^ bit)
            gone.append(key)
        return _change(gone, packed)

    def planes(self, keys: bytes, among: int, expected: Expected) -> list[int]:
        """How many blocks of `keys` each slot of bitset `among`, or that expects blocks, holds from the first on
        without a break: the slots whose number has bit k are those of the k-th bitset.

        The number is counted in Gray code, where each block changes one bit of it for all that hold the block.
        """
        holders, coming, alive = self._holders, expected.holders, among | expected.slots
        unheard = alive != among  # some expect blocks whose own word is worth nothing
        wanted: list[int] = np.frombuffer(keys, "<u8").tolist()
        bits = len(wanted).bit_length()
        planes = [0] * bits
        for key, held, bit in zip(wanted, map(holders.get, wanted, repeat(0)), changing_bits(bits), strict=False):
            if coming and key in coming:
                held = (held & among if unheard else held) | coming[key]
            elif unheard:
                held &= among
            alive &= held
            if not alive:
                break
            planes[bit] ^= alive
        for bit in reversed(range(bits - 1)):  # from Gray code to binary
            planes[bit] ^= planes[bit + 1]
        return planes

    def census(self, among: int) -> Census:
        """A copy to count the blocks of slots `among` in: 15 ms a million keys."""
        return Census(dict(self._holders), among)

    def sweep(self, keys: int) -> None:
        """Look at up to `keys` keys for bits of retired slots; when all were looked at, the slots are free again."""
        if self._sweep is None:
            if not self._retired:
                return
            self._sweeping, self._retired = self._retired, 0
            self._sweep = iter(list(self._holders))  # the dict may change between two steps
        for _ in range(keys):
            if (key := next(self._sweep, None)) is None:
                self._sweep = None
                self._free += slots(self._sweeping)
                return
            if dead := self._holders.get(key, 0) & self._sweeping:
                self._put(key, self._holders[key] ^ dead)

    def _put(self, key: int, held: int) -> None:
        if not held:
            del self._holders[key]
        elif held & (held - 1):
            self._holders[key] = held
        else:
            self._holders[key] = self._bits[held.bit_length() - 1]


@cache
def changing_bits(bits: int) -> bytes:
    """Which bit of a Gray code of so many bits each count changes, from the first one on."""
    if not bits:
        return b""
    half = changing_bits(bits - 1)
    return half + bytes((bits - 1,)) + half


def slots(bitset: int) -> Iterator[int]:
    """The slots of a bitset, least first."""
    while bitset:
        low = bitset & -bitset
        yield low.bit_length() - 1
        bitset ^= low


def _change(changed: list[int], packed: NDArray[np.uint64]) -> Change:
    """The change of keys that are all, or some, of those that came packed."""
    some = packed if len(changed) == len(packed) else np.array(changed, "<u8")
    return Change(len(changed), int(np.bitwise_xor.reduce(some)))
