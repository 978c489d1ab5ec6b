"""A server under test: a process that a test freezes, kills and starts again, and that never outlives pytest."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenfleet.local.child import kill_group, tied_to_this_process

STOP_BUDGET_S = 20.0


class ServerProcess:
    """One server and its group of processes; the kernel kills it when pytest dies."""

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        *,
        log_path: Path,
        before_exec: Callable[[], None] | None = None,
        stop_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.log_path = log_path
        self._command = command
        self._before_exec = before_exec
        self._stop_signal = stop_signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server runs"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Return at once; whether it answers is asked elsewhere."""
        assert not self.running, "one process at a time"
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=tied_to_this_process(self._before_exec),
            )

    def stop(self) -> None:
        """End it the polite way, and the other way after the budget. Nothing is left."""
        if self._process is None:
            return
        if self.running:
            self.thaw()  # a frozen process hears no signal
            self._process.send_signal(self._stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_BUDGET_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group; return when it is gone."""
        if self._process is None:
            return
        kill_group(self._process.pid)
        self._process.wait()
        self._process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        os.killpg(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def said(self) -> str:
        """The end of its log, for the message of a failure."""
        return self.log_path.read_text(errors="replace")[-3000:]
