"""Pool table: the live columns of one pool. A row is taken in anew when something about its instance changed.

What only time changes is kept as the moment it counts from, so that a snapshot of all instances is a few operations on
whole arrays and no instance is touched between two facts about it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.backlogs import backlogs_s
from tokenfleet.core.capacity import InstanceRow, is_failing
from tokenfleet.core.columns import (
    AGE_NORMAL_S,
    AVAILABILITIES,
    KV_STATES,
    NUMBER_MAX,
    SECONDS_MAX,
    Columns,
    Fixed,
    Flags,
    Floats,
    Kept,
    Labels,
    kv_room,
    least,
    operator_share,
)
from tokenfleet.core.failures import Standing as FailureStanding
from tokenfleet.core.hits import Planes, tokens_held
from tokenfleet.core.known import known
from tokenfleet.core.load import Standing
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import KvState
from tokenfleet.core.view import Availability, InstanceView

OUT: Final = AVAILABILITIES.index("out")
# Rows of the table of numbers: one a field, so that each field lies in one piece.
BORN, SILENT_SINCE, WORK, HEAD_BEGAN, HEAD_WORK, BEHIND, QUEUED, QUEUED_TOKENS = range(8)
DECODING, OPEN, CONTEXT_TOKENS, KV_HELD, KV_ROOM = range(8, 13)
FIELDS = 13


class _Told(NamedTuple):
    """What heartbeats and operators say of one instance (core.columns.Fixed), and whether it is `failing`."""

    availability: int
    barred: bool
    kv_total: float
    context_max: float
    share: float
    failing: bool


UNTOLD: Final = _Told(OUT, False, np.nan, np.nan, 1.0, False)


class PoolTable:
    """All instances of one model at one site, in the order of their names; a new one when instances come or go."""

    def __init__(self, rows: Sequence[InstanceRow]) -> None:
        """The rows' labels; every instance must then be `put`."""
        beats = [row.beat for row in rows]
        self.labels = Labels(
            [beat.instance for beat in beats],
            [beat.address for beat in beats],
            [beat.model for beat in beats],
            [beat.model_digest for beat in beats],
            [beat.engine for beat in beats],
        )
        size = len(rows)
        self._numbers = np.zeros((FIELDS, size))
        self._fields = tuple(self._numbers)
        self._told = [UNTOLD] * size
        self._of: list[tuple[InstanceRow, Availability, float, KvState, int] | None] = [None] * size  # as last put
        self._fixed: Fixed | None = None
        self._failing: Flags | None = None  # None: nobody
        self._partial: set[int] = set()  # slots with an unknown number
        self._kv_state = np.full(size, KV_STATES.index("none"), np.int8)
        self._kv_slot = np.full(size, -1, np.int64)
        self._classes: dict[str, Floats] = {}
        self._classes_queued: dict[str, Floats] = {}
        self._classes_kv: dict[str, Floats] = {}
        self._kept = Kept()
        self._oldest_s: tuple[float, float] | None = None
        self._p_hit: tuple[tuple[float, ...], Floats] | None = None  # what it follows from, by slot

    def put(
        self,
        row: InstanceRow,
        *,
        availability: Availability,
        weight: float,
        standing: Standing,
        kv_state: KvState,
        kv_slot: int,
        policy: LivenessPolicy,
    ) -> bool:
        """All that is known of one instance; False when its labels are other ones and the table must be made anew.

        `availability` is the engine's or the operator's word, without what age and failures say. `kv_slot` is its place
        in the prefix index, −1 without credit.
        """
        labels, load = self.labels, standing.load
        slot = labels.slots[row.beat.instance]
        of = row, availability, weight, kv_state, kv_slot
        if self._of[slot] != of:
            if not labels.same(slot, address=row.beat.address, model=row.beat.model, digest=row.beat.model_digest):
                return False
            self._tell(slot, row, availability, weight, policy)
            self._kv_state[slot], self._kv_slot[slot], self._p_hit = KV_STATES.index(kv_state), kv_slot, None
            self._of[slot] = of
        total = self._told[slot].kv_total
        held, context = _told(known(load.kv_held_tokens)), _told(known(load.context_tokens))
        self._kept.changed.add(slot)
        numbers = self._numbers  # one by one: a third of what it costs to make an array of them first
        numbers[WORK, slot] = min(load.backlog_s, SECONDS_MAX)
        numbers[HEAD_BEGAN, slot] = standing.head_began_s
        numbers[HEAD_WORK, slot] = standing.head_work_s
        numbers[BEHIND, slot] = min(load.behind_s, SECONDS_MAX)
        numbers[QUEUED, slot] = load.queued
        numbers[QUEUED_TOKENS, slot] = load.queued_tokens
        numbers[DECODING, slot] = load.decoding
        numbers[OPEN, slot] = load.queued + load.decoding + load.foreign
        numbers[CONTEXT_TOKENS, slot] = context
        numbers[KV_HELD, slot] = held
        numbers[KV_ROOM, slot] = kv_room(held, total)
        (self._partial.add if total + held + context != total + held + context else self._partial.discard)(slot)
        _count(load.class_running, self._classes, slot, len(labels.names))
        _count(load.class_queued, self._classes_queued, slot, len(labels.names))
        _count(load.class_kv_tokens, self._classes_kv, slot, len(labels.names))
        return True

    def _tell(
        self, slot: int, row: InstanceRow, availability: Availability, weight: float, policy: LivenessPolicy
    ) -> None:
        """What follows from the row and the operator's word alone."""
        beat = row.beat
        told = _Told(
            OUT if beat.refused else AVAILABILITIES.index(availability),
            weight == 0.0,
            _told(known(row.kv_total_tokens)),
            beat.context_max_tokens or np.nan,
            operator_share(weight),
            is_failing(beat, policy),
        )
        if told != self._told[slot]:
            self._told[slot], self._fixed = told, None
        self._hear(slot, row)

    def heard(self, row: InstanceRow) -> None:
        """The same heartbeat came again with another age."""
        slot = self.labels.slots.get(row.beat.instance)
        if slot is not None:
            self._hear(slot, row)

    def _hear(self, slot: int, row: InstanceRow) -> None:
        born_s, silent_since_s = _told(row.born_s), _told(row.silent_since_s)
        numbers = self._numbers
        if numbers[BORN, slot] != born_s or numbers[SILENT_SINCE, slot] != silent_since_s:
            numbers[BORN, slot], numbers[SILENT_SINCE, slot], self._oldest_s = born_s, silent_since_s, None

    def hits(self, planes: Planes, block_tokens: int) -> Floats:
        """Tokens that each instance holds, of the prefix index's bit planes."""
        return tokens_held.of(len(self._kv_slot))(planes, self._kv_slot, block_tokens)

    def snapshot(
        self,
        now_s: float,
        *,
        hits: Floats | None,
        calibration: PoolCalibration,
        failures: Mapping[str, FailureStanding],
        policy: LivenessPolicy,
        views: Callable[[], tuple[InstanceView, ...]],
    ) -> Columns:
        """The columns now, good until the next fact is taken in. `hits` are the tokens of the request's prefix that
        each holds, None for no request."""
        numbers = self._fields
        fixed = self._known_fixed()
        aged_s, unsure, suspect, lives = self._ages(now_s, policy)
        fixed, probe = self._overruled(fixed, failures, lives)
        return Columns(
            labels=self.labels,
            fixed=fixed,
            suspect=suspect,
            now_s=now_s,
            born_s=numbers[BORN],
            aged=aged_s > AGE_NORMAL_S,
            unsure=unsure,
            backlog_s=backlogs_s.of(len(self._told))(numbers[WORK], numbers[HEAD_BEGAN], numbers[HEAD_WORK], now_s),
            behind_s=numbers[BEHIND],
            queued=numbers[QUEUED],
            queued_tokens=numbers[QUEUED_TOKENS],
            decoding=numbers[DECODING],
            open=numbers[OPEN],
            context_tokens=numbers[CONTEXT_TOKENS],
            kv_held=numbers[KV_HELD],
            kv_room=numbers[KV_ROOM],
            whole=not self._partial,
            probe=probe,
            hits=hits,
            p_hit=self._chances(calibration),
            kv_state=self._kv_state,
            classes=self._classes,
            classes_queued=self._classes_queued,
            classes_kv=self._classes_kv,
            kept=self._kept,
            views=views,
        )

    def _known_fixed(self) -> Fixed:
        if self._fixed is None:
            told = list(zip(*self._told, strict=True)) or [()] * len(UNTOLD)
            self._fixed = Fixed(
                availability=np.array(told[0], np.int8),
                barred=np.array(told[1], np.bool_),
                kv_total=np.array(told[2], np.float64),
                context_max=np.array(told[3], np.float64),
                share=np.array(told[4], np.float64),
            )
            self._failing = np.array(told[5], np.bool_) if any(told[5]) else None
        return self._fixed

    def _ages(self, now_s: float, policy: LivenessPolicy) -> tuple[float, bool, Flags | None, Flags | None]:
        """The greatest age, whether any is unknown, who is suspect and whose agent lives (None: nobody, all)."""
        if self._oldest_s is None:
            self._oldest_s = _oldest(self._numbers[BORN]), _oldest(self._numbers[SILENT_SINCE])
        born_s, silent_since_s = self._oldest_s
        most_s = policy.agent_silent_max_s
        if now_s - born_s <= most_s and now_s - silent_since_s <= most_s:
            return now_s - born_s, False, None, None
        lives = now_s - self._numbers[SILENT_SINCE] <= most_s  # unknown: false
        suspect = ~(lives & (now_s - self._numbers[BORN] <= most_s))
        return now_s - born_s, born_s == -np.inf, suspect, lives

    def _overruled(
        self, fixed: Fixed, failures: Mapping[str, FailureStanding], lives: Flags | None
    ) -> tuple[Fixed, Flags | None]:
        """Who doesn't answer its living agent, or failed lately, is out or half-open whatever else is said of it."""
        out = self._failing if self._failing is None or lives is None else self._failing & lives
        if not failures and (out is None or not out.any()):
            return fixed, None
        availability = fixed.availability.copy() if out is None else np.where(out, np.int8(OUT), fixed.availability)
        probe: Flags | None = None
        for name, standing in failures.items():
            slot = self.labels.slots[name]
            if standing == "probe":
                probe = np.zeros(len(self.labels.names), np.bool_) if probe is None else probe
                probe[slot] = True
            elif standing != "in":
                availability[slot] = OUT
        overruled = Fixed(
            availability=availability,
            barred=np.zeros(len(availability), np.bool_) if fixed.barred is None else fixed.barred,
            kv_total=fixed.kv_total,
            context_max=fixed.context_max,
            share=fixed.share,
        )
        return overruled, probe

    def _chances(self, calibration: PoolCalibration) -> Floats:
        """The chance that a credited block is there, of each instance."""
        of = calibration.p_hit, calibration.p_hit_approx, calibration.p_hit_dispatch
        if self._p_hit is None or self._p_hit[0] != of:
            self._p_hit = of, np.array([p_hit(calibration, state) for state in KV_STATES])[self._kv_state]
        return self._p_hit[1]


def _count(counted: Mapping[str, int], columns: dict[str, Floats], slot: int, size: int) -> None:
    """Put the counts of one instance by class into the columns of all."""
    for name in counted:
        if name not in columns:
            columns[name] = np.zeros(size)
    for name, counts in columns.items():
        counts[slot] = counted.get(name, 0)


def p_hit(calibration: PoolCalibration, state: KvState) -> float:
    """Chance that a credited block is there, by the source of the evidence."""
    if state == "exact":
        return calibration.p_hit
    return calibration.p_hit_approx if state == "approx" else calibration.p_hit_dispatch


def _oldest(values: Floats) -> float:
    """The least; −∞ when any is unknown."""
    oldest = least(values)
    return oldest if oldest == oldest else -np.inf


def _told(value: float | None) -> float:
    return np.nan if value is None else min(value, NUMBER_MAX)
