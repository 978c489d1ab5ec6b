"""A child: one process that `up` starts, how it is tied to its parent, and how it ends."""

import asyncio
import ctypes
import enum
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec

from tokenfleet.local.orphans import Birth, birth_of

KILL_WAIT_S = 5.0  # SIGKILL takes effect as soon as the kernel gets to it; longer means a stuck disk
LOG_BYTES_MAX = 16 * 2**20  # a longer log is set aside as NAME.log.1 at the child's next start
COULD_NOT_START = 127  # the shell's word for it
PR_SET_PDEATHSIG = 1  # linux/prctl.h

# While calls are under way gRPC's fork handlers abort a child before its exec now and then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # noqa: TID251  gRPC reads it

LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be imported between fork and exec


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
    restart_after_s: float = 0.0  # at least so long it stays down
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
        """Wait until the process ends, by itself or because it was asked to; its exit status.

        Cancelled, it kills it.
        """
        process = self._process
        if process is None:
            return COULD_NOT_START
        try:
            if not await happens(self.asked_to_stop, process):
                send(process, self.program.stop_signal)
                if not await ends_within(process, self.program.stop_budget_s):
                    kill_group(process.pid)
                    await ends_within(process, KILL_WAIT_S)
        finally:
            kill_group(process.pid)  # what the child itself had started goes with it
            self.birth = None
            if process.returncode is None:  # cancelled: nobody waits for it after this
                await ends_within(process, KILL_WAIT_S)
            # asyncio closes it some turns of the loop later, which a loop that ends now never takes.
            process._transport.close()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownMemberType]
        return process.returncode if process.returncode is not None else -signal.SIGKILL


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
