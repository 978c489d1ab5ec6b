"""Idempotency: has this been asked before, under the caller's own key?

The same key and body: the ticket that is under way, or that it is done. The same key with another body: a conflict.
A request that was refused, failed or cancelled gives its key back, so that it can be tried again under it.

Call `ask` for each request that carries a key; `opened` when it is taken up; then `done` or `released` when it ends.
"""

from collections import OrderedDict
from typing import Literal

from msgspec import Struct

DONE_KEPT_S = 600.0
KEYS_MAX = 10_000  # of one entry of the policy, about 4 MB, and 20 MB with the answers (core/duplicates.py)


class Asked(Struct, frozen=True, kw_only=True):
    """What is known of a key: nothing (`new`), that it is under way as `ticket`, or done as it, or used otherwise."""

    known: Literal["new", "under_way", "done", "conflict"]
    ticket: str = ""


class _Use(Struct, frozen=True):
    body: int
    ticket: str
    at_s: float


class Keys:
    """The keys in use and lately used at one process.

    Keys are a caller's own: those of two tenants never meet. `entry` is the policy's entry that the tenant falls under
    (quota.tenant_entry), so memory is bounded by the policy, and one entry's keys can't push another's out.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def ask(self, entry: str, tenant: str, key: str, body: int, *, now_s: float) -> Asked:
        """`body` is a 64-bit hash of all that the caller asked for."""
        used, is_done = self._of(entry).find((tenant, key), now_s)
        if used is None:
            return Asked(known="new")
        if used.body != body:
            return Asked(known="conflict", ticket=used.ticket)
        return Asked(known="done" if is_done else "under_way", ticket=used.ticket)

    def opened(self, entry: str, tenant: str, key: str, body: int, *, ticket: str, now_s: float) -> bool:
        """The request runs or waits as `ticket`. False: the entry has too many under way, so this one isn't known."""
        return self._of(entry).open((tenant, key), _Use(body, ticket, now_s))

    def done(self, entry: str, tenant: str, key: str, *, now_s: float) -> None:
        """It completed."""
        self._of(entry).end((tenant, key), now_s)

    def released(self, entry: str, tenant: str, key: str) -> None:
        """It ended without success: the key is free."""
        self._of(entry).release((tenant, key))

    def retain(self, entries: frozenset[str]) -> None:
        """Forgets entries that a new policy revision no longer names."""
        self._entries = {name: each for name, each in self._entries.items() if name in entries}

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def _of(self, entry: str) -> "_Entry":
        return self._entries.setdefault(entry, _Entry())


class _Entry:
    """Keys by (tenant, key), each in one of the two tables, oldest first."""

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, str], _Use] = {}
        self._done: OrderedDict[tuple[str, str], _Use] = OrderedDict()

    def find(self, key: tuple[str, str], now_s: float) -> tuple[_Use | None, bool]:
        while self._done and now_s - next(iter(self._done.values())).at_s > DONE_KEPT_S:
            self._done.popitem(last=False)
        used = self._under_way.get(key)
        return (used, False) if used is not None else (self._done.get(key), True)

    def open(self, key: tuple[str, str], use: _Use) -> bool:
        self._done.pop(key, None)
        if len(self._under_way) >= KEYS_MAX:
            return False
        self._under_way[key] = use
        self._bound()
        return True

    def end(self, key: tuple[str, str], now_s: float) -> None:
        if (use := self._under_way.pop(key, None)) is not None:
            self._done[key] = _Use(use.body, use.ticket, now_s)
            self._bound()

    def release(self, key: tuple[str, str]) -> None:
        self._under_way.pop(key, None)

    def _bound(self) -> None:
        """What is under way is never forgotten for what is done."""
        while self._done and len(self) > KEYS_MAX:
            self._done.popitem(last=False)

    def __len__(self) -> int:
        return len(self._under_way) + len(self._done)
