"""Capacity writer: one telemetry partition folded into the shard message that readers replace whole.

The fold accepts an envelope iff its order is greater, so it is a pure function of the log: replays, duplicates and
rebalances change nothing. What was not heard live has an unknown age until the next heartbeat.
"""

from collections.abc import Mapping

from msgspec import Struct

from tokenfleet.core.beat import cleaned, sum_of_ages
from tokenfleet.core.capacity import Applied
from tokenfleet.core.live_clock import LiveClock
from tokenfleet.core.records import AgentClaim, CapacityRow, CapacityShard, Heartbeat, Order, Telemetry


class TelemetryShard:
    """The newest envelope of every agent of one partition, and the rows they make."""

    def __init__(self, *, site: str, shard: int, cluster: str, period_s: float) -> None:
        """`cluster` is the id of the Kafka cluster that the partition lies in; orders of another one yield to it."""
        self._site = site
        self._shard = shard
        self._cluster = cluster
        self._period_s = period_s
        self._agents: dict[str, _Agent] = {}
        self._listening = LiveClock()

    def apply(self, record: Telemetry, *, offset: int, now_s: float, live: bool) -> Applied:
        """Fold one record of the partition; `live` is False while catching up.

        A claim changes nothing by itself: the first envelope that carries it outranks all earlier ones.
        """
        if isinstance(record, AgentClaim):
            return Applied(accepted=True)
        known = self._agents.get(record.agent)
        if known and not self._newer(record.order, known.order):
            return Applied(accepted=False)
        self._agents[record.agent] = _Agent(
            order=record.order,
            offset=offset,
            beats={beat.instance: cleaned(beat) for beat in record.beats},
            heard_at_s=now_s,
            heard_live_s=self._listening.live_s,
            live=live,
        )
        return Applied(accepted=True, conflicts=self._conflicts(record.agent))

    def seed(self, last: CapacityShard, *, now_s: float) -> None:
        """Start, before any envelope, from the last message of the shard's former owner: suspect until heard."""
        for row in last.rows:
            listed = self._agents.get(row.agent)
            self._agents[row.agent] = _Agent(
                order=row.order,
                offset=OFFSET_SEEDED,
                beats={**(listed.beats if listed else {}), row.beat.instance: row.beat},
                heard_at_s=now_s - (sum_of_ages(row.agent_silent_s) or 0.0),
                heard_live_s=self._listening.live_s,
                live=False,
            )

    def advance(self, now_s: float, *, live: bool) -> None:
        """Tell that the partition is, or is not, being read at its end; forgets agents that were silent for long."""
        self._listening.advance(now_s, live=live)
        oldest_s = self._listening.live_s - SILENT_MAX_S
        for name in [name for name, agent in self._agents.items() if agent.heard_live_s < oldest_s]:
            del self._agents[name]

    def snapshot(self, now_s: float, *, n: int, epoch: int) -> CapacityShard:
        """All rows in the order of their names. `n` counts this writer's messages, `epoch` is -1 in its first."""
        owners = self._owners()
        heard_s = [now_s - agent.heard_at_s for agent in self._agents.values() if agent.live]
        return CapacityShard(
            site=self._site,
            shard=self._shard,
            cluster=self._cluster,
            epoch=epoch,
            n=n,
            period_s=self._period_s,
            telemetry_age_s=max(0.0, min(heard_s)) if heard_s else None,
            rows=tuple(_row(name, owners[name], self._agents[owners[name]], now_s) for name in sorted(owners)),
        )

    def __len__(self) -> int:
        """Instances listed."""
        return len(self._owners())

    def _newer(self, order: Order, known: Order) -> bool:
        if order.cluster == known.cluster:
            return (order.claim, order.n) > (known.claim, known.n)
        return known.cluster != self._cluster  # this log's own cluster replaces another's orders, never the reverse

    def _owners(self) -> Mapping[str, str]:
        """The agent that speaks for each instance: of two, the one heard later in the log."""
        owners: dict[str, str] = {}
        for name in sorted(self._agents, key=lambda name: (self._agents[name].offset, name)):
            owners |= dict.fromkeys(self._agents[name].beats, name)
        return owners

    def _conflicts(self, speaker: str) -> tuple[str, ...]:
        claimed = self._agents[speaker].beats.keys()
        others = [agent.beats.keys() & claimed for name, agent in self._agents.items() if name != speaker]
        return tuple(sorted(set[str]().union(*others)))


SILENT_MAX_S = 1800.0  # the retention of `telemetry`; counted only while listening, so an outage of Kafka drops no row
OFFSET_SEEDED = -1  # heard before anything in the log


class _Agent(Struct, frozen=True, kw_only=True):
    """An agent's newest envelope: where it lies in the log, and when it was heard on two clocks."""

    order: Order
    offset: int
    beats: dict[str, Heartbeat]
    heard_at_s: float
    heard_live_s: float
    live: bool


def _row(instance: str, name: str, agent: _Agent, now_s: float) -> CapacityRow:
    beat = agent.beats[instance]
    silent_s = max(0.0, now_s - agent.heard_at_s)
    return CapacityRow(
        beat=beat,
        order=agent.order,
        agent=name,
        age_s=sum_of_ages(beat.age_s, silent_s) if agent.live else None,
        agent_silent_s=silent_s,
    )
