"""A TokenFleet process as a child of a test, to be stopped, killed and started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tokenfleet.local.child import tied_to_this_process

STOP_WAIT_MAX_S = 20.0


class Child:
    """`python -m module` with settings as TOKENFLEET_<KEY>; what it says goes to `log_path`."""

    def __init__(self, module: str, settings: Mapping[str, str], *, log_path: Path) -> None:
        self._command = (sys.executable, "-m", module)
        self._environment = {**os.environ, **{f"TOKENFLEET_{key}": value for key, value in settings.items()}}
        self._log_path = log_path
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the child runs"
        return self._process.pid

    def start(self) -> None:
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, preexec_fn=tied_to_this_process(None)
            )

    def kill(self) -> None:
        """SIGKILL; return when it is gone."""
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals) -> int:
        """The exit code after the signal; SIGKILL follows when it lingers."""
        if self._process is None:
            return 0
        if self.running:
            self._process.send_signal(number)
        try:
            return self._process.wait(STOP_WAIT_MAX_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def wait(self, wait_max_s: float) -> int:
        """The exit code of a child that ends by itself. Raises subprocess.TimeoutExpired."""
        if self._process is None:
            return 0
        return self._process.wait(wait_max_s)

    def said(self) -> str:
        return self._log_path.read_text(errors="replace")
