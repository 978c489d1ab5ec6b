"""Topics: which records travel where, by what they are partitioned, and how long they are kept.

The one table: `tokenfleet topics apply` creates it, the codec reads its message types, `schemas/` is written
from it. Partition counts and replication are settings; the counts here suit one machine.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core import accounts, deadletters, records, revisions
from tokenfleet.core.errors import SetupError
from tokenfleet.core.shard import records as shard

M_co = TypeVar("M_co", bound=Struct, covariant=True)

RECORD_BYTES_MAX = 1024 * 1024  # bounds one record's value; the broker is told to take this and its framing
HOUR_S = 3600.0
DAY_S = 24 * HOUR_S

PartitionBy = Literal["agent", "instance", "shard", "replica", "request", "book", "site", "topic"]


class Topic(Struct, Generic[M_co], frozen=True, kw_only=True):
    """One kind of topic. `messages` are its record types, told apart by their tag.

    `partition_by` says whose records share a partition: `shard` is explicit (partition = shard number), `site` and
    `topic` are partition 0, the others hash that id (`partition_of`). `partitions` is the default count. `retention_s`
    is how long records are kept; a compacted topic keeps the last record of each key and forgets older ones after
    that time. A per-site topic is named `tokenfleet.<site>.<name>.v<version>`, another `tokenfleet.<name>.v<version>`.

    `fetch_wait_s` is how long a reader's question may wait at a broker for a record. Kafka answers at the first; the
    embedded broker looks only now and then, so there it is the delay of a record, and a broker's load.
    """

    name: str
    messages: tuple[type[M_co], ...]
    partition_by: PartitionBy
    retention_s: float
    description: str
    partitions: int = 1
    compacted: bool = False
    per_site: bool = True
    version: int = 1
    fetch_wait_s: float = 0.5

    def at(self, site: str = "") -> str:
        """The topic's full name at `site`; the site is ignored for topics across sites.

        Raises SetupError when a per-site topic is asked for without a site.
        """
        if not self.per_site:
            return f"tokenfleet.{self.name}.v{self.version}"
        if not site:
            raise SetupError(f"topic {self.name}: each site has its own; name the site")
        return f"tokenfleet.{site}.{self.name}.v{self.version}"


TELEMETRY = Topic[records.AgentClaim | records.TelemetryEnvelope](
    name="telemetry",
    messages=(records.AgentClaim, records.TelemetryEnvelope),
    partition_by="agent",
    partitions=2,
    retention_s=0.5 * HOUR_S,
    description="Heartbeats of all instances that one agent watches, one envelope a period.",
    fetch_wait_s=0.1,
)
KVCACHE = Topic[records.KvDelta | records.KvSnapshot](
    name="kvcache",
    messages=(records.KvDelta, records.KvSnapshot),
    partition_by="instance",
    partitions=2,
    retention_s=120.0,  # twice the snapshot period: what is older is in a snapshot
    description="Canonical block keys stored and removed by one instance, and periodic snapshots in parts.",
    fetch_wait_s=0.25,
)
CAPACITY = Topic[records.CapacityShard](
    name="capacity",
    messages=(records.CapacityShard,),
    partition_by="shard",
    partitions=2,  # one for each partition of telemetry: a worker that owns one publishes the other
    retention_s=60.0,
    compacted=True,
    description="One message per shard with all its rows, every 100 ms, changed or not.",
    fetch_wait_s=0.1,
)
PLACEMENTS = Topic[records.PlacementEnvelope](
    name="placements",
    messages=(records.PlacementEnvelope,),
    partition_by="instance",
    partitions=2,
    retention_s=0.5 * HOUR_S,
    description="Changes of the ledger: placed, first_token, progress, ended.",
    fetch_wait_s=0.1,
)
DECISIONS = Topic[records.DecisionEnvelope](
    name="decisions",
    messages=(records.DecisionEnvelope,),
    partition_by="replica",
    retention_s=7 * DAY_S,
    description="Decisions with their evidence, for audit and replay; read by no decision.",
)
OUTCOMES = Topic[records.OutcomeEnvelope](
    name="outcomes",
    messages=(records.OutcomeEnvelope,),
    partition_by="request",
    partitions=2,
    retention_s=7 * DAY_S,
    description="What happened to each attempt of the logical requests that arrived at this site.",
)
TICKETS = Topic[shard.Record](
    name="tickets",
    messages=(
        shard.ShardClaim,
        shard.LeaseRequest,
        shard.Lease,
        shard.TicketAsk,
        shard.Ticket,
        shard.Keepalive,
        shard.TokenShown,
        shard.TicketsWithdrawn,
        shard.Grant,
        shard.GrantUnused,
        shard.TicketEnded,
    ),
    partition_by="book",
    partitions=2,
    retention_s=HOUR_S,  # not compacted: a void record of a deposed owner could shadow a good one
    description="Leases, queue tickets and grants of the site's pools and quotas, and the claims of their owners.",
    fetch_wait_s=0.1,
)
SUMMARY = Topic[records.SiteSummary](
    name="summary",
    messages=(records.SiteSummary,),
    partition_by="site",
    retention_s=60.0,
    compacted=True,
    description="One site's capacity as the other sites see it, every 0.5 s.",
)
SKETCH = Topic[records.SketchChunk](
    name="sketch",
    messages=(records.SketchChunk,),
    partition_by="site",
    retention_s=60.0,
    compacted=True,
    description="Bloom filters over the block keys that the site's pools cache, in chunks, every 5 s.",
)
CONTROL = Topic[records.Control](
    name="control",
    messages=(records.Control,),
    partition_by="instance",
    retention_s=DAY_S,
    compacted=True,
    description="An operator's word on an instance: draining, quarantined, weight.",
)
POLICY = Topic[revisions.PolicyRecord](
    name="policy",
    messages=(revisions.PolicyRevision, revisions.CanaryReport),
    partition_by="topic",
    retention_s=DAY_S,
    compacted=True,
    per_site=False,
    description="Policy files under their revision, the greatest is in force; canaries and their judge's reports.",
)
GOODPUT = Topic[accounts.GoodputPartial](
    name="goodput",
    messages=(accounts.GoodputPartial,),
    partition_by="site",
    retention_s=7 * DAY_S,
    per_site=False,
    description="Partial sums of goodput with their partition's watermark; readers add up.",
)
FEEDBACK = Topic[accounts.Feedback](
    name="feedback",
    messages=(accounts.Feedback,),
    partition_by="topic",
    retention_s=DAY_S,
    compacted=True,
    per_site=False,
    description="Calibration revisions learned from outcomes.",
)
DEADLETTER = Topic[deadletters.DeadLetter](
    name="deadletter",
    messages=(deadletters.DeadLetter,),
    partition_by="topic",
    retention_s=7 * DAY_S,
    per_site=False,
    description="Where a record that could not be used is, and why; never its payload.",
)

TOPICS: tuple[Topic[Struct], ...] = (
    TELEMETRY,
    KVCACHE,
    CAPACITY,
    PLACEMENTS,
    DECISIONS,
    OUTCOMES,
    TICKETS,
    SUMMARY,
    SKETCH,
    CONTROL,
    POLICY,
    GOODPUT,
    FEEDBACK,
    DEADLETTER,
)


def partition_of(key: str, partitions: int) -> int:
    """The partition of the records of `key`: XXH3-64 of its UTF-8 bytes, modulo. All writers agree on it."""
    return xxhash.xxh3_64_intdigest(key.encode()) % partitions


def resized(counts: Mapping[str, int], topics: Iterable[Topic[Struct]] = TOPICS) -> tuple[Topic[Struct], ...]:
    """The table with other partition counts, by topic name.

    Raises SetupError for a name that is no topic, a count below 1, `site` and `topic` partitioned ones with more
    than one, and for telemetry and capacity of different counts.
    """
    table = {topic.name: topic for topic in topics}
    for name, count in counts.items():
        if (topic := table.get(name)) is None:
            raise SetupError(f"partitions: no topic {name!r}; there is: {', '.join(sorted(table))}")
        if count < 1 or (count > 1 and topic.partition_by in ("site", "topic")):
            raise SetupError(f"partitions.{name}: {count} can't be; {'1' if count > 1 else 'at least 1'} is needed")
        table[name] = replace(topic, partitions=count)
    if {"telemetry", "capacity"} <= table.keys() and table["telemetry"].partitions != table["capacity"].partitions:
        raise SetupError("partitions: telemetry and capacity need the same count: a shard is a telemetry partition")
    return tuple(table.values())
