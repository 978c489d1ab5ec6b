"""Remembered: the newest of what callers name, within a bound; who floods it pushes out its own."""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """At most `most` values, each under an entry of the policy and a key of a caller's.

    An entry that holds no more than its even share of the room never loses a value to another's.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[str, OrderedDict[K, V]] = {}
        self._count = 0

    def put(self, entry: str, key: K, value: V) -> None:
        """The value is the newest of its entry."""
        own = self._of.setdefault(entry, OrderedDict())
        self._count += key not in own
        own[key] = value
        own.move_to_end(key)
        if self._count > self._most:
            crowded = len(own) > self._most // len(self._of)
            self.forget_oldest(entry if crowded else max(self._of, key=lambda name: len(self._of[name])))

    def get(self, entry: str, key: K) -> V | None:
        own = self._of.get(entry)
        return None if own is None else own.get(key)

    def oldest(self, entry: str) -> V | None:
        """The value of the entry that was put before its others."""
        own = self._of.get(entry)
        return next(iter(own.values())) if own else None

    def forget_oldest(self, entry: str) -> None:
        """There must be one."""
        self._of[entry].popitem(last=False)
        self._count -= 1
        if not self._of[entry]:
            del self._of[entry]

    def __len__(self) -> int:
        return self._count
