"""The embedded PostgreSQL starts under any user, survives kill -9 and a stale pid file, and stays in its folder."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest

from tests.ports import free_port
from tokenfleet.core.errors import SetupError
from tokenfleet.local import postgres
from tokenfleet.local.child import Exit
from tokenfleet.local.children import Supervisor
from tokenfleet.local.orphans import start_time_ticks

pytestmark = pytest.mark.integration


async def ask(address: str, question: str) -> object:
    connection = await asyncpg.connect(address)
    try:
        return await connection.fetchval(question)
    finally:
        await connection.close()


async def test_a_closed_parent_folder_is_enough_and_stays_closed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    data_dir, port = closed / "a folder" / "postgres", free_port()
    await postgres.initialise(data_dir)
    async with Supervisor(closed / "state") as fleet:
        await fleet.start(postgres.program(data_dir, port=port))
        await postgres.until_ready(postgres.dsn(port=port))
        assert await ask(postgres.dsn(port=port), "show server_encoding") == "UTF8"
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert not (data_dir / "postmaster.pid").exists()  # it ended of its own accord


async def test_acknowledged_rows_survive_a_kill_and_the_server_comes_back(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "postgres", free_port()
    address = postgres.dsn(port=port)
    await postgres.initialise(data_dir)
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(postgres.program(data_dir, port=port))
        await postgres.until_ready(address)
        await ask(address, "create table kept as select 7 as n")
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while child.restarts == 0:
                await asyncio.sleep(0.02)
        await postgres.until_ready(address)
        assert await ask(address, "select n from kept") == 7


async def test_a_pid_file_naming_somebody_else_does_not_stop_the_server(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "postgres", free_port()
    await postgres.initialise(data_dir)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(sleeper, preexec_fn=postgres.without_root()) as stranger:
        try:
            (data_dir / "postmaster.pid").write_text(f"{stranger.pid}\n{data_dir}\n")
            async with Supervisor(tmp_path) as fleet:
                await fleet.start(postgres.program(data_dir, port=port))
                await postgres.until_ready(postgres.dsn(port=port))
            assert stranger.poll() is None
        finally:
            stranger.kill()


async def test_a_server_without_its_folder_is_not_started_again_and_again(tmp_path: Path) -> None:
    exits: list[Exit] = []
    data_dir, port = tmp_path / "postgres", free_port()
    await postgres.initialise(data_dir)
    async with Supervisor(tmp_path, on_exit=exits.append) as fleet:
        child = await fleet.start(postgres.program(data_dir, port=port))
        await postgres.until_ready(postgres.dsn(port=port))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)  # it ends with code 0, as it does when its folder goes
        async with asyncio.timeout(20):
            while not exits:
                await asyncio.sleep(0.02)
        assert exits[0].code == 0
        assert exits[0].restart_in_s is None


async def test_a_folder_half_made_is_made_again(tmp_path: Path) -> None:
    data_dir = tmp_path / "postgres"
    half = tmp_path / "postgres.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    await postgres.initialise(data_dir)
    assert (data_dir / "postgresql.conf").exists()
    made = (data_dir / "PG_VERSION").stat().st_mtime_ns
    await postgres.initialise(data_dir)
    assert (data_dir / "PG_VERSION").stat().st_mtime_ns == made


async def test_a_folder_of_another_release_is_refused_by_name(tmp_path: Path) -> None:
    data_dir = tmp_path / "postgres"
    data_dir.mkdir()
    (data_dir / "PG_VERSION").write_text("9\n")
    with pytest.raises(postgres.DataFolderError, match="made by PostgreSQL 9"):
        await postgres.initialise(data_dir)


async def test_the_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    data_dir, port = tmp_path / "postgres", free_port()
    await postgres.initialise(data_dir)
    parent_code = f"""
import asyncio
from pathlib import Path
from tokenfleet.core.errors import SetupError
from tokenfleet.local import postgres
from tokenfleet.local.children import Supervisor

async def main():
    async with Supervisor(Path({str(tmp_path)!r})) as fleet:
        child = await fleet.start(postgres.program(Path({str(data_dir)!r}), port={port}))
        await postgres.until_ready(postgres.dsn(port={port}))
        print(child.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    async with asyncio.timeout(20):
        while start_time_ticks(pid) is not None:
            await asyncio.sleep(0.02)
    async with Supervisor(tmp_path) as fleet:  # the next run takes the folder over
        await fleet.start(postgres.program(data_dir, port=port))
        await postgres.until_ready(postgres.dsn(port=port))


async def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(SetupError, match=r"no PostgreSQL answers at postgres://me@127\.0\.0\.1:\d+/x: "):
        await postgres.reachable(f"postgres://me:secret@127.0.0.1:{free_port()}/x")
