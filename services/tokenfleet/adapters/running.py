"""Running: how a process starts, is stopped, and ends when something in it ends unasked.

Exit codes: 0 after SIGTERM or SIGINT, 1 when a part failed, 2 when it could not be set up (one line says why).
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar, cast

from tokenfleet.adapters.settings import Common, load_settings
from tokenfleet.core.errors import PolicyError, SetupError

log = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_SETUP: Final = 2
S = TypeVar("S", bound=Common)


class EndedUnaskedError(Exception):
    """A task that should run for ever has ended."""


def run_process(
    process: str,
    kind: type[S],
    main: Callable[[S], Awaitable[None]],
    *,
    runner: Callable[[Coroutine[Any, Any, int]], int] = asyncio.run,
) -> None:
    """Reads the settings of `process`, runs `main` until a signal, and ends this process with its exit code."""
    try:
        settings = load_settings(process, kind)
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_SETUP)
    set_up_logging(settings.log_level)
    sys.exit(runner(until_signal(main(settings))))


def set_up_logging(level: str) -> None:
    """Log lines to standard error, one a fact."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what matters of it, adapters.kafka says


async def until_signal(work: Awaitable[None]) -> int:
    """Runs `work` until it ends or SIGTERM or SIGINT comes; the exit code. Setup errors are one line."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set():
        task.cancel()
        await asyncio.wait({task})
        return 0
    return _ended(task)


def watched(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
    """Runs `work` in `tasks`; if it ends, or is cancelled by nobody of ours, the whole group fails.

    A task group ignores a task that ends as cancelled, and aiokafka can cancel its caller.
    """
    return tasks.create_task(_for_ever(work, name), name=name)


async def _for_ever(work: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EndedUnaskedError(f"{name} was cancelled by nobody of ours") from None
    raise EndedUnaskedError(f"{name} ended")


def _ended(task: asyncio.Future[None]) -> int:
    if task.cancelled():
        log.error("the process was cancelled by nobody of ours")
        return EXIT_FAILED
    error = task.exception()
    if error is None:
        log.error("the process ended unasked")
        return EXIT_FAILED
    return exit_code_of(error)


def exit_code_of(error: BaseException) -> int:
    """Says why this process ends, in one line if it could not be set up; the exit code."""
    for cause in leaves(error):
        if isinstance(cause, SetupError | PolicyError):
            print(cause, file=sys.stderr)
            return EXIT_SETUP
    log.error("a part failed; this process (%s) ends", os.getpid(), exc_info=error)
    return EXIT_FAILED


def leaves(error: BaseException) -> list[BaseException]:
    """The errors that a group of groups holds, in order; one that is no group stands alone."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    parts = cast(BaseExceptionGroup[BaseException], error).exceptions
    return [leaf for part in parts for leaf in leaves(part)]
