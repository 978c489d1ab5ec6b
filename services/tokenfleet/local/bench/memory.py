"""Bench memory: how much a process grows by a prefix index of a million (block, instance) pairs. Prints JSON."""

import gc
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Final

from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.local.bench.site import stored

PAIRS: Final = 1_000_000
KEYS_A_RECORD: Final = 1_000


def grown_mb(replication: int) -> float:
    """MB a million pairs, each block held by `replication` instances."""
    rng = Random(replication)
    index = PrefixIndex()
    numbers = [0] * 64
    gc.collect()
    before = _resident_bytes()
    pairs = 0
    while pairs < PAIRS:
        keys = rng.randbytes(8 * KEYS_A_RECORD)
        for instance in rng.sample(range(64), replication):
            numbers[instance] += 1
            index.apply(stored(f"i-{instance}", keys, n=numbers[instance]))
            pairs += KEYS_A_RECORD
    gc.collect()
    return (_resident_bytes() - before) / 1e6 * PAIRS / pairs


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    print(json.dumps({"mb": grown_mb(int(sys.argv[1]))}))
