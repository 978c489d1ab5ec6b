"""Clock: the one place where this process reads time."""

import time


def monotonic_s() -> float:
    """Seconds of this process's monotonic clock: every `now_s` in the system; never sent to another host."""
    return time.monotonic()


def wall_s() -> float:
    """Seconds since the Unix epoch: labels records, is never compared."""
    return time.time()
