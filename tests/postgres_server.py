"""Which PostgreSQL the tests talk to, and a fresh database for each test.

In this order: the address in TOKENFLEET_TEST_POSTGRES (a role that may create databases); a container where a Docker
engine answers; the embedded server.
"""

import os
import signal
import uuid
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.docker_engine import docker_answers
from tests.loops import run_apart
from tests.ports import free_port
from tests.server_process import ServerProcess
from tokenfleet.local import postgres

ADDRESS_VARIABLE = "TOKENFLEET_TEST_POSTGRES"
READY_WAIT_MAX_S = 60.0


@contextmanager
def shared_postgres(folder: Path) -> Generator[str]:
    """The DSN of the test run's server, ended when the block ends."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        yield address
    elif docker_answers():
        with container() as address:
            yield address
    else:
        with embedded(folder) as address:
            yield address


@asynccontextmanager
async def fresh_database(server: str) -> AsyncGenerator[str]:
    """The DSN of an empty database that goes when the block ends."""
    name = f"test_{uuid.uuid4().hex}"
    await execute(server, f"create database {name}")
    try:
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
    finally:
        await execute(server, f"drop database {name} with (force)")


async def execute(address: str, statement: str) -> None:
    connection = await asyncpg.connect(address)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@contextmanager
def embedded(folder: Path) -> Generator[str]:
    """The wheel's server on a folder of its own."""
    data_dir, port = folder / "data", free_port()
    run_apart(postgres.initialise(data_dir))
    process = ServerProcess(
        lambda: postgres.command(data_dir, port=port, options={"fsync": "off"}),  # it need not survive a power cut
        log_path=folder / "postgres.log",
        before_exec=postgres.without_root(),
        stop_signal=signal.SIGINT,
    )
    process.start()
    try:
        address = postgres.dsn(port=port)
        run_apart(until_answers(address, process=process))
        yield address
    finally:
        process.stop()


@contextmanager
def container() -> Generator[str]:
    """PostgreSQL in a container that Docker removes even if this process is killed."""
    from testcontainers.community.postgres import PostgresContainer

    with PostgresContainer("postgres:18", driver=None) as server:
        yield f"{server.get_connection_url()}?sslmode=disable"


async def until_answers(address: str, *, process: ServerProcess) -> None:
    try:
        await postgres.until_ready(address, wait_max_s=READY_WAIT_MAX_S)
    except TimeoutError:
        pytest.fail(f"PostgreSQL does not answer:\n{process.said()}", pytrace=False)
