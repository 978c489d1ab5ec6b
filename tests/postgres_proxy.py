"""A wire to PostgreSQL that a test cuts and joins again."""

import asyncio
import contextlib
from urllib.parse import urlsplit

from tests.ports import free_port


class Proxy:
    """A wire between a process and PostgreSQL that a test can cut."""

    def __init__(self, database: str) -> None:
        parts = urlsplit(database)
        self._to = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._port = free_port()
        self.dsn = parts._replace(netloc=f"{parts.username or 'postgres'}@127.0.0.1:{self._port}").geturl()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def join(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self._port)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._to)
        self._open |= {writer, back}
        await asyncio.gather(_pump(reader, back), _pump(there, writer))
        self._open -= {writer, back}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.close()
