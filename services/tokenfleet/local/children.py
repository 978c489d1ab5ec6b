"""Children: how `up` starts, watches, restarts and ends its processes, so that none outlives it.

Four things together leave nothing behind, each for a death the others miss:

- an ordered stop: a signal, a budget, then SIGKILL to the whole process group;
- PDEATHSIG: the kernel kills a child whose parent died without a word (kill -9 of `up`);
- the record of pids (local/orphans.py): the next start ends what still runs;
- a lock on the state folder: two fleets never share one.
"""

import asyncio
import contextlib
import fcntl
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tokenfleet.local.child import Child, Exit, Program, Restart
from tokenfleet.local.orphans import end_orphans, record

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # at once, then slower; the last one repeats
LIVED_LONG_S = 30.0  # a child that ran so long starts again at the first delay

LOG = logging.getLogger(__name__)


class StateInUseError(Exception):
    """Another fleet runs on this state folder."""


class Supervisor:
    """All children of one fleet, with their state under one folder; use as `async with`.

    `on_exit` hears of every end that nobody asked for, in the loop's thread. Children are started from the main
    thread only: the kernel ties PDEATHSIG to the thread that forked.

    Raises StateInUseError on entry if another supervisor holds the folder.
    """

    def __init__(self, state_dir: Path, *, on_exit: Callable[[Exit], None] = lambda _: None) -> None:
        self._state_dir = state_dir
        self._on_exit = on_exit
        self._children: dict[str, Child] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._lock: IO[bytes] | None = None

    @property
    def children(self) -> Mapping[str, Child]:
        """By name, in the order of their start."""
        return self._children

    async def __aenter__(self) -> Self:
        (self._state_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._lock = lock(self._state_dir / "lock")
        await asyncio.to_thread(end_orphans, self._pids_path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_all()
        if self._lock is not None:
            self._lock.close()

    async def start(self, program: Program) -> Child:
        """Start a child and keep it running as its program says.

        Raises OSError when the first start fails; ValueError when a child of that name runs.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("children start from the main thread, or they die with the thread that forked them")
        if program.name in self._keepers:
            raise ValueError(f"{program.name} is already supervised")
        child = Child(program, log_path=self._state_dir / "logs" / f"{program.name}.log")
        await child.start()
        self._children[program.name] = child
        self._record()
        self._keepers[program.name] = asyncio.create_task(self._keep(child), name=f"keep {program.name}")
        return child

    async def stop(self, *names: str) -> None:
        """End these children together; one that is down or unknown is left as it is."""
        keepers = [self._keepers[name] for name in names if name in self._keepers]
        for name in names:
            if name in self._children:
                self._children[name].asked_to_stop.set()
        await asyncio.gather(*keepers)

    async def stop_all(self) -> None:
        """End every child, wave after wave."""
        for wave in sorted({child.program.stop_wave for child in self._children.values()}):
            await self.stop(*(name for name, child in self._children.items() if child.program.stop_wave == wave))

    async def _keep(self, child: Child) -> None:
        """Follow one child from end to start to end, until it is to stay down."""
        loop = asyncio.get_running_loop()
        quick_ends = 0
        try:
            while True:
                started_s = loop.time()
                code = await child.ended()
                self._record()
                if child.asked_to_stop.is_set():
                    return
                ran_s = loop.time() - started_s
                quick_ends = 0 if ran_s >= LIVED_LONG_S else quick_ends
                delay_s = restart_delay_s(child.program, code=code, quick_ends=quick_ends)
                quick_ends += 1
                child.last_exit = Exit(name=child.program.name, code=code, ran_s=ran_s, restart_in_s=delay_s)
                self._tell(child.last_exit)
                if delay_s is None or await is_set_within(child.asked_to_stop, delay_s):
                    return
                try:
                    await child.start()
                    child.restarts += 1
                except OSError as error:  # for a while, perhaps: no memory, a full process table
                    LOG.error("%s could not be started again: %s", child.program.name, error)
                self._record()
        finally:
            del self._keepers[child.program.name]

    def _tell(self, end: Exit) -> None:
        """A listener that fails must not leave its child without a keeper."""
        try:
            self._on_exit(end)
        except Exception:
            LOG.exception("the listener failed on %s", end)

    @property
    def _pids_path(self) -> Path:
        return self._state_dir / "pids.json"

    def _record(self) -> None:
        with contextlib.suppress(
            FileNotFoundError
        ):  # the state folder was deleted; nobody will look for a record there
            record(self._pids_path, [child.birth for child in self._children.values() if child.birth])


def restart_delay_s(program: Program, *, code: int, quick_ends: int) -> float | None:
    """Seconds until a child is started again after it ended with `code`; None: not at all.

    quick_ends: how many ends came before this one without a long life between them.
    """
    if program.restart is Restart.NEVER or (program.restart is Restart.ON_FAILURE and code == 0):
        return None
    return max(program.restart_after_s, RESTART_DELAYS_S[min(quick_ends, len(RESTART_DELAYS_S) - 1)])


def lock(path: Path) -> IO[bytes]:
    """An open file that keeps others out until it is closed; the kernel closes it when this process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StateInUseError(f"another fleet runs on {path.parent}") from None
    return file


async def is_set_within(event: asyncio.Event, delay_s: float) -> bool:
    """Wait at most so long for the event."""
    try:
        async with asyncio.timeout(delay_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
