"""Bench kernel: CPU time of one choice, of KV events, and memory of the prefix index; no server, no network."""

import json
import subprocess
import sys
from random import Random
from statistics import median
from time import process_time_ns
from typing import Final

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.core.asked import ROUTE, Ids, chance_of
from tokenfleet.core.compiled import COMPILED_FROM, load
from tokenfleet.core.records import KvDelta
from tokenfleet.core.schedule import decide
from tokenfleet.core.site import Heard
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.local.bench.site import BenchSite, stored

NS_PER_US: Final = 1e3
KEYS_A_RECORD: Final = 128


def choice_us(instances: int, *, rounds: int) -> dict[str, float]:
    """Median µs of CPU of one request among `instances`: `choose` alone; `whole` with the prefix walk and the snapshot
    of the pool before it; `route`, the whole decision, in turn with them. Each is placed, so the next finds a changed
    table.
    """
    if instances >= COMPILED_FROM:
        load()
    bench = BenchSite(instances, now_s=monotonic_s())
    site, policy = bench.site, bench.site.policy
    alone: list[int] = []
    whole: list[int] = []
    route: list[int] = []
    for n in range(2 * rounds):
        request = bench.request(n)
        now_s = monotonic_s()
        if n % 100 == 0:
            bench.hears_telemetry(now_s)
        if n % 2:
            began = process_time_ns()
            pool = site.pool(request.model, now_s, request)
            looked_up = process_time_ns()
            choose(
                request,
                pool,
                policy,
                request_class="chat",
                output_q50=200.0,
                output_q90=256.0,
                rng=chance_of(request.id, request.attempt, request.hop),
            )
            chosen = process_time_ns()
            alone.append(chosen - looked_up)
            whole.append(chosen - began)
        ids = Ids(decision=f"d-{n}", now_wall_s=wall_s())
        began = process_time_ns()
        decided = decide(site, request, ROUTE, ids, now_s=now_s)
        if n % 2 == 0:
            route.append(process_time_ns() - began)
        if decided.placement is not None:
            site.placed(decided.placement, partition=0, session="", now_s=now_s)
    return {
        "choose": median(alone) / NS_PER_US,
        "whole": median(whole) / NS_PER_US,
        "route": median(route) / NS_PER_US,
    }


def kv_events_per_s(*, rounds: int, instances: int = 64) -> dict[str, float]:
    """Blocks a second of CPU that one replica stores and removes, in records of KEYS_A_RECORD, each block on one
    instance; and stored at eight instances each."""
    rng = Random(1)
    stores: list[float] = []
    removes: list[float] = []
    shared: list[float] = []
    for _ in range(rounds):
        bench = BenchSite(instances, now_s=monotonic_s())
        keys = {name: rng.randbytes(8 * KEYS_A_RECORD) for name in bench.names}
        stores.append(_rate(bench, {name: stored(name, own, n=2) for name, own in keys.items()}))
        removes.append(_rate(bench, {name: stored(name, b"", removed=own, n=3) for name, own in keys.items()}))
        common = [rng.randbytes(8 * KEYS_A_RECORD) for _ in range(instances // 8)]
        shared.append(_rate(bench, {name: stored(name, common[i // 8], n=4) for i, name in enumerate(bench.names)}))
    return {"store": median(stores), "remove": median(removes), "store_shared": median(shared)}


def index_mb(replication: int) -> float:
    """MB of resident memory a million (block, instance) pairs, in a process of its own."""
    command = (sys.executable, "-m", "tokenfleet.local.bench.memory", str(replication))
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)["mb"]


def _rate(bench: BenchSite, records: dict[str, KvDelta]) -> float:
    """Blocks a second of CPU that the site takes in."""
    blocks = sum(len(each.stored) + len(each.removed) for each in records.values()) // 8
    how = Heard(now_s=monotonic_s())
    began = process_time_ns()
    for record in records.values():
        bench.site.heard(record, how)
    return blocks * 1e9 / max(process_time_ns() - began, 1)
