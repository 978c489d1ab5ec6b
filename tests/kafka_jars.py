"""Apache Kafka from its jars: how they are fetched, and which commands format and run one KRaft node on loopback.

Forty-five jars, 43 MB, by Maven into .cache/kafka; no container engine is needed.
"""

import fcntl
import shutil
import subprocess
import uuid
from base64 import urlsafe_b64encode
from pathlib import Path

KAFKA_VERSION = "4.1.1"
CACHE = Path(__file__).resolve().parent.parent / ".cache" / "kafka"
FETCH_WAIT_MAX_S = 600.0
FORMAT_WAIT_MAX_S = 120.0

POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>tokenfleet</groupId>
  <artifactId>kafka-for-tests</artifactId>
  <version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{KAFKA_VERSION}</version>
    </dependency>
  </dependencies>
</project>
"""

# Only what goes wrong: the log of a broker that works is as long as the test.
LOG4J = """
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c: %m%n
rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
"""

JVM = (
    "-Xmx512m",
    "-Xms128m",
    "-XX:+UseSerialGC",  # two cores: no threads for the collector
    "-XX:TieredStopAtLevel=1",  # a broker that lives for minutes never pays back the second compiler
    "-Djava.awt.headless=true",
)


class KafkaJarsError(Exception):
    """Apache Kafka cannot be run on this machine; the message names what is missing."""


def missing_programs() -> list[str]:
    """What this machine lacks to run the jars."""
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


def fetch() -> Path:
    """The folder with all jars, fetched once per checkout. Raises KafkaJarsError."""
    if missing := missing_programs():
        raise KafkaJarsError(f"not on the path: {', '.join(missing)}")
    jars = CACHE / f"jars-{KAFKA_VERSION}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:  # several test runs may start at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not jars.exists():
            copy_jars(jars)
    return jars


def copy_jars(jars: Path) -> None:
    """Whole or not at all. Raises KafkaJarsError with what Maven said."""
    part = jars.with_name(f"{jars.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (CACHE / "pom.xml").write_text(POM)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={part}"]
    maven = subprocess.run(
        command, cwd=CACHE, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=FETCH_WAIT_MAX_S
    )
    if maven.returncode != 0 or not any(part.glob("kafka_2.13-*.jar")):
        raise KafkaJarsError(f"{' '.join(command)} ended with {maven.returncode}: {maven.stdout[-2000:]}")
    part.rename(jars)


def format_node(folder: Path, *, port: int, controller_port: int) -> None:
    """Write the node's settings and format its storage. Raises KafkaJarsError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log4j2.properties").write_text(LOG4J)
    settings = folder / "server.properties"
    settings.write_text(properties(folder, port=port, controller_port=controller_port))
    cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "x")  # Kafka's own form
    tool = subprocess.run(
        [*java(folder), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(settings)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=FORMAT_WAIT_MAX_S,
    )
    if tool.returncode != 0:
        raise KafkaJarsError(f"formatting ended with {tool.returncode}: {tool.stdout[-2000:]}")


def command(folder: Path) -> list[str]:
    """The argument list of the formatted node."""
    return [*java(folder), "kafka.Kafka", str(folder / "server.properties")]


def java(folder: Path) -> list[str]:
    """Java with every jar and the node's log settings."""
    log_settings = folder / "log4j2.properties"
    return ["java", *JVM, f"-Dlog4j2.configurationFile={log_settings}", "-cp", f"{fetch()}/*"]


def properties(folder: Path, *, port: int, controller_port: int) -> str:
    """Settings of one node that is broker and controller, on loopback, quick to react."""
    return "\n".join(
        f"{key}={value}"
        for key, value in {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": folder / "data",
            "auto.create.topics.enable": "false",  # a topic nobody declared is a mistake to be seen
            "group.initial.rebalance.delay.ms": 0,
            "group.min.session.timeout.ms": 1000,
            "broker.session.timeout.ms": 3000,  # a killed broker may register again when its old session is over
            "broker.heartbeat.interval.ms": 500,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 4,  # its default of 50 costs seconds and file handles
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "log.cleaner.backoff.ms": 500,  # a test of compaction waits for the cleaner
            "log.cleaner.dedupe.buffer.size": 16 * 2**20,  # its default of 128 MiB is a quarter of the heap
            "log.segment.delete.delay.ms": 1000,
        }.items()
    )
