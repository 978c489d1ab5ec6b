"""A running fleet: who its processes are, where they answer, and which say that they are not well."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenfleet.local.http_get import NoAnswerError, get
from tokenfleet.local.orphans import recorded, runs

LISTENING = "decisions are served"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A running `up`: who its processes are and where they answer."""

    up: "subprocess.Popen[str]"
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def said(self) -> str:
        return (self.folder / "err").read_text()

    def pid(self, name: str) -> int | None:
        """The process of this name that runs now."""
        found = [birth.pid for birth in recorded(self.state / "pids.json") if birth.name == name and runs(birth)]
        return found[0] if found else None

    def signal(self, name: str, number: signal.Signals) -> int:
        pid = self.pid(name)
        assert pid is not None, f"{name} does not run"
        os.kill(pid, number)
        return pid

    def endpoints(self) -> dict[str, Any]:
        return json.loads((self.state / "endpoints.json").read_text())

    def gateways(self, site: str) -> list[str]:
        return self.endpoints()["gateways"][site]

    async def unwell(self) -> list[str]:
        """Processes whose /health is not good, with its words."""
        found: list[str] = []
        for name, address in self.endpoints()["status"].items():
            host, _, port = address.rpartition(":")
            try:
                status, body = await get(host, int(port), "/health")
            except NoAnswerError:
                found.append(f"{name}: no answer")
                continue
            if status != 200:
                found.append(f"{name}: {body[:300]}")
        return found


@contextlib.contextmanager
def fleet(folder: Path, command: list[str]) -> Generator[Fleet]:
    """`up` by this command in a process of its own; its object goes to folder/out, its words to folder/err."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "err").open("w") as err, (folder / "out").open("w") as out:
        up = subprocess.Popen(command, stdout=out, stderr=err, text=True)
    try:
        yield Fleet(up=up, folder=folder)
    finally:
        if up.poll() is None:
            up.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                up.wait(90.0)
        if up.poll() is None:
            up.kill()
            up.wait()


async def until(true: Callable[[], bool], what: str, *, wait_max_s: float) -> None:
    """Fails with `what` when it takes too long."""
    ends_s = time.monotonic() + wait_max_s
    while not true():
        assert time.monotonic() < ends_s, what
        await asyncio.sleep(0.1)
