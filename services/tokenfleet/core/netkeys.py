"""NetKeys: the canonical keys that one instance holds, and how they differ from what was last told."""

from msgspec import Struct


class KvChange(Struct, frozen=True, kw_only=True):
    """Net change since the last one taken: clear first if `cleared`, then remove, then store. Keys are packed."""

    cleared: bool
    removed: bytes
    stored: bytes


class NetKeys:
    """`chains` counts by packed key how many of the engine's chains hold it; `xor` is the XOR of all keys held."""

    def __init__(self) -> None:
        self.chains: dict[bytes, int] = {}
        self.xor = 0
        self._cleared = False
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()

    def hold(self, key: bytes) -> None:
        chains = self.chains.get(key, 0)
        self.chains[key] = chains + 1
        if chains == 0:
            self.xor ^= int.from_bytes(key, "little")
            self._flip(key, self._removed, self._stored)

    def release(self, key: bytes) -> None:
        self.chains[key] -= 1
        if self.chains[key] == 0:
            del self.chains[key]
            self.xor ^= int.from_bytes(key, "little")
            self._flip(key, self._stored, self._removed)

    def clear(self) -> None:
        self._cleared = self._cleared or bool(self.chains or self._removed)
        self.xor = 0
        for keys in (self.chains, self._stored, self._removed):
            keys.clear()

    def take(self) -> KvChange | None:
        if not (self._cleared or self._stored or self._removed):
            return None
        change = KvChange(cleared=self._cleared, removed=b"".join(self._removed), stored=b"".join(self._stored))
        self._cleared = False
        self._stored.clear()
        self._removed.clear()
        return change

    @staticmethod
    def _flip(key: bytes, undone: set[bytes], done: set[bytes]) -> None:
        if key in undone:
            undone.discard(key)
        else:
            done.add(key)
