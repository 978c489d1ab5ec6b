"""Faust app: what our stream processors take of faust: an app, its agents for low-rate topics, signals.

An event through a faust agent costs 0.5 ms or more, so hot topics are read by a plain loop that the app hosts. It
starts with the app, without waiting for faust's own consumer group to join, and its unasked end ends the process.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import faust

from tokenfleet.adapters.running import EXIT_FAILED, EXIT_SETUP
from tokenfleet.adapters.topics import Topic
from tokenfleet.core.errors import SetupError

Body = Callable[[], Coroutine[Any, Any, None]]
SESSION_S = 10.0

logger = logging.getLogger(__name__)


class HostedApp(faust.App):
    """A faust app that runs `body` from its start to its stop. It needs at least one agent (`listen`)."""

    def __init__(self, name: str, *, kafka: str, state_dir: str, body: Body) -> None:
        datadir = Path(state_dir) / f"faust-{name}"
        datadir.mkdir(parents=True, exist_ok=True)
        super().__init__(
            f"tokenfleet-{name}",
            broker=[f"kafka://{address.strip()}" for address in kafka.split(",")],
            store="memory://",
            datadir=str(datadir),
            key_serializer="raw",
            value_serializer="raw",
            broker_session_timeout=SESSION_S,
            broker_heartbeat_interval=SESSION_S / 5,
            stream_wait_empty=False,
            topic_allow_declare=False,
            topic_disable_leader=True,
            web_enabled=False,
            autodiscover=False,
        )
        self._body = body

    def listen(self, topic: Topic[Any], take: Callable[[bytes], None]) -> None:
        """An agent that hands each new record's value to `take`, which must not raise. Topics across sites only."""
        source = self.topic(topic.at(), key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw")

        async def agent(stream: faust.Stream) -> None:
            async for value in stream:
                take(value)

        self.agent(source, name=f"{topic.name}-agent")(agent)

    async def on_start(self) -> None:
        await super().on_start()
        self.add_future(self._hosted())

    async def _hosted(self) -> None:
        try:
            await self._body()
        except asyncio.CancelledError:
            if self.should_stop:
                raise
            await self.crash(SetupError("the hosted loop was cancelled unasked"))
        except Exception as error:
            logger.exception("the hosted loop failed")
            await self.crash(error)
        else:
            await self.crash(SetupError("the hosted loop ended unasked"))


def run(app: HostedApp) -> NoReturn:
    """Run until SIGTERM or SIGINT (exit code 0), or until something ends unasked (1, or 2 for a setup error)."""
    for chatty in ("faust", "mode", __name__):  # each start and stop of their dozen services is a line
        logging.getLogger(chatty).setLevel(logging.WARNING)
    worker = faust.Worker(app, quiet=True, override_logging=False, redirect_stdouts=False)
    try:
        worker.execute_from_commandline()
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_SETUP)
    except Exception as error:
        logger.error("this process ends: %r", error)
        sys.exit(EXIT_FAILED)
