"""Telemetry: what an agent would tell of simulated engines: heartbeats, numbered KV changes, snapshots."""

from collections.abc import Iterable
from struct import pack

from msgspec.structs import replace

from tokenfleet.core.records import (
    CapacityRow,
    CapacityShard,
    EngineState,
    Heartbeat,
    KvDelta,
    KvDigest,
    KvSnapshot,
    Order,
)
from tokenfleet.sim.engine.events import BlocksRemoved, BlocksStored, Cleared, Event, Load

AGENT, BOOT, CLUSTER, MODEL, SITE, TENANT = "agent", "boot-1", "sim", "sim", "sim", "trace"


def packed(keys: Iterable[int]) -> bytes:
    """Block keys as they travel: little-endian u64."""
    listed = tuple(keys)
    return pack(f"<{len(listed)}Q", *listed)


class KvBook:
    """The blocks of one engine as its agent follows them: numbered changes and a digest that agrees with them."""

    def __init__(self, instance: str, block_tokens: int, *, model: str = MODEL) -> None:
        self.instance = instance
        self._model = model
        self._block_tokens = block_tokens
        self._keys: set[int] = set()
        self._xor = 0
        self._n = 0

    def delta(self, events: Iterable[Event]) -> KvDelta | None:
        """The net change that one step's events make; None if they change nothing."""
        cleared = False
        removed: dict[int, None] = {}
        stored: dict[int, None] = {}
        for event in events:
            match event:
                case BlocksStored():
                    self._store(event.hashes)
                    stored.update(dict.fromkeys(event.hashes))
                case BlocksRemoved():
                    self._remove(event.hashes)
                    for key in event.hashes:
                        if key in stored:
                            del stored[key]
                        else:
                            removed[key] = None
                case Cleared():
                    self._keys.clear()
                    self._xor, cleared = 0, True
                    removed.clear()
                    stored.clear()
                case _:
                    pass
        if not (cleared or removed or stored):
            return None
        self._n += 1
        return KvDelta(
            instance=self.instance,
            boot=BOOT,
            order=self._order(),
            model=self._model,
            block_tokens=self._block_tokens,
            cleared=cleared,
            removed=packed(removed),
            stored=packed(stored),
        )

    def snapshot(self) -> KvSnapshot:
        """All blocks as of the last change."""
        return KvSnapshot(
            instance=self.instance,
            boot=BOOT,
            order=self._order(),
            model=self._model,
            block_tokens=self._block_tokens,
            part=0,
            parts=1,
            keys=packed(sorted(self._keys)),
        )

    def digest(self) -> KvDigest:
        """Count and XOR of the blocks as of the last change."""
        return KvDigest(blocks=len(self._keys), xor=self._xor, state="exact", block_tokens=self._block_tokens)

    def _store(self, keys: Iterable[int]) -> None:
        self._keys.update(keys)
        for key in keys:
            self._xor ^= key

    def _remove(self, keys: Iterable[int]) -> None:
        self._keys.difference_update(keys)
        for key in keys:
            self._xor ^= key

    def _order(self) -> Order:
        return Order(cluster=CLUSTER, claim=0, n=self._n)


def heartbeat(
    instance: str,
    load: Load,
    digest: KvDigest,
    *,
    block_size: int,
    context_max_tokens: int,
    counted: bool = True,
    model: str = MODEL,
    state: EngineState = "ready",
) -> Heartbeat:
    """What a scrape of the engine shows, taken now; if not `counted`, neither its requests nor the KV they use."""
    beat = Heartbeat(
        instance=instance,
        boot=BOOT,
        age_s=0.0,
        address=instance,
        model=model,
        context_max_tokens=context_max_tokens,
        running=load.running,
        waiting=load.waiting,
        kv_used_blocks=load.kv_used_blocks,
        kv_total_blocks=load.kv_total_blocks,
        block_size=block_size,
        prompt_tokens_total=load.prompt_tokens,
        generation_tokens_total=load.generation_tokens,
        cached_tokens_total=load.cached_tokens,
        iterations_total=load.iterations,
        preemptions_total=load.preemptions,
        state=state,
        digest=digest,
    )
    return beat if counted else replace(beat, running=None, waiting=None, kv_used_blocks=None)


def shard(beats: Iterable[Heartbeat], *, n: int, period_s: float, site: str = SITE) -> CapacityShard:
    """The `n`-th message with all rows, sent as soon as the values are read."""
    order = Order(cluster=CLUSTER, claim=0, n=n)
    return CapacityShard(
        site=site,
        shard=0,
        cluster=CLUSTER,
        epoch=0,
        n=n,
        period_s=period_s,
        telemetry_age_s=0.0,
        rows=tuple([CapacityRow(beat=b, order=order, agent=AGENT, age_s=0.0, agent_silent_s=0.0) for b in beats]),
    )
