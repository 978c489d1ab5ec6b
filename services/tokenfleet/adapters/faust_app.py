"""Faust app: what our stream processors take of faust: an app, its agents for low-rate topics, signals.

An event through a faust agent costs 0.5 ms or more, so hot topics are read by a plain loop that the app hosts. It
starts with the app, without waiting for faust's own consumer group to join, and its unasked end ends the process.
"""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import faust

from tokenfleet.adapters.codec import decode
from tokenfleet.adapters.kafka_link import KafkaLink
from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.adapters.running import EXIT_SETUP, EndedUnaskedError, exit_code_of, set_up_logging
from tokenfleet.adapters.settings import Common, load_settings
from tokenfleet.adapters.topics import POLICY, Topic
from tokenfleet.core.errors import BadRecordError, PolicyError, SetupError
from tokenfleet.core.policy import Policy
from tokenfleet.core.revisions import PolicyRecord

S = TypeVar("S", bound=Common)
Body = Callable[[], Coroutine[Any, Any, None]]
SESSION_S = 10.0

log = logging.getLogger(__name__)


class HostedApp(faust.App):
    """A faust app that runs `body` from its start to its stop. It needs at least one agent (`listen`)."""

    def __init__(self, name: str, *, kafka: str, state_dir: str, body: Body) -> None:
        """Raises SetupError when nothing can be written in `state_dir`."""
        datadir = Path(state_dir) / f"faust-{name}"
        try:
            datadir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(
                f"state folder {datadir}: {error.strerror}; set TOKENFLEET_STATE_DIR to another"
            ) from error
        self.kafka = kafka
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
        self.failure: Exception | None = None  # why the app ends unasked

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
            self._end(EndedUnaskedError("the hosted loop was cancelled by nobody of ours"))
        except Exception as error:
            self._end(error)
        else:
            self._end(EndedUnaskedError("the hosted loop ended"))

    def _end(self, error: Exception) -> None:
        """Stop as if told to: a crash of faust's own leaves half of its services standing, and pages of tracebacks."""
        self.failure = error
        signal.raise_signal(signal.SIGTERM)


class Processor(Protocol):
    """What such a process is: a loop, and what it makes of a newer policy."""

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    def revise(self, heard: PolicyRecord) -> None:
        """Go by this policy from now on, if it is newer than ours and can be used."""
        ...


def run_processor(name: str, kind: type[S], make: Callable[[S, Policy], Processor]) -> NoReturn:
    """Reads settings and policy of the process `name`, and runs what `make` makes of them in an app until it ends."""
    try:
        settings = load_settings(name, kind)
        processor = make(settings, load_policy(settings.policy)[0])
        app = HostedApp(name, kafka=settings.kafka, state_dir=settings.state_dir, body=processor.run)
    except (SetupError, PolicyError) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_SETUP)
    set_up_logging(settings.log_level)
    app.listen(POLICY, partial(_take_policy, processor))
    run(app)


def _take_policy(processor: Processor, value: bytes) -> None:
    """A bad record is in the log here, and in the dead letters of those who follow."""
    try:
        processor.revise(decode(POLICY, value))
    except BadRecordError as error:
        log.error("a record on %s can't be read: %s", POLICY.at(), error)


def run(app: HostedApp) -> NoReturn:
    """Run until SIGTERM or SIGINT (exit code 0), or until something ends unasked (1, or 2 for a setup error)."""
    for chatty in ("faust", "mode", __name__):  # each start and stop of their dozen services is a line
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        _await_broker(app.kafka)
    except SetupError as error:
        raise SystemExit(exit_code_of(error)) from error
    worker = faust.Worker(app, quiet=True, override_logging=False, redirect_stdouts=False)
    try:
        worker.execute_from_commandline()
    except SystemExit as end:
        if app.failure is None:
            raise
        raise SystemExit(exit_code_of(app.failure)) from end


def _await_broker(kafka: str) -> None:
    """Raises SetupError when no broker answers; faust itself has pages of traceback for it.

    In a loop of its own: `asyncio.run` would leave faust without one.
    """

    async def reach() -> None:
        async with KafkaLink(kafka, client_id="start"):
            pass

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(reach())
    finally:
        loop.close()
