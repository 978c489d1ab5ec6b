"""Builders: facts in one line, with defaults that a test need not name.

decision = decide([beat("a", waiting=3), beat("b")])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenfleet.core.records import (
    CapacityRow,
    CapacityShard,
    Entry,
    Heartbeat,
    KvDelta,
    KvDigest,
    KvSnapshot,
    Order,
    PlacementEnvelope,
    PlacementEvent,
    TelemetryEnvelope,
)

CLUSTER = "kafka-1"
SITE = "b"
MODEL = "small-chat"


def order(n: int = 1, *, claim: int = 0, cluster: str = CLUSTER) -> Order:
    return Order(cluster=cluster, claim=claim, n=n)


def beat(instance: str = "a", **facts: Any) -> Heartbeat:
    """A heartbeat of an idle instance of known size; `facts` are fields of Heartbeat."""
    known: dict[str, Any] = {
        "boot": "boot-1",
        "age_s": 0.0,
        "address": f"http://{instance}:8000",
        "model": MODEL,
        "running": 0.0,
        "waiting": 0.0,
        "kv_used_blocks": 0.0,
        "kv_total_blocks": 10_000,
        "block_size": 16,
    }
    return Heartbeat(instance=instance, **(known | facts))


def envelope(
    *beats: Heartbeat, agent: str = "agent-1", n: int = 1, claim: int = 0, cluster: str = CLUSTER, site: str = SITE
) -> TelemetryEnvelope:
    return TelemetryEnvelope(
        agent=agent, site=site, order=order(n, claim=claim, cluster=cluster), period_s=1.0, beats=beats
    )


def row(of: Heartbeat, *, agent: str = "agent-1", n: int = 1, age_s: float | None = 0.1, **facts: Any) -> CapacityRow:
    known: dict[str, Any] = {"order": order(n), "agent_silent_s": 0.0}
    return CapacityRow(beat=of, agent=agent, age_s=age_s, **(known | facts))


def shard(*rows: Heartbeat | CapacityRow, n: int = 1, epoch: int = 0, shard: int = 0, **facts: Any) -> CapacityShard:
    """A capacity shard; a bare heartbeat stands for a row heard 0.1 s ago."""
    known: dict[str, Any] = {"site": SITE, "cluster": CLUSTER, "period_s": 0.1, "telemetry_age_s": 0.1}
    full = tuple(each if isinstance(each, CapacityRow) else row(each, n=n) for each in rows)
    return CapacityShard(shard=shard, epoch=epoch, n=n, rows=full, **(known | facts))


def keys(*values: int) -> bytes:
    """Block keys as they travel."""
    return np.array(values, dtype="<u8").tobytes()


def stored(
    instance: str = "a",
    values: Sequence[int] = (),
    *,
    n: int = 1,
    claim: int = 0,
    cluster: str = CLUSTER,
    **facts: Any,
) -> KvDelta:
    """A delta that stores `values`; `removed=keys(...)`, `cleared=True` and the other fields go in `facts`."""
    known: dict[str, Any] = {"boot": "boot-1", "model": MODEL, "block_tokens": 256}
    of = order(n, claim=claim, cluster=cluster)
    return KvDelta(instance=instance, order=of, stored=keys(*values), **(known | facts))


def snapshot(
    instance: str = "a", values: Sequence[int] = (), *, n: int = 1, claim: int = 0, part: int = 0, **facts: Any
) -> KvSnapshot:
    known: dict[str, Any] = {"boot": "boot-1", "model": MODEL, "block_tokens": 256, "parts": 1}
    return KvSnapshot(instance=instance, order=order(n, claim=claim), part=part, keys=keys(*values), **(known | facts))


def digest(values: Sequence[int] = (), **facts: Any) -> KvDigest:
    """What an agent that holds exactly `values` would say."""
    xor = int(np.bitwise_xor.reduce(np.array(values, dtype="<u8"))) if values else 0
    known: dict[str, Any] = {"state": "exact", "block_tokens": 256}
    return KvDigest(blocks=len(values), xor=xor, **(known | facts))


def entry(decision: str = "d1", instance: str = "a", **facts: Any) -> Entry:
    known: dict[str, Any] = {
        "request": f"request-{decision}",
        "attempt": 0,
        "model": MODEL,
        "request_class": "chat",
        "work_s": 0.1,
        "uncached_tokens": 1000,
        "kv_tokens": 1200,
        "replica": "decide-1",
    }
    return Entry(decision=decision, instance=instance, **(known | facts))


def placed(decision: str = "d1", instance: str = "a", **facts: Any) -> PlacementEvent:
    return _event("placed", entry(decision, instance, **facts))


def first_token(decision: str = "d1", instance: str = "a", **facts: Any) -> PlacementEvent:
    return _event("first_token", entry(decision, instance, **facts))


def progress(decision: str = "d1", instance: str = "a", **facts: Any) -> PlacementEvent:
    return _event("progress", entry(decision, instance, **facts))


def ended(decision: str = "d1", instance: str = "a", **facts: Any) -> PlacementEvent:
    gone = entry(decision, instance, **facts)
    return PlacementEvent(
        kind="ended", decision=decision, request=gone.request, attempt=gone.attempt, instance=instance
    )


def placements(*events: PlacementEvent, n: int = 1, replica: str = "decide-1") -> PlacementEnvelope:
    return PlacementEnvelope(site=SITE, replica=replica, start="1", n=n, events=events)


def _event(kind: Any, of: Entry) -> PlacementEvent:
    return PlacementEvent(
        kind=kind, decision=of.decision, request=of.request, attempt=of.attempt, instance=of.instance, entry=of
    )
