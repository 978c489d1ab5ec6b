"""Ledger: what every replica placed and where, until its end is known.

Entries are put, refreshed and ended; nothing is added to or subtracted from a counter, so nothing drifts or goes
below zero. What counts depends on the set of events and not on their order: an end that overtakes its placement
still ends it. No session, boot, health or telemetry rule removes an entry; core.correction corrects what a
decision sees.
"""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from tokenfleet.core.columns import SECONDS_MAX
from tokenfleet.core.live_clock import LiveClock
from tokenfleet.core.load import Load, MeanWork, Standing
from tokenfleet.core.placed import InstancePlacements, Placed
from tokenfleet.core.records import Entry, PlacementEnvelope, PlacementEvent


class Ledger:
    """All placements of one site that have not ended."""

    def __init__(self, *, silent_max_s: float = 60.0) -> None:
        """An entry without an event of its own for `silent_max_s` of listening ends."""
        self.silent_max_s = silent_max_s
        self._calls: dict[tuple[str, int], _Call] = {}
        self._decisions: dict[str, _Decision] = {}
        self._instances: dict[str, InstancePlacements] = {}
        self._partitions: dict[int, _Partition] = {}
        self._mean = MeanWork()
        self._lag_s: float | None = None
        self.changed: set[str] = set()  # instances whose load changed; the reader empties it

    def hear(self, envelope: PlacementEnvelope, *, partition: int, now_s: float) -> None:
        """Every event of an envelope read from `partition` of `placements`."""
        for event in envelope.events:
            self._time(event, now_s)
            self._take(event, partition=partition, now_s=now_s, timed=False)

    def apply(self, event: PlacementEvent, *, partition: int, now_s: float) -> None:
        """Put, refresh or end one entry; `partition` is the one that carries the events of its instance.

        A replica applies its own events at once, before they are read back; the second time only refreshes.
        """
        self._take(event, partition=partition, now_s=now_s, timed=event.kind == "placed")

    def _take(self, event: PlacementEvent, *, partition: int, now_s: float, timed: bool) -> None:
        key = (event.request, event.attempt)
        decision = self._decisions.get(event.decision)
        if decision is None:
            if len(self._decisions) >= DECISIONS_MAX:
                return
            decision = self._decisions[event.decision] = _Decision(key)
            self._calls.setdefault(key, _Call()).decisions.append(event.decision)
        call = self._calls[decision.call]
        if event.kind == "ended":
            decision.ended = True
        elif event.entry is not None:
            self._learn(decision, event.entry, now_s, timed=timed)
        if event.kind == "first_token":
            decision.first_token = True
        if event.kind != "placed" and event.decision > call.named:
            call.named = event.decision
            for name in call.decisions:
                self._settle(name, call, now_s)
        self._settle(event.decision, call, now_s)
        self._refresh(event.decision, decision, partition)

    def advance(self, partition: int, now_s: float, *, live: bool) -> None:
        """Tell that `partition` is, or is not, being read at its end; ends what was silent there for too long."""
        listened = self._partitions.setdefault(partition, _Partition())
        listened.clock.advance(now_s, live=live)
        while listened.heard_live_s:
            name, heard_live_s = next(iter(listened.heard_live_s.items()))
            if listened.clock.live_s - heard_live_s <= self.silent_max_s:
                return
            del listened.heard_live_s[name]
            self._forget(name, now_s)

    def load(self, instance: str, now_s: float, *, believed_after_s: float = -math.inf) -> Load:
        """What the entries of `instance` placed after `believed_after_s` add up to."""
        return self.standing(instance, believed_after_s=believed_after_s).at(now_s)

    def standing(self, instance: str, *, believed_after_s: float = -math.inf) -> Standing:
        """The same, with what time alone takes off it."""
        known = self._instances.get(instance)
        return known.standing(believed_after_s=believed_after_s) if known else Standing(load=Load())

    def kv_tokens(self, instance: str) -> int:
        """What the entries of `instance` are counted for in KV until they end."""
        known = self._instances.get(instance)
        return known.kv_tokens() if known else 0

    def placements(self, instance: str) -> InstancePlacements:
        """The entries of one instance, to be read only."""
        return self._instances.get(instance, NOTHING_PLACED)

    def entry(self, decision: str, now_s: float) -> Entry | None:
        """The entry of `decision` with its age as of now, as long as it is remembered; None if it never came."""
        known = self._decisions.get(decision)
        if known is None or known.entry is None:
            return None
        return replace(known.entry, age_s=max(0.0, now_s - known.placed_at_s))

    @property
    def lag_s(self) -> float:
        """How late events are heard: what own placements take until they are read back. 0 before the first."""
        return self._lag_s or 0.0

    @property
    def mean_work(self) -> MeanWork:
        """Mean of the last placements, for sequences of unknown origin."""
        return self._mean

    def has_ended(self, decision: str) -> bool:
        """Whether the end of `decision` was heard, as long as that is remembered."""
        known = self._decisions.get(decision)
        return known is not None and known.ended

    def heard_of(self, request: str, attempt: int) -> bool:
        """Whether any placement of the attempt was heard of, ended or not, as long as that is remembered."""
        return (request, attempt) in self._calls

    def tenants_of(self, request: str, attempt: int) -> set[str]:
        """Whose requests have placements of that id and attempt, as long as these are remembered."""
        call = self._calls.get((request, attempt))
        entries = [self._decisions[name].entry for name in (() if call is None else call.decisions)]
        return {entry.tenant for entry in entries if entry is not None}

    def has_first_token(self, decision: str) -> bool:
        """Whether its first token was heard of, as long as that is remembered."""
        known = self._decisions.get(decision)
        return known is not None and known.first_token

    def running_by_tenant(self) -> dict[str, int]:
        """Placements that have not ended, by tenant."""
        total: dict[str, int] = {}
        for known in self._instances.values():
            for tenant, running in known.running_by_tenant().items():
                total[tenant] = total.get(tenant, 0) + running
        return total

    def entries(self) -> Iterator[Entry]:
        for known in self._instances.values():
            yield from known.entries()

    def __len__(self) -> int:
        return sum(len(known) for known in self._instances.values())

    def __contains__(self, decision: str) -> bool:
        known = self._decisions.get(decision)
        return known is not None and known.counted

    def _time(self, event: PlacementEvent, now_s: float) -> None:
        """Own placements alone tell how late events come: both ends are on this clock."""
        decision = self._decisions.get(event.decision)
        if event.kind != "placed" or decision is None or not decision.timed or decision.read_back:
            return
        decision.read_back = True
        lag_s = max(0.0, now_s - decision.placed_at_s)
        self._lag_s = lag_s if self._lag_s is None else self._lag_s + LAG_GAIN * (lag_s - self._lag_s)

    def _learn(self, decision: "_Decision", entry: Entry, now_s: float, *, timed: bool) -> None:
        placed_at_s = now_s - (entry.age_s if _is_told(entry.age_s) else 0.0)
        if decision.entry is None:
            decision.entry, decision.placed_at_s, decision.timed = self._clean(entry), placed_at_s, timed
            if decision.ended:  # its end overtook it
                self._holder(entry.instance).was_there(decision.placed(), now_s)
                self.changed.add(entry.instance)
        elif placed_at_s < decision.placed_at_s:
            decision.placed_at_s = placed_at_s
            if decision.counted:
                self._instances[decision.entry.instance].placed_at(entry.decision, placed_at_s)
                self.changed.add(decision.entry.instance)

    def _clean(self, entry: Entry) -> Entry:
        """The entry as it can be added up: unknown work is taken for the mean."""
        if _is_told(entry.work_s):
            self._mean = self._mean.then(entry.work_s, entry.uncached_tokens, entry.kv_tokens)
            return entry
        return replace(entry, work_s=self._mean.work_s)

    def _settle(self, name: str, call: "_Call", now_s: float) -> None:
        """Make one decision count, or not, as all that was heard of its call demands."""
        decision = self._decisions[name]
        entry = decision.entry
        if entry is None:
            return
        holder = self._holder(entry.instance)
        counts = not decision.ended and call.named in ("", name)
        if counts and not decision.counted:
            holder.put(decision.placed())
        elif counts and decision.first_token:
            holder.first_token(name, now_s)
        elif decision.counted and not counts:
            holder.remove(name, now_s)
        if counts or decision.counted:
            self.changed.add(entry.instance)
        decision.counted = counts

    def _holder(self, instance: str) -> InstancePlacements:
        return self._instances.setdefault(instance, InstancePlacements())

    def _refresh(self, name: str, decision: "_Decision", partition: int) -> None:
        """Put the decision last in its partition's order of silence."""
        if decision.partition is not None:
            self._partitions[decision.partition].heard_live_s.pop(name, None)
        decision.partition = partition
        listened = self._partitions.setdefault(partition, _Partition())
        listened.heard_live_s[name] = listened.clock.live_s

    def _forget(self, name: str, now_s: float) -> None:
        decision = self._decisions.pop(name)
        if decision.entry is not None:
            holder = self._instances.get(decision.entry.instance)
            if holder and decision.counted:
                holder.remove(name, now_s)
                self.changed.add(decision.entry.instance)
            if holder is not None and not len(holder):
                del self._instances[decision.entry.instance]
        call = self._calls[decision.call]
        call.decisions.remove(name)
        if not call.decisions:
            del self._calls[decision.call]


NOTHING_PLACED = InstancePlacements()  # to be read only
LAG_GAIN = 0.1  # the last ten that were read back: what delays one delays the others
DECISIONS_MAX = 1_000_000  # about 0.5 GB; a site of 2,000 instances has a tenth of it running or just ended


class _Decision:
    """All that was heard of one decision. An ended one is remembered until it is silent for long, as a tombstone."""

    __slots__ = (
        "call",
        "counted",
        "ended",
        "entry",
        "first_token",
        "partition",
        "placed_at_s",
        "read_back",
        "timed",
    )

    def __init__(self, call: tuple[str, int]) -> None:
        self.call = call
        self.entry: Entry | None = None
        self.placed_at_s = 0.0
        self.timed = False
        self.read_back = False
        self.first_token = False
        self.ended = False
        self.counted = False
        self.partition: int | None = None

    def placed(self) -> Placed:
        """What counts of it."""
        assert self.entry is not None, "its placement was never heard"
        return Placed(entry=self.entry, placed_at_s=self.placed_at_s, timed=self.timed, first_token=self.first_token)


class _Call:
    """One attempt of a logical request: its decisions, and the one that an event other than placed named.

    Two replicas may both have answered it; its gateway uses one answer and names it. Should two be named against
    that rule, the greater id counts, so that every replica agrees whatever it heard first.
    """

    __slots__ = ("decisions", "named")

    def __init__(self) -> None:
        self.decisions: list[str] = []
        self.named = ""


class _Partition:
    """How long a partition was listened to, and when on that clock each of its decisions last spoke, oldest first."""

    __slots__ = ("clock", "heard_live_s")

    def __init__(self) -> None:
        self.clock = LiveClock()
        self.heard_live_s: dict[str, float] = {}


def _is_told(seconds: float) -> bool:
    """NaN, infinite, negative and beyond all measure mean unknown."""
    return 0.0 <= seconds <= SECONDS_MAX
