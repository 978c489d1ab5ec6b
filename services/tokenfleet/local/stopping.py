"""Stopping: what asks a fleet to end: a signal, a second one, or the loss of its state folder."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Generator
from pathlib import Path

from tokenfleet.local.child import kill_group
from tokenfleet.local.children import Supervisor

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOOK_AGAIN_S = 1.0


class Stopping:
    """`asked` is set by the first signal; the second kills all children and cancels the task that waits for them."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.asked = asyncio.Event()
        self.killed = False
        self.lost = False  # the state folder is no longer ours
        self.why = ""
        self._supervisor = supervisor
        self._task = asyncio.current_task()

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Take the signals over; the last ones ask as well, for as long as the fleet runs."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def ask(self, why: str) -> None:
        self.why = self.why or why
        self.asked.set()

    async def watch(self, lock_path: Path) -> None:
        """Ask when the lock file is no longer the one that was locked: the folder was deleted or replaced."""
        ours = _identity(lock_path)
        while _identity(lock_path) == ours:
            await asyncio.sleep(LOOK_AGAIN_S)
        self.lost = True
        self.ask(f"{lock_path.parent} is no longer this fleet's: it was deleted or replaced; stopping")

    def _signalled(self, number: signal.Signals) -> None:
        if self.asked.is_set():
            self._kill()
        self.ask(f"{signal.Signals(number).name}: stopping; once more kills at once")

    def _kill(self) -> None:
        self.killed = True
        for child in self._supervisor.children.values():
            child.asked_to_stop.set()
            if child.pid is not None:
                kill_group(child.pid)
        if self._task is not None:
            self._task.cancel()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino
