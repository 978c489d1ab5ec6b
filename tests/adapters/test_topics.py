"""Topics: names, the partition of a key, and what a changed count may be."""

import re
from pathlib import Path

import pytest

from tokenfleet.adapters import kafka_plan, topics
from tokenfleet.adapters.kafka_admin import config_of, placed
from tokenfleet.adapters.kafka_plan import BYTES_PER_S, ROLES, plan_text
from tokenfleet.adapters.topics import PLACEMENTS, POLICY, TELEMETRY, TOPICS, Topic, partition_of, resized
from tokenfleet.core.errors import SetupError


def test_a_sites_topic_carries_its_name_and_the_others_do_not() -> None:
    assert TELEMETRY.at("eu.west") == "tokenfleet.eu.west.telemetry.v1"
    assert POLICY.at("eu.west") == POLICY.at() == "tokenfleet.policy.v1"
    with pytest.raises(SetupError, match="name the site"):
        TELEMETRY.at()


def test_the_partition_of_a_key_never_changes() -> None:
    """Writers of several releases must agree; these are the values of XXH3-64."""
    assert [partition_of(key, 16) for key in ("", "r-1", "instance/ä", "x" * 256)] == [2, 15, 11, 9]


def test_every_message_has_one_topic() -> None:
    messages = [message for topic in TOPICS for message in topic.messages]
    tags = [message.__struct_config__.tag for message in messages]
    assert len(set(tags)) == len(tags)
    assert len({topic.name for topic in TOPICS}) == len(TOPICS)


def test_counts_can_be_changed_together() -> None:
    table = {topic.name: topic.partitions for topic in resized({"telemetry": 16, "capacity": 16})}
    assert (table["telemetry"], table["capacity"], table["placements"]) == (16, 16, PLACEMENTS.partitions)


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ({"telemetry": 8}, "same count"),
        ({"policy": 2}, "policy"),
        ({"placements": 0}, "at least 1"),
        ({"nothing": 1}, "no topic 'nothing'"),
    ],
)
def test_counts_that_break_the_design_are_refused(counts: dict[str, int], problem: str) -> None:
    with pytest.raises(SetupError, match=problem):
        resized(counts)


def test_compacted_topics_are_compacted_and_the_others_expire() -> None:
    for topic in TOPICS:
        config = config_of(topic)
        assert config["cleanup.policy"] == ("compact" if topic.compacted else "delete")
        assert ("retention.ms" in config) is not topic.compacted


def test_the_plan_names_every_topic_and_gives_each_role_what_it_needs() -> None:
    text = plan_text(["b", "c"], replication=3)
    for topic, site in placed(["b", "c"]):
        assert f"{topic.at(site)}  partitions={topic.partitions}" in text
    assert "allow User:tokenfleet-agent-b WRITE,DESCRIBE topic tokenfleet.b.telemetry.v1" in text
    assert "agent-b WRITE,DESCRIBE topic tokenfleet.c" not in text
    assert BYTES_PER_S.keys() == {topic.name for topic in TOPICS}
    assert "allow User:tokenfleet-decide-b READ,DESCRIBE topic tokenfleet.c.summary.v1" in text
    assert "decide-b READ,DESCRIBE topic tokenfleet.c.capacity" not in text
    assert "allow User:tokenfleet-audit READ,DESCRIBE topic tokenfleet.c.outcomes.v1" in text
    assert "allow User:tokenfleet-capacity-b READ group tokenfleet-capacity-b" in text


SOURCES = {
    "agent": ("processes/agent", "adapters/engines/site_feed"),
    "capacity": ("processes/capacity", "adapters/shards", "adapters/site_face", "adapters/faust_app"),
    "decide": ("processes/decide", "adapters/desk", "adapters/pool_shard"),
    "goodput": ("processes/goodput", "adapters/faust_app"),
    "audit": ("processes/audit",),
    "operator": ("client/operate", "client/policies"),
}
CALL = re.compile(r"\.(follower|lone_worker|shared_worker|listen|send|put)\(\s*([A-Z]+),")


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_what_its_code_does_and_no_more(role: str) -> None:
    """What it reads and writes stands in its calls; whoever reads also writes dead letters."""
    package = Path(kafka_plan.__file__).parent.parent
    calls = [call for source in SOURCES[role] for call in CALL.findall((package / f"{source}.py").read_text())]
    names = {name: topic.name for name, topic in vars(topics).items() if isinstance(topic, Topic)}
    writes = {names[topic] for verb, topic in calls if verb in ("send", "put")}
    reads = {names[topic] for verb, topic in calls if verb not in ("send", "put")}
    assert ROLES[role].writes == writes | ({"deadletter"} if reads else set())
    assert ROLES[role].reads | ROLES[role].reads_everywhere == reads
