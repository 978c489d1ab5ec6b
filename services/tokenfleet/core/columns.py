"""Columns: the instances of one pool as arrays, one slot an instance, in the order of their names.

What a decision computes over all candidates it computes on these, whole arrays at a time. Unknown numbers are NaN here,
so they spread through sums and are seen at the end; `core.view` has the same facts one instance at a time.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenfleet.core.known import known
from tokenfleet.core.records import KvState
from tokenfleet.core.view import Availability, InstanceView

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Codes = NDArray[np.int8]
Hashes = NDArray[np.uint64]
Slots = NDArray[np.intp]

AVAILABILITIES: Final[tuple[Availability, ...]] = get_args(Availability)
KV_STATES: Final[tuple[KvState, ...]] = get_args(KvState)
READY: Final = AVAILABILITIES.index("ready")
AGE_NORMAL_S = 2.0  # two scrapes; inflating below it would herd every burst onto whoever was scraped last
SHARE_MIN, SHARE_MAX = 0.01, 10.0
NUMBER_MAX = 1e15  # tokens or seconds; beyond, sums of squares would lose their smaller terms
SECONDS_MAX = 1e6  # a load beyond 11 days is a fault of the sender; bounds every sum


class Labels:
    """What is no number and changes only when an instance comes, goes, boots or is replaced."""

    def __init__(
        self,
        names: Sequence[str],
        addresses: Sequence[str],
        models: Sequence[str],
        digests: Sequence[str],
        engines: Sequence[str],
    ) -> None:
        self.names, self.addresses, self.engines = tuple(names), tuple(addresses), tuple(engines)
        self._models, self._digests = tuple(models), tuple(digests)
        self._one_model = self._models[0] if len(set(self._models)) == 1 else ""
        self._of_digests: dict[tuple[str, ...], Flags] = {}

    @cached_property
    def slots(self) -> dict[str, int]:
        return {name: slot for slot, name in enumerate(self.names)}

    @cached_property
    def by_digest(self) -> tuple[tuple[str, Slots], ...]:
        """The slots of each revision, in the order of the digests."""
        digests = np.array(self._digests, object)
        return tuple([(digest, (digests == digest).nonzero()[0]) for digest in sorted(set(self._digests))])

    @cached_property
    def hashes(self) -> Hashes:
        """A fixed random number for each name: the instance's side of rendezvous hashing."""
        return hashes_of(self.names)

    def same(self, slot: int, *, address: str, model: str, digest: str) -> bool:
        """Whether these are the labels of the instance in `slot`."""
        return (self.addresses[slot], self._models[slot], self._digests[slot]) == (address, model, digest)

    def not_model(self, model: str) -> Flags | None:
        """Instances of another model; None: there are none."""
        if self._one_model == model:
            return None
        return np.array([each != model for each in self._models], np.bool_)

    def not_digests(self, digests: tuple[str, ...]) -> Flags:
        """Instances of a revision that isn't listed."""
        known = self._of_digests.get(digests)
        if known is None:
            known = self._of_digests[digests] = np.array([each not in digests for each in self._digests], np.bool_)
        return known


class Columns:
    """One snapshot, read only.

    `availability` and `kv_state` are indexes of AVAILABILITIES and KV_STATES. Unknown is NaN in `age_s`, `backlog_s`,
    `context_tokens`, `kv_held`, `kv_total` and `context_max`. `share` is the operator's weight within bounds, `barred`
    marks a weight of 0. `open` are sequences queued, decoding or foreign. `kv_room` is total − held, ∞ where either is
    unknown or nothing is held. `p_hit` is the chance that a credited prefix is there. `classes` has the
    running requests of each class that has any. `views` makes the same snapshot one instance at a time.
    """

    __slots__ = (
        "age_s", "availability", "backlog_s", "barred", "classes", "context_max", "context_tokens", "decoding", "hits",
        "kv_held", "kv_room", "kv_state", "kv_total", "labels", "open", "p_hit", "probe", "queued", "queued_tokens",
        "share", "suspect", "views",
    )  # fmt: skip

    def __init__(
        self,
        *,
        labels: Labels,
        availability: Codes,
        suspect: Flags,
        age_s: Floats,
        backlog_s: Floats,
        queued: Floats,
        queued_tokens: Floats,
        decoding: Floats,
        open: Floats,
        context_tokens: Floats,
        kv_held: Floats,
        kv_total: Floats,
        kv_room: Floats,
        context_max: Floats,
        share: Floats,
        barred: Flags,
        probe: Flags,
        hits: Floats,
        p_hit: Floats,
        kv_state: Codes,
        classes: dict[str, Floats],
        views: Callable[[], tuple[InstanceView, ...]],
    ) -> None:
        self.labels = labels
        self.availability = availability
        self.suspect = suspect
        self.age_s = age_s
        self.backlog_s = backlog_s
        self.queued = queued
        self.queued_tokens = queued_tokens
        self.decoding = decoding
        self.open = open
        self.context_tokens = context_tokens
        self.kv_held = kv_held
        self.kv_total = kv_total
        self.kv_room = kv_room
        self.context_max = context_max
        self.share = share
        self.barred = barred
        self.probe = probe
        self.hits = hits
        self.p_hit = p_hit
        self.kv_state = kv_state
        self.classes = classes
        self.views = views

    def __len__(self) -> int:
        return len(self.labels.names)

    def availabilities(self, among: Flags | None = None) -> dict[str, int]:
        """How many instances, of those `among`, are in each availability that occurs."""
        codes = self.availability if among is None else self.availability[among]
        return {AVAILABILITIES[code]: number for code, number in enumerate(np.bincount(codes).tolist()) if number}

    @property
    def least_backlog_s(self) -> float:
        """The shortest known backlog, 0 when none is known."""
        least_s = float(np.fmin.reduce(self.backlog_s, initial=np.inf))
        return least_s if least_s < np.inf else 0.0

    @property
    def aged(self) -> bool:
        """Whether any age is beyond two scrapes, or unknown."""
        return not bool(self.age_s.max(initial=0.0) <= AGE_NORMAL_S)  # NaN compares false

    @property
    def unsure(self) -> bool:
        """Whether the backlog or the age of any is unknown."""
        return bool(np.isnan(self.backlog_s + self.age_s).any())


def hashes_of(names: Sequence[str]) -> Hashes:
    """A fixed random number for each name."""
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)


def columns_of(instances: Sequence[InstanceView]) -> Columns:
    """The columns of instances given one by one, in the order of their names."""
    views = tuple(sorted(instances, key=lambda i: i.instance))
    held = _floats([known(i.kv_held_tokens) for i in views])
    total = _floats([known(i.kv_total_tokens) or None for i in views])
    return Columns(
        labels=Labels(
            [i.instance for i in views],
            [i.address for i in views],
            [i.model for i in views],
            [i.model_digest for i in views],
            [i.engine for i in views],
        ),
        availability=np.array([AVAILABILITIES.index(i.availability) for i in views], np.int8),
        suspect=np.array([i.suspect for i in views], np.bool_),
        age_s=_floats([known(i.age_s) for i in views]),
        backlog_s=np.minimum(_floats([known(i.backlog_s) for i in views]), SECONDS_MAX),
        queued=_floats([i.queued for i in views]),
        queued_tokens=_floats([i.queued_tokens for i in views]),
        decoding=_floats([i.decoding for i in views]),
        open=_floats([i.queued + i.decoding + (known(i.foreign) or 0.0) for i in views]),
        context_tokens=_floats([known(i.context_tokens) for i in views]),
        kv_held=held,
        kv_total=total,
        kv_room=kv_room(held, total),
        context_max=_floats([i.context_max_tokens or None for i in views]),
        share=_floats([operator_share(i.weight) for i in views]),
        barred=np.array([i.weight == 0.0 for i in views], np.bool_),
        probe=np.array([i.probe for i in views], np.bool_),
        hits=_floats([max(i.hit_tokens, 0) for i in views]),
        p_hit=_floats([min(known(i.p_hit) or 0.0, 1.0) for i in views]),
        kv_state=np.array([KV_STATES.index(i.kv_state) for i in views], np.int8),
        classes={
            name: _floats([i.class_running.get(name, 0) for i in views])
            for name in sorted({name for i in views for name in i.class_running})
        },
        views=lambda: views,
    )


def operator_share(weight: float) -> float:
    """The operator's weight within bounds; 1 when it is no number. Weight 0 is a filter's matter."""
    share = known(weight)
    return 1.0 if share is None else min(max(share, SHARE_MIN), SHARE_MAX)


def kv_room(held: Floats, total: Floats) -> Floats:
    """Tokens of KV left; ∞ where it is unknown, and where nothing is held: an empty instance takes whatever fits."""
    room = total - held
    return np.where(np.isnan(room) | (held == 0.0), np.inf, room)


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else min(value, NUMBER_MAX) for value in values], np.float64)
