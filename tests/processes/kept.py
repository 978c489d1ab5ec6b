"""Kept: a process that is started again whenever it ends, by a keeper that was forked before gRPC had threads here.

A fork beside gRPC's threads crashes its child now and then. Run as a program, this file is the keeper.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tokenfleet.local.child import tied_to_this_process

AGAIN_AFTER_S = 0.5


class Kept:
    """`python -m module` with settings as TOKENFLEET_<KEY>, again and again; what it says goes to NAME.log."""

    def __init__(self, module: str, settings: Mapping[str, str], *, folder: Path, name: str) -> None:
        self._pids, self._log = folder / f"{name}.pids", folder / f"{name}.log"
        self._command = (sys.executable, __file__, str(self._pids), sys.executable, "-m", module)
        self._environment = {**os.environ, **{f"TOKENFLEET_{key}": value for key, value in settings.items()}}

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._keeper = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, preexec_fn=tied_to_this_process(None)
            )

    @property
    def lives(self) -> list[int]:
        """The process ids of all its lives, the present one last."""
        return [int(line) for line in self._pids.read_text().split()]

    def kill(self) -> None:
        """SIGKILL for the present life."""
        os.kill(self.lives[-1], signal.SIGKILL)

    def end(self) -> None:
        """No life more: it dies with its keeper."""
        self._keeper.kill()
        self._keeper.wait()


def keep(pids: Path, command: list[str]) -> None:
    while True:
        process = subprocess.Popen(command, preexec_fn=tied_to_this_process(None))
        with pids.open("a") as file:
            file.write(f"{process.pid}\n")
        process.wait()
        time.sleep(AGAIN_AFTER_S)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
