"""Columns: the instances of one pool as arrays, one slot an instance, in the order of their names.

What a decision computes over all candidates it computes on these, whole arrays at a time. Unknown numbers are NaN here,
so they spread through sums and are seen at the end; `core.view` has the same facts one instance at a time.
"""

from collections.abc import Callable, Mapping, Sequence
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
Depths = NDArray[np.uint8 | np.uint32]

AVAILABILITIES: Final[tuple[Availability, ...]] = get_args(Availability)
KV_STATES: Final[tuple[KvState, ...]] = get_args(KvState)
READY: Final = AVAILABILITIES.index("ready")
AGE_NORMAL_S = 2.0  # two scrapes; inflating below it would herd every burst onto whoever was scraped last
SHARE_MIN, SHARE_MAX = 0.01, 10.0
NUMBER_MAX = 1e15  # tokens or seconds; beyond, sums of squares would lose their smaller terms
SECONDS_MAX = 1e6  # a load beyond 11 days is a fault of the sender; bounds every sum


def hashes_of(names: Sequence[str]) -> Hashes:
    """A fixed random number for each name."""
    return np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)


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


class Fixed:
    """What heartbeats and operators say of the instances and no placement changes, with what follows from it.

    `availability` is an index of AVAILABILITIES, `barred` marks a weight of 0, `share` is the operator's weight within
    bounds; unknown is NaN in `kv_total` (tokens) and `context_max`. `surcharge` is what the weight adds to the time
    that counts, as a share of it. None for `barred`, `unready` and `surcharge`: nothing anywhere.
    """

    def __init__(
        self, *, availability: Codes, barred: Flags, kv_total: Floats, context_max: Floats, share: Floats
    ) -> None:
        self.availability = availability
        self.barred = barred if barred.any() else None
        self.kv_total = kv_total
        self.context_max = context_max
        self.share = share
        unready = availability != READY
        self.unready = unready if unready.any() else None
        self.least_kv_total = float(np.fmin.reduce(kv_total, initial=np.inf))
        self.least_context_max = float(np.fmin.reduce(context_max, initial=np.inf))
        self.surcharge = None if bool((share == 1.0).all()) else 1.0 / share - 1.0


class Kept:
    """Rows that follow from the columns and from no request, kept from one snapshot to the next.

    `of` is what else they follow from, `changed` the slots whose numbers have changed since; who reads the rows makes
    those anew (core.tokenpilot.cost). `terms` is room for the terms of one request: new memory each time costs more
    than what is computed in it.
    """

    def __init__(self) -> None:
        self.of: object = None
        self.rows: Floats = np.empty((0, 0))
        self.changed: set[int] = set()
        self.terms: Floats = np.empty((0, 0))


class Columns:
    """One snapshot, read only.

    `born_s` is when the telemetry of each was taken, on the clock of `now_s`. Unknown is NaN in it, `backlog_s`,
    `context_tokens`, `kv_held` and two arrays of `fixed`: `unsure` says that some of the first two are, `whole` that
    none of the others is; `aged` that an age is unknown or beyond two scrapes.
    `open` are sequences queued, decoding or foreign. `kv_room` is total − held, ∞ where either is unknown or nothing
    is held. `hits` are the tokens of the request's prefix that each holds, `p_hit` the chance that they are there,
    `kv_state` an index of KV_STATES. `classes` has the running requests of each class that has any, `classes_queued`
    those of them that have no first token yet, `classes_kv` the KV tokens that they are counted for. `kept` lives as
    long as the table. `views` makes the same snapshot one instance at a time.
    """

    __slots__ = (
        "aged", "backlog_s", "behind_s", "born_s", "classes", "classes_kv", "classes_queued", "context_tokens",
        "decoding", "fixed", "hits", "kept", "kv_held", "kv_room", "kv_state", "labels", "now_s", "open", "p_hit",
        "probe", "queued", "queued_tokens", "suspect", "unsure", "views", "whole",
    )  # fmt: skip

    def __init__(
        self,
        *,
        labels: Labels,
        fixed: Fixed,
        suspect: Flags | None,
        now_s: float,
        born_s: Floats,
        aged: bool,
        unsure: bool,
        backlog_s: Floats,
        behind_s: Floats,
        queued: Floats,
        queued_tokens: Floats,
        decoding: Floats,
        open: Floats,
        context_tokens: Floats,
        kv_held: Floats,
        kv_room: Floats,
        whole: bool,
        probe: Flags | None,
        hits: Floats | None,
        p_hit: Floats,
        kv_state: Codes,
        classes: dict[str, Floats],
        classes_queued: dict[str, Floats],
        classes_kv: dict[str, Floats],
        kept: Kept,
        views: Callable[[], tuple[InstanceView, ...]],
    ) -> None:
        """None for `suspect`, `probe` and `hits`: nobody is or has any."""
        self.labels = labels
        self.fixed = fixed
        self.suspect = suspect
        self.now_s = now_s
        self.born_s = born_s
        self.aged = aged
        self.unsure = unsure
        self.backlog_s = backlog_s
        self.behind_s = behind_s
        self.queued = queued
        self.queued_tokens = queued_tokens
        self.decoding = decoding
        self.open = open
        self.context_tokens = context_tokens
        self.kv_held = kv_held
        self.kv_room = kv_room
        self.whole = whole
        self.probe = probe
        self.hits = hits
        self.p_hit = p_hit
        self.kv_state = kv_state
        self.classes = classes
        self.classes_queued = classes_queued
        self.classes_kv = classes_kv
        self.kept = kept
        self.views = views

    def __len__(self) -> int:
        return len(self.labels.names)

    @property
    def age_s(self) -> Floats:
        """Seconds since the telemetry of each was taken."""
        return np.maximum(self.now_s - self.born_s, 0.0)

    def availabilities(self, among: Flags | None = None) -> dict[str, int]:
        """How many instances, of those `among`, are in each availability that occurs."""
        codes = self.fixed.availability if among is None else self.fixed.availability[among]
        return {AVAILABILITIES[code]: number for code, number in enumerate(np.bincount(codes).tolist()) if number}

    @property
    def least_backlog_s(self) -> float:
        """The shortest known backlog, 0 when none is known."""
        least_s = float(np.fmin.reduce(self.backlog_s, initial=np.inf))
        return least_s if least_s < np.inf else 0.0

    @property
    def most_hit_tokens(self) -> int:
        """The longest cached prefix on any instance."""
        return 0 if self.hits is None else int(self.hits.max(initial=0.0))

    def usable(self) -> Flags:
        """Ready instances without the suspects, unless all are suspect: silence never empties a pool."""
        ready = self.fixed.availability == READY
        trusted = ready if self.suspect is None else ready & ~self.suspect
        return trusted if trusted.any() else ready


def columns_of(instances: Sequence[InstanceView]) -> Columns:
    """The columns of instances given one by one, in the order of their names."""
    views = tuple(sorted(instances, key=lambda i: i.instance))
    held = _floats([known(i.kv_held_tokens) for i in views])
    context = _floats([known(i.context_tokens) for i in views])
    age_s = _floats([known(i.age_s) for i in views])
    backlog_s = np.minimum(_floats([known(i.backlog_s) for i in views]), SECONDS_MAX)
    fixed = Fixed(
        availability=np.array([AVAILABILITIES.index(i.availability) for i in views], np.int8),
        barred=np.array([i.weight == 0.0 for i in views], np.bool_),
        kv_total=_floats([known(i.kv_total_tokens) or None for i in views]),
        context_max=_floats([i.context_max_tokens or None for i in views]),
        share=_floats([operator_share(i.weight) for i in views]),
    )
    return Columns(
        labels=Labels(
            [i.instance for i in views],
            [i.address for i in views],
            [i.model for i in views],
            [i.model_digest for i in views],
            [i.engine for i in views],
        ),
        fixed=fixed,
        suspect=np.array([i.suspect for i in views], np.bool_) if any(i.suspect for i in views) else None,
        now_s=0.0,
        born_s=-age_s,
        aged=not bool((age_s <= AGE_NORMAL_S).all()),
        unsure=bool(np.isnan(age_s).any() or np.isnan(backlog_s).any()),
        backlog_s=backlog_s,
        behind_s=np.minimum(_floats([known(i.behind_s) or 0.0 for i in views]), SECONDS_MAX),
        queued=_floats([i.queued for i in views]),
        queued_tokens=_floats([i.queued_tokens for i in views]),
        decoding=_floats([i.decoding for i in views]),
        open=_floats([i.queued + i.decoding + (known(i.foreign) or 0.0) for i in views]),
        context_tokens=context,
        kv_held=held,
        kv_room=np.array([kv_room(*each) for each in zip(held.tolist(), fixed.kv_total.tolist(), strict=True)]),
        whole=not bool((np.isnan(held) | np.isnan(context) | np.isnan(fixed.kv_total)).any()),
        probe=np.array([i.probe for i in views], np.bool_) if any(i.probe for i in views) else None,
        hits=_floats([max(i.hit_tokens, 0) for i in views]) if any(i.hit_tokens > 0 for i in views) else None,
        p_hit=_floats([min(known(i.p_hit) or 0.0, 1.0) for i in views]),
        kv_state=np.array([KV_STATES.index(i.kv_state) for i in views], np.int8),
        classes=_by_class([i.class_running for i in views]),
        classes_queued=_by_class([i.class_queued for i in views]),
        classes_kv=_by_class([i.class_kv_tokens for i in views]),
        kept=Kept(),
        views=lambda: views,
    )


def _by_class(counted: Sequence[Mapping[str, int]]) -> dict[str, Floats]:
    names = sorted({name for each in counted for name in each})
    return {name: _floats([each.get(name, 0) for each in counted]) for name in names}


def most(values: Floats) -> float:
    """The greatest of a column, −∞ of an empty one; NaN if any is unknown. By place: cheaper than `max`."""
    return values.item(values.argmax()) if values.size else -np.inf


def least(values: Floats) -> float:
    """The same of the least, ∞ of an empty one."""
    return values.item(values.argmin()) if values.size else np.inf


def operator_share(weight: float) -> float:
    """The operator's weight within bounds; 1 when it is no number. Weight 0 is a filter's matter."""
    share = known(weight)
    return 1.0 if share is None else min(max(share, SHARE_MIN), SHARE_MAX)


def kv_room(held: float, total: float) -> float:
    """Tokens of KV left; ∞ where it is unknown, and where nothing is held: an empty instance takes whatever fits."""
    room = total - held
    return room if held != 0.0 and room == room else np.inf


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else min(value, NUMBER_MAX) for value in values], np.float64)
