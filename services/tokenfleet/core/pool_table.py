"""Pool table: the live columns of one pool. A row is taken in anew when something about its instance changed.

What only time changes is kept as the moment it counts from, so that a snapshot of all instances is a few operations on
whole arrays and no instance is touched between two facts about it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.capacity import InstanceRow, is_failing
from tokenfleet.core.columns import (
    AVAILABILITIES,
    KV_STATES,
    NUMBER_MAX,
    SECONDS_MAX,
    Codes,
    Columns,
    Flags,
    Floats,
    Labels,
    kv_room,
    operator_share,
)
from tokenfleet.core.failures import Standing as FailureStanding
from tokenfleet.core.known import known
from tokenfleet.core.load import Standing
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import KvState
from tokenfleet.core.view import Availability, InstanceView

OUT: Final = AVAILABILITIES.index("out")
# Rows of the table of numbers: one a field, so that each field lies in one piece.
BORN, SILENT_SINCE, WORK, HEAD_BEGAN, HEAD_WORK, QUEUED, QUEUED_TOKENS, DECODING = range(8)
OPEN, CONTEXT_TOKENS, KV_HELD, KV_TOTAL, CONTEXT_MAX, SHARE = range(8, 14)
FIELDS = 14


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
        self._availability = np.zeros(size, np.int8)
        self._failing = np.zeros(size, np.bool_)
        self._barred = np.zeros(size, np.bool_)
        self._kv_state = np.full(size, KV_STATES.index("none"), np.int8)
        self._kv_slot = np.full(size, -1, np.int64)
        self._classes: dict[str, Floats] = {}
        self._kv_room = np.zeros(size)
        self._any_failing = False
        self._oldest_s: tuple[float, float] | None = None
        self._p_hit: tuple[PoolCalibration, Floats] | None = None

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
        beat, labels, load = row.beat, self.labels, standing.load
        slot = labels.slots[beat.instance]
        if not labels.same(slot, address=beat.address, model=beat.model, digest=beat.model_digest):
            return False
        block_size = beat.block_size or 0
        total = known(beat.kv_total_blocks * block_size if beat.kv_total_blocks and block_size else None)
        self._numbers[:, slot] = (
            _told(row.born_s),
            _told(row.silent_since_s),
            min(load.backlog_s, SECONDS_MAX),
            standing.head_began_s,
            standing.head_work_s,
            load.queued,
            load.queued_tokens,
            load.decoding,
            load.queued + load.decoding + load.foreign,
            _told(known(load.context_tokens)),
            _told(known(load.kv_held_tokens)),
            _told(total),
            beat.context_max_tokens or np.nan,
            operator_share(weight),
        )
        self._oldest_s = None
        failing = is_failing(beat, policy)
        self._availability[slot] = OUT if beat.refused else AVAILABILITIES.index(availability)
        self._failing[slot] = failing
        self._any_failing = self._any_failing or failing
        self._barred[slot] = weight == 0.0
        if self._kv_state[slot] != KV_STATES.index(kv_state):
            self._kv_state[slot], self._p_hit = KV_STATES.index(kv_state), None
        self._kv_slot[slot] = kv_slot
        here = slice(slot, slot + 1)
        self._kv_room[here] = kv_room(self._numbers[KV_HELD, here], self._numbers[KV_TOTAL, here])
        for name in load.class_running.keys() | self._classes.keys():
            counts = self._classes.get(name)
            if counts is None:
                counts = self._classes[name] = np.zeros(len(labels.names))
            counts[slot] = load.class_running.get(name, 0)
        return True

    def heard(self, row: InstanceRow) -> None:
        """The same heartbeat came again with another age."""
        slot = self.labels.slots.get(row.beat.instance)
        if slot is not None:
            self._numbers[BORN, slot] = _told(row.born_s)
            self._numbers[SILENT_SINCE, slot] = _told(row.silent_since_s)
            self._oldest_s = None

    def hits(self, depths: Floats) -> Floats:
        """What each instance holds, of tokens by place in the prefix index."""
        return depths[self._kv_slot]

    def snapshot(
        self,
        now_s: float,
        *,
        depths: Floats | None,
        calibration: PoolCalibration,
        failures: Mapping[str, FailureStanding],
        policy: LivenessPolicy,
        views: Callable[[], tuple[InstanceView, ...]],
    ) -> Columns:
        """The columns now, good until the next fact is taken in. `depths` are the tokens of the request's prefix by
        place in the prefix index (the last is 0: no credit), None for no request."""
        numbers, size = self._numbers, len(self.labels.names)
        suspect, availability = self._suspect_and_availability(now_s, policy)
        probe = np.zeros(size, np.bool_)
        if failures:
            availability = availability.copy()
            for name, standing in failures.items():
                slot = self.labels.slots[name]
                if standing == "probe":
                    probe[slot] = True
                elif standing != "in":
                    availability[slot] = OUT
        done_s = np.minimum(np.maximum(now_s - numbers[HEAD_BEGAN], 0.0), numbers[HEAD_WORK])
        return Columns(
            labels=self.labels,
            availability=availability,
            suspect=suspect,
            age_s=np.maximum(now_s - numbers[BORN], 0.0),
            backlog_s=np.maximum(numbers[WORK] - done_s, 0.0),
            queued=numbers[QUEUED],
            queued_tokens=numbers[QUEUED_TOKENS],
            decoding=numbers[DECODING],
            open=numbers[OPEN],
            context_tokens=numbers[CONTEXT_TOKENS],
            kv_held=numbers[KV_HELD],
            kv_total=numbers[KV_TOTAL],
            kv_room=self._kv_room,
            context_max=numbers[CONTEXT_MAX],
            share=numbers[SHARE],
            barred=self._barred,
            probe=probe,
            hits=np.zeros(size) if depths is None else depths[self._kv_slot],
            p_hit=self._chances(calibration),
            kv_state=self._kv_state,
            classes=self._classes,
            views=views,
        )

    def _chances(self, calibration: PoolCalibration) -> Floats:
        """The chance that a credited block is there, of each instance."""
        if self._p_hit is None or self._p_hit[0] is not calibration:
            chances = np.array([p_hit(calibration, state) for state in KV_STATES])
            self._p_hit = calibration, chances[self._kv_state]
        return self._p_hit[1]

    def _suspect_and_availability(self, now_s: float, policy: LivenessPolicy) -> tuple[Flags, Codes]:
        """core.capacity.liveness of all instances."""
        most_s = policy.agent_silent_max_s
        if self._oldest_s is None:
            self._oldest_s = _least(self._numbers[BORN]), _least(self._numbers[SILENT_SINCE])
        if all(now_s - oldest_s <= most_s for oldest_s in self._oldest_s):
            suspect = np.zeros(len(self.labels.names), np.bool_)
            out = self._failing
        else:
            lives = now_s - self._numbers[SILENT_SINCE] <= most_s  # unknown: false
            suspect = ~(lives & (now_s - self._numbers[BORN] <= most_s))
            out = self._failing & lives
        return suspect, np.where(out, np.int8(OUT), self._availability) if self._any_failing else self._availability


def p_hit(calibration: PoolCalibration, state: KvState) -> float:
    """Chance that a credited block is there, by the source of the evidence."""
    if state == "exact":
        return calibration.p_hit
    return calibration.p_hit_approx if state == "approx" else calibration.p_hit_dispatch


def _least(values: Floats) -> float:
    """The least; −∞ when any is unknown."""
    least = float(values.min(initial=np.inf))
    return least if least == least else -np.inf


def _told(value: float | None) -> float:
    return np.nan if value is None else min(value, NUMBER_MAX)
