"""Expected: blocks that a placement will bring about, believed from dispatch until the engine can have told of them.

An engine tells of a block when it has computed it, a moment after the first token; the siblings of a burst come before.
"""

import heapq

import numpy as np
from msgspec import Struct

AFTER_FIRST_TOKEN_S = 2.0  # by then the engine's own events are here, or they are lost
UNHEARD_MAX_S = 60.0  # a placement that is never heard of again
KEYS_MAX = 1_000_000  # about 200 MB; 2,000 long prompts on their way at once


class Expected:
    """Blocks on their way, as a dict from key to a bitset of slots (core.block_table)."""

    def __init__(self) -> None:
        self.holders: dict[int, int] = {}
        self.slots = 0  # bitset of those that expect any
        self._again: dict[int, dict[int, int]] = {}  # slot → key → placements that expect it beside the first
        self._placed: dict[str, _Placed] = {}
        self._of_slot: dict[int, set[str]] = {}
        self._due: list[tuple[float, str]] = []
        self._keys = 0  # of all placements

    def add(self, decision: str, slot: int, keys: bytes, *, now_s: float) -> None:
        """`decision` sends a prompt with the blocks `keys` to the instance in `slot`."""
        self.expire(now_s)
        if decision in self._placed or not keys:
            return
        blocks: list[int] = np.frombuffer(keys, "<u8").tolist()
        while self._placed and self._keys + len(blocks) > KEYS_MAX:
            self.drop(next(iter(self._placed)))
        self._keys += len(blocks)
        holders, bit = self.holders, 1 << slot
        again: dict[int, int] = self._again.pop(slot, {})
        last_held, last_joined = 0, bit  # keys in a row share their bitsets
        for key in blocks:
            held = holders.get(key, 0)
            if held & bit:
                again[key] = again.get(key, 0) + 1
                continue
            if held is not last_held:
                last_held, last_joined = held, held | bit if held else bit
            holders[key] = last_joined
        if again:
            self._again[slot] = again
        self.slots |= bit
        self._placed[decision] = _Placed(slot, blocks, now_s + UNHEARD_MAX_S)
        self._of_slot.setdefault(slot, set()).add(decision)
        heapq.heappush(self._due, (now_s + UNHEARD_MAX_S, decision))

    def came(self, decision: str, *, now_s: float) -> None:
        """The first token came: the blocks are computed and will be told of."""
        placed = self._placed.get(decision)
        if placed is not None and now_s + AFTER_FIRST_TOKEN_S < placed.due_s:
            placed.due_s = now_s + AFTER_FIRST_TOKEN_S
            heapq.heappush(self._due, (placed.due_s, decision))

    def drop(self, decision: str) -> None:
        """The placement ended before its first token, or its time is over."""
        placed = self._placed.pop(decision, None)
        if placed is None:
            return
        self._keys -= len(placed.keys)
        slot, bit = placed.slot, 1 << placed.slot
        others = self._of_slot[slot]
        others.discard(decision)
        if not others:
            del self._of_slot[slot]
            self.slots ^= bit
        again = self._again.pop(slot, {})
        for key in placed.keys:
            if (more := again.get(key, 0)) > 1:
                again[key] = more - 1
            elif more:
                del again[key]
            elif held := self.holders[key] ^ bit:
                self.holders[key] = held
            else:
                del self.holders[key]
        if again:
            self._again[slot] = again

    def clear(self, slot: int) -> None:
        """The instance in `slot` has forgotten everything, or is gone."""
        for decision in tuple(self._of_slot.get(slot, ())):
            self.drop(decision)

    def expire(self, now_s: float) -> None:
        """Drop what is due."""
        while self._due and self._due[0][0] <= now_s:
            decision = heapq.heappop(self._due)[1]
            if decision in self._placed and self._placed[decision].due_s <= now_s:
                self.drop(decision)

    def __len__(self) -> int:
        return len(self._placed)


class _Placed(Struct):
    slot: int
    keys: list[int]
    due_s: float
