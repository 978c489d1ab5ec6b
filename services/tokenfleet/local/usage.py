"""Usage: memory and processor time of a fleet's processes, with all that they started themselves, from /proc."""

import os
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Usage(Struct, frozen=True, kw_only=True):
    """Of one process and its descendants: memory, of which a page that n processes share counts 1/n to each (PSS; RSS
    where the kernel does not tell it); memory with shared pages counted in full; processor time so far.
    """

    rss_bytes: int
    rss_sum_bytes: int
    cpu_s: float


def usage_of(pids: Mapping[str, int]) -> dict[str, Usage]:
    """By name, for the processes that run; a descendant counts for the nearest named ancestor."""
    stats = {pid: stat for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if (stat := _stat(pid))}
    names = {pid: name for name, pid in pids.items()}
    sums: dict[str, tuple[int, int, float]] = dict.fromkeys(pids, (0, 0, 0.0))
    for pid, (_, rss_bytes, cpu_s) in stats.items():
        if (owner := _owner(pid, names, stats)) is not None:
            pss, rss, cpu = sums[owner]
            sums[owner] = (pss + _pss_bytes(pid, otherwise=rss_bytes), rss + rss_bytes, cpu + cpu_s)
    return {name: Usage(rss_bytes=pss, rss_sum_bytes=rss, cpu_s=cpu) for name, (pss, rss, cpu) in sums.items() if rss}


def _owner(pid: int, names: Mapping[int, str], stats: Mapping[int, tuple[int, int, float]]) -> str | None:
    while pid in stats:
        if pid in names:
            return names[pid]
        pid = stats[pid][0]
    return None


def _stat(pid: int) -> tuple[int, int, float] | None:
    """Parent, resident bytes, processor seconds; None for a process that is gone. proc(5), /proc/PID/stat."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), int(fields[21]) * PAGE_BYTES, (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _pss_bytes(pid: int, *, otherwise: int) -> int:
    """proc(5), /proc/PID/smaps_rollup: since Linux 4.14, and only of processes that one may trace."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return otherwise
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), otherwise)
