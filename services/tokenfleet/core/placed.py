"""Placed: the entries of one instance and what they add up to.

Sums are taken anew from the entries after a change, never adjusted, so they can't drift from them.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping

from msgspec import Struct

from tokenfleet.core.load import Load, Standing
from tokenfleet.core.records import Entry


class Placed(Struct, kw_only=True):
    """An entry that counts; `placed_at_s` is on this process's clock.

    A placement of this replica is `timed`. Another's may have been any time before it was heard.
    """

    entry: Entry
    placed_at_s: float
    timed: bool = False
    first_token: bool = False

    @property
    def earliest_s(self) -> float:
        """When it was placed at the earliest."""
        return self.placed_at_s if self.timed else -math.inf


class InstancePlacements:
    """All entries of one instance. `others_work_s` is the work of all that other replicas ever placed there."""

    def __init__(self) -> None:
        self.others_work_s = 0.0
        self._placed: dict[str, Placed] = {}
        self._ended: deque[tuple[float, float]] = deque(maxlen=ENDS_KEPT_MAX)  # earliest placement, end as heard
        self._head_free_at_s = -math.inf
        self._sums: _Sums | None = None
        self._there: _There | None = None
        self._tenants: dict[str, int] | None = None
        self._kv_tokens: int | None = None

    def put(self, placed: Placed) -> None:
        self._placed[placed.entry.decision] = placed
        self._sums = self._tenants = self._kv_tokens = None
        self.others_work_s += 0.0 if placed.timed else placed.entry.work_s
        self._heard_of(placed.earliest_s)

    def placed_at(self, decision: str, placed_at_s: float) -> None:
        """Correct the time of a placement: of two reports the one that travelled less is right."""
        self._placed[decision].placed_at_s = placed_at_s
        self._sums = self._there = None

    def first_token(self, decision: str, now_s: float) -> None:
        placed = self._placed[decision]
        if not placed.first_token:
            self._leave_queue(placed, now_s)
            placed.first_token = True

    def remove(self, decision: str, now_s: float) -> None:
        placed = self._placed.pop(decision)
        self._leave_queue(placed, now_s)
        self._tenants = self._kv_tokens = None
        self._ended.append((placed.earliest_s, now_s))

    def was_there(self, placed: Placed, now_s: float) -> None:
        """It is heard of only now, after its end."""
        self._ended.append((placed.earliest_s, now_s))
        self._heard_of(placed.earliest_s)

    def standing(self, *, believed_after_s: float = -math.inf) -> Standing:
        """The sums of the entries placed after `believed_after_s`."""
        sums = self._sums
        if sums is None or sums.believed_after_s != believed_after_s:
            sums = self._sums = self._added_up(believed_after_s)
        return sums.standing

    def running_by_tenant(self) -> Mapping[str, int]:
        if self._tenants is None:
            self._tenants = Counter(placed.entry.tenant for placed in self._placed.values())
        return self._tenants

    def kv_tokens(self) -> int:
        """What all of them are counted for in KV."""
        if self._kv_tokens is None:
            self._kv_tokens = sum(placed.entry.kv_tokens for placed in self._placed.values())
        return self._kv_tokens

    def placed_since(self, since_s: float) -> int:
        return sum(placed.placed_at_s > since_s for placed in self._placed.values())

    def there(self, at_s: float, *, ended_after_s: float) -> int:
        """How many of those heard of until now may have been there at `at_s`: neither placed later nor ended by
        `ended_after_s`."""
        known = self._there
        if known is None or (known.at_s, known.ended_after_s) != (at_s, ended_after_s):
            number = sum(placed.earliest_s <= at_s for placed in self._placed.values())
            for earliest_s, ended_at_s in reversed(self._ended):  # newest first: thousands are kept, few are meant
                if ended_at_s <= ended_after_s:
                    break
                number += earliest_s <= at_s
            known = self._there = _There(at_s=at_s, ended_after_s=ended_after_s, number=number)
        return known.number

    def placed_at_of_oldest(self, number: int) -> float:
        """When the `number`-th oldest entry was placed; −inf for none."""
        times_s = sorted(placed.placed_at_s for placed in self._placed.values())
        return times_s[min(number, len(times_s)) - 1] if number > 0 and times_s else -math.inf

    def entries(self) -> Iterator[Entry]:
        for placed in self._placed.values():
            yield placed.entry

    def __len__(self) -> int:
        return len(self._placed)

    def _heard_of(self, earliest_s: float) -> None:
        """One more, placed so early. The end of one that was known changes nothing: it was there."""
        if self._there is not None and earliest_s <= self._there.at_s:
            self._there = None

    def _leave_queue(self, placed: Placed, now_s: float) -> None:
        """The head's leaving lets the next one begin; another's changes nothing for the head."""
        if not placed.first_token and not any(_ahead(other, placed) for other in self._placed.values()):
            self._head_free_at_s = now_s
        self._sums = None

    def _added_up(self, believed_after_s: float) -> "_Sums":
        head: Placed | None = None
        works_s: list[float] = []
        uncached = decoding = context = held = 0
        classes: dict[str, int] = {}
        classes_queued: dict[str, int] = {}
        classes_kv: dict[str, int] = {}
        for placed in self._placed.values():
            if placed.placed_at_s <= believed_after_s:
                continue
            entry = placed.entry
            name = entry.request_class
            classes[name] = classes.get(name, 0) + 1
            classes_kv[name] = classes_kv.get(name, 0) + entry.kv_tokens
            held += entry.kv_tokens
            if placed.first_token:
                decoding += 1
                context += entry.kv_tokens
            else:
                if head is None or (placed.placed_at_s <= head.placed_at_s and _place(placed) < _place(head)):
                    head = placed
                works_s.append(entry.work_s)
                classes_queued[name] = classes_queued.get(name, 0) + 1
                uncached += entry.uncached_tokens
        work_s = math.fsum(works_s)
        load = Load(
            backlog_s=work_s,
            behind_s=max(0.0, work_s - head.entry.work_s) if head else 0.0,
            queued=len(works_s),
            queued_tokens=uncached,
            decoding=decoding,
            context_tokens=float(context),
            kv_held_tokens=float(held),
            class_running=classes,
            class_queued=classes_queued,
            class_kv_tokens=classes_kv,
        )
        standing = (
            Standing(load=load)
            if head is None
            else Standing(
                load=load,
                head_began_s=max(head.placed_at_s, self._head_free_at_s),
                head_work_s=head.entry.work_s,
            )
        )
        return _Sums(believed_after_s=believed_after_s, standing=standing)


ENDS_KEPT_MAX = 4096  # ends of the last seconds of one instance


class _Sums(Struct, frozen=True, kw_only=True):
    believed_after_s: float
    standing: Standing


class _There(Struct, frozen=True, kw_only=True):
    at_s: float
    ended_after_s: float
    number: int


def _place(placed: Placed) -> tuple[float, str]:
    return placed.placed_at_s, placed.entry.decision


def _ahead(other: Placed, placed: Placed) -> bool:
    return not other.first_token and _place(other) < _place(placed)
