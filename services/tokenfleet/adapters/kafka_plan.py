"""Kafka plan: what a Kafka team needs to know before TokenFleet may use its cluster: topics, sizes, ACLs."""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from tokenfleet.adapters.kafka_admin import config_of, placed
from tokenfleet.adapters.topics import TOPICS, Topic

GIB = 1024.0**3
# Bytes a second of one topic at a site of 2,000 instances and 2,000 requests/s.
BYTES_PER_S = {
    "telemetry": 2_000 * 700.0,  # a heartbeat a second
    "kvcache": 2_000 * 45 * 8 * 2.0,  # stored once, and once more in snapshots
    "capacity": 2_000 * 800 * 10.0,  # every row ten times a second
    "placements": 6_000 * 80.0,
    "decisions": 2_000 * 2_048.0,
    "outcomes": 8_000 * 300.0,
    "tickets": 4 * 500 * 2 * 250.0 + 500 * 1_200.0,  # 4 replicas ask 500 books a second; 500 tickets/s
    "summary": 8_192 * 2.0,
    "sketch": 524_288 / 5.0,
    "control": 1.0,
    "policy": 1.0,
    "goodput": 20_000.0,
    "feedback": 1_000.0,
    "deadletter": 100.0,
}


class Role(Struct, frozen=True, kw_only=True):
    """What one kind of process writes and reads, by topic name, and the consumer groups that it joins or commits to.

    A role of a site touches that site's topics only, and `reads_everywhere` at the others; one that is `fleet_wide`
    is one user for all sites.
    """

    writes: frozenset[str]
    reads: frozenset[str] = frozenset()
    reads_everywhere: frozenset[str] = frozenset()
    groups: tuple[str, ...] = ()
    fleet_wide: bool = False


ROLES: dict[str, Role] = {
    "agent": Role(writes=frozenset({"telemetry", "kvcache"})),
    "capacity": Role(
        writes=frozenset({"capacity", "summary", "sketch", "deadletter"}),
        reads=frozenset({"telemetry", "capacity", "kvcache", "placements", "control", "policy", "feedback"}),
        groups=("tokenfleet-capacity-{site}", "tokenfleet-capacity"),  # of its telemetry; faust's own
    ),
    "decide": Role(
        writes=frozenset({"placements", "decisions", "outcomes", "tickets", "deadletter"}),
        reads=frozenset({"capacity", "kvcache", "placements", "tickets", "control", "policy", "feedback"}),
        reads_everywhere=frozenset({"summary", "sketch"}),
        groups=("tokenfleet-shard-{site}",),
    ),
    "goodput": Role(
        writes=frozenset({"goodput", "feedback", "policy", "deadletter"}),  # policy: what becomes of a canary
        reads=frozenset({"outcomes", "summary", "policy", "goodput", "feedback"}),
        groups=("tokenfleet-goodput",),  # faust's own
        fleet_wide=True,
    ),
    "audit": Role(
        writes=frozenset({"deadletter"}),
        reads=frozenset({"decisions", "outcomes", "goodput", "policy"}),
        groups=("audit",),
        fleet_wide=True,
    ),
    "operator": Role(  # `drain` and the `policy` commands
        writes=frozenset({"control", "policy", "deadletter"}), reads=frozenset({"policy"}), fleet_wide=True
    ),
}


def plan_text(sites: Iterable[str], *, topics: Sequence[Topic[Struct]] = TOPICS, replication: int = 1) -> str:
    """Names, partitions, settings, estimated sizes and ACLs, as lines that a Kafka team can act on."""
    names = list(sites)
    rows = [_topic_row(topic, site, replication) for topic, site in placed(names, topics)]
    return "\n".join(
        [
            f"# {len(rows)} topics, replication {replication}; sizes for 2,000 instances and 2,000 requests/s a site",
            *rows,
            "",
            "# ACLs: a role of a site writes its own site's topics only",
            *(line for name, role in ROLES.items() for line in _acls(name, role, names, topics)),
        ]
    )


def _topic_row(topic: Topic[Struct], site: str, replication: int) -> str:
    settings = " ".join(f"{name}={value}" for name, value in config_of(topic).items())
    kept = "last of each key" if topic.compacted else f"{topic.retention_s:g} s"
    size = f"~{_gib(topic) * replication:.2f} GiB"
    return f"{topic.at(site)}  partitions={topic.partitions}  kept={kept}  {size}  {settings}"


def _gib(topic: Topic[Struct]) -> float:
    """Disk of one replica: rate × retention; a compacted topic holds about that of its compaction lag."""
    return BYTES_PER_S[topic.name] * topic.retention_s / GIB


def _acls(name: str, role: Role, sites: Sequence[str], topics: Sequence[Topic[Struct]]) -> list[str]:
    """A fleet-wide role's lines, or those of its user at each site."""
    if role.fleet_wide:
        return _user_acls(f"tokenfleet-{name}", role, own=sites, all_sites=sites, topics=topics)
    return [
        line
        for site in sites
        for line in _user_acls(f"tokenfleet-{name}-{site}", role, own=[site], all_sites=sites, topics=topics)
    ]


def _user_acls(
    user: str, role: Role, *, own: Sequence[str], all_sites: Sequence[str], topics: Sequence[Topic[Struct]]
) -> list[str]:
    writes = [topic.at(site) for topic, site in placed(own, topics) if topic.name in role.writes]
    reads = [topic.at(site) for topic, site in placed(own, topics) if topic.name in role.reads]
    reads += [topic.at(site) for topic, site in placed(all_sites, topics) if topic.name in role.reads_everywhere]
    groups = dict.fromkeys(group.format(site=site) for site in own for group in role.groups)
    return [
        *(f"allow User:{user} WRITE,DESCRIBE topic {topic}" for topic in writes),
        *(f"allow User:{user} READ,DESCRIBE topic {topic}" for topic in reads),
        *(f"allow User:{user} READ group {group}" for group in groups),
    ]
