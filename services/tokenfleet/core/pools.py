"""Pools: the tables of one site joined, instance by instance and as columns.

An instance is joined anew when a table says that something about it changed; what only time changes, the columns
compute. The two forms tell the same: the columns are what decisions compute on, the views what people and tests read.
"""

from functools import partial

import numpy as np

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.capacity import AVAILABILITY, CapacityTable, InstanceRow, liveness
from tokenfleet.core.columns import Columns, Floats
from tokenfleet.core.correction import Corrections
from tokenfleet.core.decision import Request
from tokenfleet.core.failures import Failures, Standing
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.pool_table import PoolTable, p_hit
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import Control
from tokenfleet.core.view import Availability, InstanceView


class Pools:
    """All instances of one site by model, under the operator's words."""

    def __init__(
        self,
        *,
        capacity: CapacityTable,
        prefix: PrefixIndex,
        ledger: Ledger,
        corrections: Corrections,
        failures: Failures,
        policy: LivenessPolicy,
    ) -> None:
        self._capacity = capacity
        self._prefix = prefix
        self._ledger = ledger
        self._corrections = corrections
        self._failures = failures
        self._policy = policy
        self._controls: dict[str, Control] = {}
        self._tables: dict[str, PoolTable] = {}
        self._members = -1
        self._changed: set[str] = set()

    def follow(self, policy: LivenessPolicy) -> None:
        """Another policy is in force."""
        self._policy = policy
        self._members = -1

    def control(self, control: Control) -> None:
        """Keeps the operator's word, unless it takes nothing away."""
        if control.state == "ready" and control.weight == 1.0:
            self._controls.pop(control.instance, None)
        else:
            self._controls[control.instance] = control
        self._changed.add(control.instance)

    def heard(self, row: InstanceRow, *, anew: bool) -> None:
        """An instance's row came; `anew` with a heartbeat that was not heard before."""
        if anew:
            self._changed.add(row.beat.instance)
        elif (table := self._tables.get(row.beat.model)) is not None:
            table.heard(row)

    def columns(self, model: str, now_s: float, calibration: PoolCalibration, request: Request | None) -> Columns:
        """The instances of `model` with the prefix credit of `request`, good until the next fact is heard."""
        self._take_in()
        self._prefix.expire(now_s)
        table = self._tables.get(model) or PoolTable(())
        keyed = request if request is not None and request.block_keys else None
        return table.snapshot(
            now_s,
            hits=table.hits(self._prefix.planes(keyed.block_keys), keyed.block_tokens) if keyed else None,
            calibration=calibration,
            failures=self._failures.standings(table.labels.slots, now_s) if self._failures.some_held else {},
            policy=self._policy,
            views=partial(self._views, model, now_s, calibration, request),
        )

    def hits(self, request: Request) -> Floats:
        """Cached tokens of the request's prompt on each instance of its model's pool."""
        self._take_in()
        table = self._tables.get(request.model)
        if table is None or not request.block_keys:
            return np.zeros(0 if table is None else len(table.labels.names))
        return table.hits(self._prefix.planes(request.block_keys), request.block_tokens)

    def _take_in(self) -> None:
        """Put what changed into the tables; all of it when instances came or went."""
        if self._members == self._capacity.members:
            for changed in self._all_changed():
                if changed and not all([self._put(name) for name in changed]):
                    self._members = -1
                changed.clear()
        if self._members == self._capacity.members:
            return
        self._members = self._capacity.members
        by_model: dict[str, list[InstanceRow]] = {}
        for row in self._capacity.rows():
            by_model.setdefault(row.beat.model, []).append(row)
        self._tables = {model: PoolTable(rows) for model, rows in by_model.items()}
        for row in self._capacity.rows():
            self._put(row.beat.instance)
        for changed in self._all_changed():
            changed.clear()

    def _all_changed(self) -> tuple[set[str], ...]:
        return self._ledger.changed, self._prefix.changed, self._corrections.changed, self._changed

    def _put(self, instance: str) -> bool:
        """False when the table that the instance belongs to must be made anew."""
        row = self._capacity.row(instance)
        if row is None:
            return True
        table = self._tables.get(row.beat.model)
        if table is None or instance not in table.labels.slots:
            return False
        availability, _, weight = self._controlled(instance, AVAILABILITY[row.beat.state], "")
        return table.put(
            row,
            availability=availability,
            weight=weight,
            standing=self._corrections.standing(row),
            kv_state=self._prefix.state(instance),
            kv_slot=self._prefix.slot(instance),
            policy=self._policy,
        )

    def _views(
        self, model: str, now_s: float, calibration: PoolCalibration, request: Request | None
    ) -> tuple[InstanceView, ...]:
        rows = [row for row in self._capacity.rows() if row.beat.model == model]
        hits = self._prefix.hits(request.block_keys) if request is not None and request.block_keys else {}
        block_tokens = request.block_tokens if request is not None else 0
        standings = self._failures.standings({row.beat.instance for row in rows}, now_s)
        return tuple(
            [
                self._view(
                    row,
                    now_s,
                    calibration,
                    hit_tokens=hits.get(row.beat.instance, 0) * block_tokens,
                    standing=standings.get(row.beat.instance, "in"),
                )
                for row in rows
            ]
        )

    def _view(
        self, row: InstanceRow, now_s: float, calibration: PoolCalibration, *, hit_tokens: int, standing: Standing
    ) -> InstanceView:
        beat = row.beat
        live = liveness(row, now_s, self._policy)
        availability, reason, weight = self._controlled(beat.instance, live.availability, live.reason)
        if standing in ("out", "probed"):
            availability, reason = "out", "its requests failed lately"
        load = self._corrections.standing(row).at(now_s)
        kv_state = self._prefix.state(beat.instance)
        return InstanceView(
            instance=beat.instance,
            address=beat.address,
            model=beat.model,
            model_digest=beat.model_digest,
            engine=beat.engine,
            availability=availability,
            availability_reason=reason,
            suspect=live.suspect,
            age_s=row.age_s(now_s),
            context_max_tokens=beat.context_max_tokens,
            backlog_s=load.backlog_s,
            behind_s=load.behind_s,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            decoding=load.decoding,
            context_tokens=load.context_tokens,
            kv_held_tokens=load.kv_held_tokens,
            kv_total_tokens=row.kv_total_tokens,
            hit_tokens=hit_tokens,
            p_hit=p_hit(calibration, kv_state),
            kv_state=kv_state,
            foreign=load.foreign,
            probe=standing == "probe",
            weight=weight,
            class_running=dict(load.class_running),
            class_queued=dict(load.class_queued),
            class_kv_tokens=dict(load.class_kv_tokens),
        )

    def _controlled(self, instance: str, availability: Availability, reason: str) -> tuple[Availability, str, float]:
        """Availability under the operator's word, which can only take away."""
        control = self._controls.get(instance)
        if control is None:
            return availability, reason, 1.0
        if control.state != "ready" and availability in ("ready", "starting"):
            return control.state, control.reason or f"by {control.by or 'an operator'}", control.weight
        return availability, reason, control.weight
