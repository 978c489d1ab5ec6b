"""Builders for routers: a setup, a request of named blocks, and how requests went, in one line each."""

from random import Random
from struct import pack

import msgspec

from tests import builders
from tokenfleet.core.decision import Request
from tokenfleet.core.records import CapacityShard, KvDelta, OutcomeEvent, OutcomeKind
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.router import Setup

BLOCK = 512


def setup(*instances: str, seed: int = 1, gateway: str = "g") -> Setup:
    return Setup(
        gateway=gateway,
        instances=instances,
        profile=profiles()["L70"],
        rng=Random(seed),
        publish=lambda event: None,
    )


def keys(*ids: int) -> bytes:
    return pack(f"<{len(ids)}Q", *ids)


def asks(name: str, *ids: int, tokens: int = 0) -> Request:
    """A request of whole blocks `ids`, or of `tokens` tokens of which the first are those."""
    return Request(
        id=name,
        model=builders.MODEL,
        tenant="t",
        origin=builders.SITE,
        prompt_tokens=tokens or BLOCK * len(ids),
        block_keys=keys(*ids),
        block_tokens=BLOCK,
    )


def event(name: str, kind: OutcomeKind = "finished") -> OutcomeEvent:
    return OutcomeEvent(
        request=name,
        attempt=0,
        kind=kind,
        decision="",
        tenant="t",
        request_class="chat",
        model=builders.MODEL,
        origin=builders.SITE,
        at_wall_s=0.0,
        elapsed_s=1.0,
    )


def scrape(n: int = 1, *, waiting: dict[str, float], running: float = 0.0, kv_used: float = 0.0) -> CapacityShard:
    """The `n`-th capacity message: so many requests wait at each instance."""
    beats = [
        builders.beat(name, waiting=value, running=running, kv_used_blocks=kv_used) for name, value in waiting.items()
    ]
    return CapacityShard(
        site=builders.SITE,
        shard=0,
        cluster=builders.CLUSTER,
        epoch=0,
        n=n,
        period_s=0.25,
        telemetry_age_s=0.0,
        rows=tuple(builders.row(beat) for beat in beats),
    )


def stored(instance: str, *ids: int, n: int = 1, removed: tuple[int, ...] = ()) -> KvDelta:
    return KvDelta(
        instance=instance,
        boot="boot-1",
        order=builders.order(n),
        model=builders.MODEL,
        block_tokens=BLOCK,
        stored=keys(*ids),
        removed=keys(*removed),
    )


def with_kv(shard: CapacityShard, **used: float) -> CapacityShard:
    """The same message with other KV blocks in use, of 10,000."""
    rows = [
        msgspec.structs.replace(
            row, beat=msgspec.structs.replace(row.beat, kv_used_blocks=used.get(row.beat.instance, 0.0))
        )
        for row in shard.rows
    ]
    return msgspec.structs.replace(shard, rows=tuple(rows))
