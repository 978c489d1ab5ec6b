"""Which Kafka the tests talk to: the best this machine has, and what it can do.

In this order: the address in TOKENFLEET_TEST_KAFKA; a container where a Docker engine answers; Apache Kafka from its
jars; the embedded broker, which can do less. TOKENFLEET_TEST_KAFKA_KIND=jars allows the jars only, so that nothing
downgrades unseen.
"""

import asyncio
import enum
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import KafkaError

from tests import kafka_jars
from tests.docker_engine import docker_answers
from tests.loops import run_apart
from tests.ports import free_port
from tests.server_process import ServerProcess
from tokenfleet.local import broker

READY_WAIT_MAX_S = 90.0  # 4 to 15 s; a machine under load needs longer
ADDRESS_VARIABLE = "TOKENFLEET_TEST_KAFKA"
KIND_VARIABLE = "TOKENFLEET_TEST_KAFKA_KIND"


class Can(enum.Enum):
    """What a test may need beyond producing and consuming."""

    KEEP = "keep"  # its topics survive its own death
    COMPACT = "compact"
    REBALANCE = "rebalance"  # groups as Apache Kafka runs them, quick to settle
    REFUSE_UNKNOWN_TOPICS = "refuse_unknown_topics"  # tansu creates them
    REFUSE_BAD_RECORDS = "refuse_bad_records"  # no key on a compacted topic, too large
    RESET_OFFSETS = "reset_offsets"  # says so when a position lies beyond the end
    TRANSACT = "transact"


@dataclass(frozen=True, kw_only=True)
class KafkaServer:
    """An address and what answers there."""

    bootstrap: str  # host:port
    kind: str  # external, container, jars, tansu
    capabilities: frozenset[Can] = field(default=frozenset(Can))

    def needs(self, *wanted: Can) -> None:
        """Skip the test if this broker cannot do it."""
        lacking = [can.value for can in wanted if can not in self.capabilities]
        if lacking:
            pytest.skip(f"{self.kind} cannot: {', '.join(lacking)}")


class OwnKafka:
    """A broker of one test's own, to be frozen, killed and started again on the same port and folder."""

    def __init__(self, server: KafkaServer, process: ServerProcess) -> None:
        self.server = server
        self._process = process

    @property
    def bootstrap(self) -> str:
        return self.server.bootstrap

    @property
    def pid(self) -> int:
        return self._process.pid

    def needs(self, *wanted: Can) -> None:
        """Skip the test if this broker cannot do it."""
        self.server.needs(*wanted)

    async def start(self) -> None:
        """Start it and wait until it answers."""
        self._process.start()
        await until_answers(self.bootstrap, process=self._process)

    async def stop(self) -> None:
        """An orderly end; return when it is gone."""
        await asyncio.to_thread(self._process.stop)

    async def restart(self) -> None:
        """An orderly end and a new start."""
        await self.stop()
        await self.start()

    def kill9(self) -> None:
        """SIGKILL; return when it is gone. `start` brings it back."""
        self._process.kill()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        self._process.freeze()

    def thaw(self) -> None:
        self._process.thaw()


@contextmanager
def shared_kafka(folder: Path) -> Generator[KafkaServer]:
    """The broker of the whole test run, ended when the block ends."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        yield KafkaServer(bootstrap=address, kind="external")
    elif forced_kind() is None and docker_answers():
        with container() as server:
            yield server
    else:
        own = own_process(folder)
        try:
            run_apart(own.start())
            yield own.server
        finally:
            run_apart(own.stop())


def fetch_ahead() -> None:
    """Fetch the jars if this run may use them; a failure is told by the fixture that needs them."""
    if forced_kind() != "tansu":
        with suppress(kafka_jars.KafkaJarsError):
            kafka_jars.fetch()


def own_process(folder: Path) -> OwnKafka:
    """A broker that is a process of ours and not yet started: the jars, else tansu.

    Fails the test if the jars are asked for and impossible.
    """
    if forced_kind() == "tansu":
        return tansu(folder)
    try:
        return jars(folder)
    except kafka_jars.KafkaJarsError as error:
        if forced_kind() == "jars":
            pytest.fail(f"{KIND_VARIABLE}=jars, and Apache Kafka cannot run here: {error}", pytrace=False)
        return tansu(folder)


def forced_kind() -> str | None:
    """jars or tansu, if the environment says so."""
    kind = os.environ.get(KIND_VARIABLE)
    if kind not in (None, "", "jars", "tansu"):
        pytest.fail(f"{KIND_VARIABLE} is {kind!r}; it may be jars or tansu", pytrace=False)
    return kind or None


def jars(folder: Path) -> OwnKafka:
    """Apache Kafka, one node. Raises KafkaJarsError."""
    kafka_jars.fetch()
    port, controller_port = free_port(), free_port()
    kafka_jars.format_node(folder, port=port, controller_port=controller_port)
    process = ServerProcess(lambda: kafka_jars.command(folder), log_path=folder / "kafka.log")
    return OwnKafka(KafkaServer(bootstrap=f"127.0.0.1:{port}", kind="jars"), process)


def tansu(folder: Path) -> OwnKafka:
    """The embedded broker: topics in memory, no groups as Kafka runs them."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    process = ServerProcess(lambda: broker.command(port=port), log_path=folder / "tansu.log")
    return OwnKafka(KafkaServer(bootstrap=f"127.0.0.1:{port}", kind="tansu", capabilities=frozenset()), process)


@contextmanager
def container() -> Generator[KafkaServer]:
    """Apache Kafka in a container that Docker removes even if this process is killed."""
    from testcontainers.community.kafka import KafkaContainer

    settings = {"KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false", "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0"}
    with KafkaContainer().with_kraft().with_envs(**settings) as kafka:
        yield KafkaServer(bootstrap=kafka.get_bootstrap_server(), kind="container")


async def until_answers(bootstrap: str, *, process: ServerProcess) -> None:
    """Return when the broker names itself; fail with its log when it ends or stays silent."""
    port = int(bootstrap.rpartition(":")[2])
    try:
        async with asyncio.timeout(READY_WAIT_MAX_S):
            while not (await broker.answers(port) and await names_itself(bootstrap)):
                if not process.running:
                    pytest.fail(f"the broker ended at its start:\n{process.said()}", pytrace=False)
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"the broker does not answer after {READY_WAIT_MAX_S} s:\n{process.said()}", pytrace=False)


async def names_itself(bootstrap: str) -> bool:
    """Whether the cluster has a broker; a KRaft node answers before its controller has let it in."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap, request_timeout_ms=5000)
    try:
        await admin.start()
        return len((await admin.describe_cluster())["brokers"]) > 0
    except KafkaError:
        return False
    finally:
        await admin.close()
