"""Children: how `up` starts, watches, restarts and ends its processes, so that none outlives it.

Four things together leave nothing behind, each for a death the others miss:

- an ordered stop: a signal, a budget, then SIGKILL to the whole process group;
- PDEATHSIG: the kernel kills a child whose parent died without a word (kill -9 of `up`);
- the record of pids (local/orphans.py): the next start ends what still runs;
- a lock on the state folder: two fleets never share one.
"""

import asyncio
import ctypes
import enum
import fcntl
import logging
import os
import signal
import threading
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec

from tokenfleet.local.orphans import Birth, birth_of, end_orphans, record

RESTART_DELAYS_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # at once, then slower; the last one repeats
LIVED_LONG_S = 30.0  # a child that ran so long starts again at the first delay
KILL_WAIT_S = 5.0  # SIGKILL takes effect as soon as the kernel gets to it; longer means a stuck disk
LOG_BYTES_MAX = 16 * 2**20  # a longer log is set aside as NAME.log.1 at the child's next start
COULD_NOT_START = 127  # the shell's word for it
PR_SET_PDEATHSIG = 1  # linux/prctl.h

LOG = logging.getLogger(__name__)
LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec


class StateInUseError(Exception):
    """Another fleet runs on this state folder."""


class Restart(enum.Enum):
    """Which ends of a child are followed by a new start."""

    ALWAYS = "always"
    ON_FAILURE = "on_failure"  # not after exit code 0: PostgreSQL ends so when its folder is gone
    NEVER = "never"


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What one child runs, and how it ends."""

    name: str  # unique in a fleet; names the log file too
    command: Callable[[], Sequence[str]]  # asked at every start: an embedded broker needs a fresh cluster id
    environment: Mapping[str, str] | None = None  # all of it; None: that of this process
    before_exec: Callable[[], None] | None = None  # runs in the child, for example to give up root
    restart: Restart = Restart.ALWAYS
    stop_signal: signal.Signals = signal.SIGTERM
    stop_budget_s: float = 5.0  # then SIGKILL; a faust app needs 3 to 4.5 s
    stop_wave: int = 0  # waves end one after the other, the lowest first; a wave ends together


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """A child ended unasked."""

    name: str
    code: int  # exit status; negative: the signal that ended it
    ran_s: float
    restart_in_s: float | None  # None: it stays down


class Child:
    """One supervised process: its latest incarnation and what is known of the earlier ones."""

    def __init__(self, program: Program, *, log_path: Path) -> None:
        self.program = program
        self.log_path = log_path
        self.restarts = 0  # starts after the first
        self.last_exit: Exit | None = None  # unasked ends only
        self.birth: Birth | None = None  # None: not running
        self.asked_to_stop = asyncio.Event()
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """The running process, or None between an end and the next start."""
        return self.birth.pid if self.birth else None

    async def start(self) -> None:
        """Raises OSError when the program cannot be run."""
        self._process = None
        with open_log(self.log_path) as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.program.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.program.environment,
                preexec_fn=tied_to_this_process(self.program.before_exec),
            )
        self.birth = birth_of(self._process.pid, name=self.program.name)

    async def ended(self) -> int:
        """Wait until the process ends, by itself or because it was asked to; its exit status."""
        process = self._process
        if process is None:
            return COULD_NOT_START
        if not await happens(self.asked_to_stop, process):
            send(process, self.program.stop_signal)
            if not await ends_within(process, self.program.stop_budget_s):
                kill_group(process.pid)
                await ends_within(process, KILL_WAIT_S)
        kill_group(process.pid)  # what the child itself had started goes with it
        self.birth = None
        return process.returncode if process.returncode is not None else -signal.SIGKILL


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
                delay_s = restart_delay_s(child.program.restart, code=code, quick_ends=quick_ends)
                quick_ends += 1
                child.last_exit = Exit(name=child.program.name, code=code, ran_s=ran_s, restart_in_s=delay_s)
                self._tell(child.last_exit)
                if delay_s is None or await is_set_within(child.asked_to_stop, delay_s):
                    return
                child.restarts += 1
                try:
                    await child.start()
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
        record(self._pids_path, [child.birth for child in self._children.values() if child.birth])


def restart_delay_s(restart: Restart, *, code: int, quick_ends: int) -> float | None:
    """Seconds until a child is started again after it ended with `code`; None: not at all.

    quick_ends: how many ends came before this one without a long life between them.
    """
    if restart is Restart.NEVER or (restart is Restart.ON_FAILURE and code == 0):
        return None
    return RESTART_DELAYS_S[min(quick_ends, len(RESTART_DELAYS_S) - 1)]


def tied_to_this_process(before_exec: Callable[[], None] | None) -> Callable[[], None]:
    """What a child does between fork and exec: its own process group, its own rights, death with its parent.

    Its own group, or Ctrl-C reaches the broker before the processes that still write to it. PDEATHSIG comes after
    `before_exec`: a change of user clears it (prctl(2)).
    """
    parent = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        if before_exec is not None:
            before_exec()
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return prepare


def lock(path: Path) -> IO[bytes]:
    """An open file that keeps others out until it is closed; the kernel closes it when this process dies."""
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StateInUseError(f"another fleet runs on {path.parent}") from None
    return file


def open_log(path: Path) -> IO[bytes]:
    """The child's log, appended to; an overlong one is set aside first."""
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_name(f"{path.name}.1"))
    return path.open("ab")


async def happens(asked: asyncio.Event, process: Process) -> bool:
    """Wait for the process's end or for the event; True if the process ended."""
    end, ask = asyncio.ensure_future(process.wait()), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait({end, ask}, return_when=asyncio.FIRST_COMPLETED)
        return end.done()
    finally:
        end.cancel()
        ask.cancel()


async def ends_within(process: Process, budget_s: float) -> bool:
    """Whether the process ended in time."""
    try:
        async with asyncio.timeout(budget_s):
            await process.wait()
    except TimeoutError:
        return False
    return True


async def is_set_within(event: asyncio.Event, delay_s: float) -> bool:
    """Wait at most so long for the event."""
    try:
        async with asyncio.timeout(delay_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def send(process: Process, number: signal.Signals) -> None:
    """Signal a process that may have ended a moment ago."""
    try:
        process.send_signal(number)
    except ProcessLookupError:
        return


def kill_group(pid: int) -> None:
    """End a child's whole group; it may be empty already."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
