"""Fixtures: the servers that tests talk to. Each is started when the first test asks for it."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kafka_server import KafkaServer, OwnKafka, fetch_ahead, own_process, shared_kafka
from tests.postgres_server import fresh_database, shared_postgres

# The same examples each time, on however slow a machine; `--hypothesis-profile=explore` looks for others.
settings.register_profile("explore", deadline=None)
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.load_profile("fixed")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fetch what the chosen tests will need before the clock of the first one runs."""
    wanted = {name for item in session.items if isinstance(item, pytest.Function) for name in item.fixturenames}
    if wanted & {"kafka", "own_kafka"} and not session.config.option.collectonly:
        fetch_ahead()


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """The run's broker: `kafka.bootstrap`, `kafka.needs(Can.COMPACT)`. Give topics names of your own."""
    with shared_kafka(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture
async def own_kafka(tmp_path: Path) -> AsyncIterator[OwnKafka]:
    """This test's own broker, running: start, stop, restart, kill9, freeze, thaw."""
    broker = own_process(tmp_path / "own_kafka")
    try:
        await broker.start()
        yield broker
    finally:
        await broker.stop()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The DSN of the run's server, with the right to create databases."""
    with shared_postgres(tmp_path_factory.mktemp("postgres")) as address:
        yield address


@pytest.fixture
async def database(postgres: str) -> AsyncIterator[str]:
    """The DSN of an empty database of this test's own."""
    async with fresh_database(postgres) as address:
        yield address
