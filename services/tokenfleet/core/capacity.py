"""Capacity: which instances there are, how loaded each was when last seen, and how old that sight is.

The reader's side of the `capacity` topic. A shard message replaces all rows of its shard, so an instance absent
from all shards is gone and there are no tombstones. No wall clock is read or compared.
"""

from collections.abc import Iterator, Mapping

from msgspec import Struct

from tokenfleet.core.beat import cleaned, sum_of_ages
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import CapacityRow, CapacityShard, EngineState, Heartbeat, Order
from tokenfleet.core.view import Availability


class InstanceRow(Struct, frozen=True, kw_only=True):
    """One instance as this process heard of it. Each age is a sum of terms that come from one clock each.

    `age_when_sent_s` is None when unknown: the row was read while catching up, or its writer didn't know.
    """

    beat: Heartbeat
    order: Order
    agent: str
    shard: int
    heard_at_s: float
    age_when_sent_s: float | None
    agent_silent_when_sent_s: float | None

    @property
    def kv_total_tokens(self) -> float | None:
        """Size of the instance's KV memory, None when it isn't told."""
        blocks, size = self.beat.kv_total_blocks, self.beat.block_size
        return blocks * size if blocks and size else None

    @property
    def born_s(self) -> float | None:
        """When the values were taken, on this process's clock; None when unknown."""
        age_s = sum_of_ages(self.age_when_sent_s)
        return None if age_s is None else self.heard_at_s - age_s

    @property
    def silent_since_s(self) -> float | None:
        """When the row's agent was last heard, on this process's clock; None when unknown."""
        silent_s = sum_of_ages(self.agent_silent_when_sent_s)
        return None if silent_s is None else self.heard_at_s - silent_s

    def age_s(self, now_s: float) -> float | None:
        """Age of the values, None when unknown."""
        return sum_of_ages(self.age_when_sent_s, max(0.0, now_s - self.heard_at_s))

    def agent_silent_s(self, now_s: float) -> float | None:
        """Time since the row's agent was heard, None when unknown."""
        return sum_of_ages(self.agent_silent_when_sent_s, max(0.0, now_s - self.heard_at_s))


class Liveness(Struct, frozen=True, kw_only=True):
    """Whether an instance may be chosen. `suspect`: only when no unsuspected one has room. `reason` says why not."""

    availability: Availability
    suspect: bool = False
    reason: str = ""


class Applied(Struct, frozen=True, kw_only=True):
    """What became of a record.

    `conflicts` are instances that two agents or shards claim: the later heard stays. `gone` were listed until now,
    `rebooted` have begun another life.
    """

    accepted: bool
    conflicts: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    rebooted: tuple[str, ...] = ()


class CapacityTable:
    """All instances of one site, from the newest message of each shard."""

    def __init__(self) -> None:
        self._shards: dict[int, _Shard] = {}
        self._rows: dict[str, InstanceRow] = {}
        self._disputed: set[str] = set()  # instances that several shards list
        self._names: list[str] = []
        self._members_changed = False
        self.members = 0  # grows when instances come or go
        self._sorted: tuple[InstanceRow, ...] | None = ()
        self._youngest: _Shard | None = None
        self.versions: dict[str, str] = {}  # epoch and number of each shard's message, for a decision to name

    def apply(self, shard: CapacityShard, *, offset: int, now_s: float, live: bool) -> Applied:
        """Replace the rows of `shard`, unless its writer was deposed or the message is old.

        `offset` is the message's own, the epoch of a writer's first message. `live` is False while catching up: the
        time since such a message was sent is unknown, and so are its ages.
        """
        known = self._shards.get(shard.shard)
        epoch = offset if shard.epoch < 0 else shard.epoch
        if known and known.cluster == shard.cluster and (epoch, shard.n) <= (known.epoch, known.n):
            return Applied(accepted=False)
        before = known.rows if known else {}
        rows = {row.beat.instance: _heard(row, before, shard.shard, now_s, live) for row in shard.rows}
        self._shards[shard.shard] = _Shard(
            cluster=shard.cluster,
            epoch=epoch,
            n=shard.n,
            heard_at_s=now_s,
            telemetry_age_s=shard.telemetry_age_s if live else None,
            rows=rows,
        )
        dated = [each for each in self._shards.values() if sum_of_ages(each.telemetry_age_s) is not None]
        self._youngest = max(dated, key=_taken_s, default=None)
        self.versions = {f"capacity.{number}": f"{epoch}:{n}" for number, (_, epoch, n) in self.orders().items()}
        conflicts = self._merge(shard.shard, before, rows)
        gone = tuple(sorted(name for name in before.keys() - rows.keys() if name not in self._rows))
        lives = ((name, before[name].beat.boot, row.beat.boot) for name, row in rows.items() if name in before)
        rebooted = tuple([name for name, was, now in lives if was != now])
        return Applied(accepted=True, conflicts=conflicts, gone=gone, rebooted=rebooted)

    def rows(self) -> tuple[InstanceRow, ...]:
        """All instances in the order of their names."""
        if self._sorted is None:
            if self._members_changed:
                self._names, self._members_changed = sorted(self._rows), False
            self._sorted = tuple([self._rows[name] for name in self._names])
        return self._sorted

    def row(self, instance: str) -> InstanceRow | None:
        return self._rows.get(instance)

    def __len__(self) -> int:
        return len(self._rows)

    def age_s(self, now_s: float) -> float | None:
        """Age of the youngest telemetry that any shard has folded in, None before any."""
        shard = self._youngest
        return None if shard is None else sum_of_ages(shard.telemetry_age_s, max(0.0, now_s - shard.heard_at_s))

    def orders(self) -> dict[int, tuple[str, int, int]]:
        """(cluster, epoch, n) of each shard: names the version of the table that a decision saw."""
        return {number: (s.cluster, s.epoch, s.n) for number, s in sorted(self._shards.items())}

    def _merge(self, shard: int, before: Mapping[str, InstanceRow], rows: Mapping[str, InstanceRow]) -> tuple[str, ...]:
        """Put the new rows of one shard beside the other shards'; returns the instances that several shards claim."""
        self._sorted = None
        self._members_changed = self._members_changed or before.keys() != rows.keys()
        disputed = {name for name in self._disputed if name in rows or name in before}
        for name, row in rows.items():
            known = self._rows.get(name)
            if known is None or (known.shard == shard and name not in disputed):
                self._rows[name] = row
            else:
                disputed.add(name)
        for name in disputed | (before.keys() - rows.keys()):
            claims = list(self._claims(name))
            if claims:
                self._rows[name] = max(claims, key=_last_heard)
            else:
                self._rows.pop(name, None)
            (self._disputed.add if len(claims) > 1 else self._disputed.discard)(name)
        if before.keys() != rows.keys():
            self.members += 1
        return tuple(sorted(rows.keys() & self._disputed))

    def _claims(self, instance: str) -> Iterator[InstanceRow]:
        for shard in self._shards.values():
            if (row := shard.rows.get(instance)) is not None:
                yield row


def liveness(row: InstanceRow, now_s: float, policy: LivenessPolicy) -> Liveness:
    """Architecture, liveness: a refused connection, or a living agent without an answer for long, is out.

    A silent agent makes its instances suspect, never out, so silence never empties a pool; the same holds for values
    whose age is unknown or beyond the same bound.
    """
    beat = row.beat
    silent_s = row.agent_silent_s(now_s)
    agent_lives = silent_s is not None and silent_s <= policy.agent_silent_max_s
    if beat.refused:
        return Liveness(availability="out", reason="connection refused")
    if agent_lives and is_failing(beat, policy):
        return Liveness(availability="out", reason=f"no answer for {beat.scrape_failed_for_s:.0f} s")
    age_s = row.age_s(now_s)
    doubt = ""
    if not agent_lives:
        doubt = "agent silent" + ("" if silent_s is None else f" for {silent_s:.0f} s")
    elif age_s is None:
        doubt = "age unknown"
    elif age_s > policy.agent_silent_max_s:
        doubt = f"values {age_s:.0f} s old"
    return Liveness(availability=AVAILABILITY[beat.state], suspect=bool(doubt), reason=doubt)


def is_failing(beat: Heartbeat, policy: LivenessPolicy) -> bool:
    """Whether its agent, if it lives, takes the instance for dead."""
    return beat.scrape_failed_for_s > policy.scrape_failed_max_s


AVAILABILITY: Mapping[EngineState, Availability] = {
    "ready": "ready",
    "starting": "starting",
    "draining": "draining",
    "sleeping": "sleeping",
}


class _Shard(Struct, frozen=True, kw_only=True):
    cluster: str
    epoch: int
    n: int
    heard_at_s: float
    telemetry_age_s: float | None
    rows: dict[str, InstanceRow]


def _taken_s(shard: _Shard) -> float:
    """When its youngest telemetry was taken, on this process's clock."""
    return shard.heard_at_s - (shard.telemetry_age_s or 0.0)


def _heard(row: CapacityRow, before: Mapping[str, InstanceRow], shard: int, now_s: float, live: bool) -> InstanceRow:
    name = row.beat.instance
    known = before.get(name)
    return InstanceRow(
        # Ten messages repeat one heartbeat: it is looked through once.
        beat=known.beat if known and known.order == row.order and known.agent == row.agent else cleaned(row.beat),
        order=row.order,
        agent=row.agent,
        shard=shard,
        heard_at_s=now_s,
        age_when_sent_s=row.age_s if live else None,
        agent_silent_when_sent_s=row.agent_silent_s if live else None,
    )


def _last_heard(row: InstanceRow) -> tuple[bool, float, int, int]:
    """Ranks two claims to one instance by when each agent was last heard, on this process's clock.

    Orders alone can't: claims are offsets of different partitions. They break a tie.
    """
    silent_s = row.agent_silent_when_sent_s
    known = silent_s is not None
    return (known, row.heard_at_s - (silent_s or 0.0), row.order.claim, row.order.n)
