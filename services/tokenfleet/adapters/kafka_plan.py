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
    "summary": 8_192 * 2.0,
    "sketch": 524_288 / 5.0,
    "control": 1.0,
    "policy": 1.0,
    "goodput": 20_000.0,
    "feedback": 1_000.0,
    "deadletter": 100.0,
}
# Which role writes and reads which topic. `decide` follows its own site's tables and the others' faces.
ROLES: dict[str, tuple[frozenset[str], frozenset[str], str]] = {
    "agent": (frozenset({"telemetry", "kvcache", "deadletter"}), frozenset({"control"}), ""),
    "capacity": (
        frozenset({"capacity", "summary", "sketch", "deadletter"}),
        frozenset({"telemetry", "capacity", "kvcache", "placements", "policy"}),
        "capacity-{site}",
    ),
    "decide": (
        frozenset({"placements", "decisions", "outcomes", "deadletter"}),
        frozenset(
            {"capacity", "kvcache", "placements", "outcomes", "summary", "sketch", "control", "policy", "feedback"}
        ),
        "",
    ),
    "goodput": (
        frozenset({"goodput", "feedback", "deadletter"}),
        frozenset({"outcomes", "decisions", "policy", "feedback"}),
        "goodput-{site}",
    ),
    "audit": (
        frozenset({"deadletter"}),
        frozenset({"decisions", "outcomes", "goodput", "deadletter", "policy"}),
        "audit-{site}",
    ),
}


def plan_text(sites: Iterable[str], *, topics: Sequence[Topic[Struct]] = TOPICS, replication: int = 1) -> str:
    """Names, partitions, settings, estimated sizes and ACLs, as lines that a Kafka team can act on."""
    names = list(sites)
    rows = [_topic_row(topic, site, replication) for topic, site in placed(names, topics)]
    acls = [line for role in ROLES for site in names for line in _acls(role, site, topics)]
    return "\n".join(
        [
            f"# {len(rows)} topics, replication {replication}; sizes for 2,000 instances and 2,000 requests/s a site",
            *rows,
            "",
            "# ACLs: a role of a site writes its own site's topics only",
            *dict.fromkeys(acls),
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


def _acls(role: str, site: str, topics: Sequence[Topic[Struct]]) -> list[str]:
    writes, reads, group = ROLES[role]
    user = f"User:tokenfleet-{role}-{site}"
    lines = [f"allow {user} WRITE,DESCRIBE topic {t.at(site)}" for t in topics if t.name in writes]
    for topic in topics:
        if topic.name in reads:
            # Faces of other sites arrive as replicas under their own names.
            name = (
                f"tokenfleet.*.{topic.name}.v{topic.version}" if topic.name in ("summary", "sketch") else topic.at(site)
            )
            lines.append(f"allow {user} READ,DESCRIBE topic {name}")
    if group:
        lines.append(f"allow {user} READ group {group.format(site=site)}")
    return lines
