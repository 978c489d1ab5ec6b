"""Grants: which tickets of a pool have their turn now.

A pool has room for so many more batch requests as its class bounds and its backlog leave beside interactive work. The
earliest deadlines go first, of those that can all be in time (core/slomax/batch.py); the others are marked, and go when
nobody else waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenfleet.core.policy import RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.batch import Job, plan
from tokenfleet.core.slomax.tickets import Key


class WaitingTicket(NamedTuple):
    """A ticket of a page, as its row has it; `will_miss` as it was found last."""

    key: Key
    gpu_s: float
    kv_tokens: int
    left_s: float
    will_miss: bool


class Room(NamedTuple):
    """What of a pool batch work may take now: requests, and KV tokens (∞: nobody knows); `seats` is how many requests
    of the class may run in all."""

    tickets: int
    kv_tokens: float
    seats: int

    def without(self, granted: int, kv_tokens: float, *, ahead: int) -> "Room":
        """What is left beside so many grants that are out, with `ahead` granted before there is room for them."""
        return Room(max(0, self.tickets + ahead - granted), self.kv_tokens - kv_tokens, self.seats)


class NextGrants(NamedTuple):
    """Whose turn it is, in order; and for whom it has changed whether they will miss their deadlines."""

    granted: tuple[Key, ...] = ()
    misses: tuple[Key, ...] = ()
    in_time: tuple[Key, ...] = ()


def room_of(pool: PoolView, terms: RequestClass, request_class: str) -> Room:
    """The room for one class on the instances that serve and whose backlog it may join."""
    columns = pool.columns
    usable = columns.usable()
    is_open = usable & ~(columns.backlog_s > terms.backlog_max_s)  # unknown: open
    most = terms.running_max_per_instance
    running = columns.classes.get(request_class)
    seats = np.full(len(pool), float(most)) if running is None else np.maximum(most - running, 0.0)
    kv_tokens = terms.kv_share_max * columns.fixed.kv_total - columns.kv_held
    kv_left = np.where(np.isnan(kv_tokens), np.inf, np.maximum(kv_tokens, 0.0))
    return Room(int(seats[is_open].sum()), float(kv_left[is_open].sum()), seats_of(pool, terms))


def seats_of(pool: PoolView, terms: RequestClass) -> int:
    """How many requests of the class may run in all: also the most GPU seconds that can end a second, since none takes
    less time than it was predicted to take alone."""
    return terms.running_max_per_instance * int(pool.columns.usable().sum())


def next_grants(page: Sequence[WaitingTicket], room: Room, *, rate: float | None, more: bool) -> NextGrants:
    """Of the first tickets in line. `rate` is the GPU seconds that end a second, None if nobody knows; `more`: others
    wait behind the page, so that who will miss its deadline has no turn.

    The first that finds no KV is waited for: a large one would never go otherwise.
    """
    made = plan([Job(str(i), each.gpu_s, each.left_s) for i, each in enumerate(page)], free_rate=rate, now_s=0.0)
    missing = {int(miss.id) for miss in made.will_miss}
    tickets, kv_tokens = room.tickets, room.kv_tokens
    granted: list[Key] = []
    for number in map(int, made.order):
        each = page[number]
        if tickets <= 0 or each.kv_tokens > kv_tokens or (more and number in missing):
            break
        granted.append(each.key)
        tickets, kv_tokens = tickets - 1, kv_tokens - each.kv_tokens
    return NextGrants(
        granted=tuple(granted),
        misses=tuple(each.key for i, each in enumerate(page) if i in missing and not each.will_miss),
        in_time=tuple(each.key for i, each in enumerate(page) if i not in missing and each.will_miss),
    )
