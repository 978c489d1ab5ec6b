"""Orphans: which processes an earlier run left behind, and how they are ended without hitting a stranger.

A pid alone is no name: the kernel gives it to another process later. A pid with its start time, on one boot of one
machine, is.
"""

import os
import signal
import time
from pathlib import Path

import msgspec

GONE_WAIT_S = 5.0
LOOK_AGAIN_S = 0.02
BOOT_ID_PATH = Path("/proc/sys/kernel/random/boot_id")


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """One process, told apart from any later one with the same pid."""

    name: str
    pid: int
    started_ticks: int  # kernel clock ticks after boot: field 22 of /proc/PID/stat, proc(5)
    boot_id: str


def birth_of(pid: int, *, name: str) -> Birth | None:
    """The process as it is now; None if it has ended."""
    started_ticks = start_time_ticks(pid)
    if started_ticks is None:
        return None
    return Birth(name=name, pid=pid, started_ticks=started_ticks, boot_id=BOOT_ID_PATH.read_text().strip())


def record(path: Path, births: list[Birth]) -> None:
    """Write what runs now, whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(births)))
    new.replace(path)


def end_orphans(path: Path) -> list[str]:
    """Kill what the record names and still runs, with its group; their names. Blocks until they are gone."""
    found = [birth for birth in recorded(path) if runs(birth)]
    for birth in found:
        kill(birth)
    for _ in range(int(GONE_WAIT_S / LOOK_AGAIN_S)):
        if not any(runs(birth) for birth in found):
            break
        time.sleep(LOOK_AGAIN_S)
    path.unlink(missing_ok=True)
    return [birth.name for birth in found]


def recorded(path: Path) -> list[Birth]:
    """What the record says; nothing when there is none or when it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Birth])
    except (FileNotFoundError, msgspec.DecodeError):
        return []


def runs(birth: Birth) -> bool:
    """Whether that very process is alive; a zombie is not."""
    return birth_of(birth.pid, name=birth.name) == birth


def kill(birth: Birth) -> None:
    """End the process and its group, which it leads if it was started as a child of ours."""
    try:
        if os.getpgid(birth.pid) == birth.pid:
            os.killpg(birth.pid, signal.SIGKILL)
        else:
            os.kill(birth.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def start_time_ticks(pid: int) -> int | None:
    """Kernel start time of a live process; None if there is none or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name in front may hold spaces and brackets
    return None if state in "ZX" else int(fields[18])
