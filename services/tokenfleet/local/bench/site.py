"""Bench site: a busy site of any size, fed by the records that a real one hears."""

from random import Random
from typing import Final

import numpy as np
from msgspec.structs import replace

from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.core.blocks import KEY_BYTES, xor_of
from tokenfleet.core.decision import Request
from tokenfleet.core.records import (
    CapacityRow,
    CapacityShard,
    Entry,
    Heartbeat,
    KvDelta,
    KvDigest,
    Order,
    PlacementEnvelope,
    PlacementEvent,
)
from tokenfleet.core.site import Heard, Site
from tokenfleet.core.summary import summarise

NAME: Final = "b"
MODEL: Final = "small-chat"
CLUSTER: Final = "bench"
BLOCK_TOKENS: Final = 256
BLOCKS: Final = 128  # of every prompt, as the goals say
PROMPT_TOKENS: Final = BLOCKS * BLOCK_TOKENS + 100
PROMPTS: Final = 8  # prefixes that the site knows, each held by an eighth of the instances to different depths
SHARDS: Final = 16
PLACED_MAX: Final = 4  # unfinished requests of an instance


class BenchSite:
    """The site, its prompts and the records that keep it fresh. Equal seeds give equal sites."""

    def __init__(self, instances: int, *, now_s: float, seed: int = 1) -> None:
        self._rng = Random(seed)
        policy, policy_hash = load_policy()
        self.site = Site(NAME, policy, policy_hash=policy_hash, replica="0")
        self.prompts = prompts_of()
        self.names = tuple(f"{NAME}-{n:05}" for n in range(instances))
        held = {name: b"" for name in self.names}
        for prompt in self.prompts:
            for name in self._rng.sample(self.names, max(1, instances // PROMPTS)):
                held[name] += prompt[: KEY_BYTES * self._rng.randint(1, BLOCKS)]
        self._rows = [self._row(self._beat(name, held[name]), n % SHARDS) for n, name in enumerate(self.names)]
        self._snapshots = 0
        self.hears_telemetry(now_s)
        for name, keys in held.items():
            if keys:
                self.site.heard(stored(name, keys, n=1), Heard(now_s=now_s))
        for name in self.names:
            self.site.heard(self._placements(name), Heard(now_s=now_s))
        self._hears_others(now_s)

    def hears_telemetry(self, now_s: float) -> None:
        """A capacity snapshot of all shards, as of now: the same heartbeats, young again."""
        self._snapshots += 1
        for shard in range(SHARDS):
            snapshot = CapacityShard(
                site=NAME,
                shard=shard,
                cluster=CLUSTER,
                epoch=0,
                n=self._snapshots,
                period_s=0.1,
                telemetry_age_s=0.1,
                rows=tuple(self._rows[shard::SHARDS]),
            )
            self.site.heard(snapshot, Heard(partition=shard, now_s=now_s))

    def request(self, number: int) -> Request:
        """A chat request for one of the prompts."""
        return Request(
            id=f"bench-{number}",
            model=MODEL,
            tenant="acme",
            origin=NAME,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=256,
            block_keys=self.prompts[number % PROMPTS],
            block_tokens=BLOCK_TOKENS,
        )

    def _row(self, beat: Heartbeat, shard: int) -> CapacityRow:
        order = Order(cluster=CLUSTER, claim=0, n=1)
        return CapacityRow(beat=beat, order=order, agent=f"agent-{shard}", age_s=0.1, agent_silent_s=0.1)

    def _beat(self, name: str, keys: bytes) -> Heartbeat:
        return Heartbeat(
            instance=name,
            boot="boot-1",
            age_s=0.1,
            address=f"10.0.0.1:{8000 + int(name[len(NAME) + 1 :])}",
            model=MODEL,
            running=float(self._rng.randint(0, 40)),
            waiting=0.0,
            kv_used_blocks=float(self._rng.randint(0, 30_000)),
            kv_total_blocks=60_000,
            block_size=16,
            digest=KvDigest(
                blocks=len(set(np.frombuffer(keys, "<u8").tolist())),
                xor=xor_of(np.unique(np.frombuffer(keys, "<u8")).tobytes()),
                state="exact",
                block_tokens=BLOCK_TOKENS,
            ),
        )

    def _placements(self, name: str) -> PlacementEnvelope:
        """What runs on the instance: some wait, some decode."""
        events: list[PlacementEvent] = []
        for n in range(self._rng.randint(0, PLACED_MAX)):
            entry = Entry(
                decision=f"{name}/{n}",
                request=f"{name}/{n}",
                attempt=0,
                instance=name,
                model=MODEL,
                request_class="chat",
                work_s=self._rng.uniform(0.01, 0.3),
                uncached_tokens=2_000,
                kv_tokens=4_000,
                replica="1",
                age_s=self._rng.uniform(0.0, 5.0),
                tenant="acme",
            )
            events.append(_event("placed", entry))
            if self._rng.random() < 0.6:
                events.append(_event("first_token", entry))
        return PlacementEnvelope(site=NAME, replica="1", start="1", n=1, events=tuple(events))

    def _hears_others(self, now_s: float) -> None:
        """The other sites' summaries: like one's own, under their names."""
        for other in self.site.policy.sites:
            if other == NAME:
                continue
            summary = summarise(
                other,
                self.site.pools(now_s),
                self.site.policy,
                cluster=CLUSTER,
                epoch=0,
                n=self._snapshots,
                period_s=0.5,
                gateways=(f"{other}:7500",),
            )
            pools = tuple(replace(pool, pool=f"{pool.model}@{other}") for pool in summary.pools)
            self.site.heard(replace(summary, pools=pools), Heard(now_s=now_s))


def prompts_of(seed: int = 1) -> tuple[bytes, ...]:
    """The block keys of the prompts, for the site and for those who ask it."""
    rng = Random(seed)
    return tuple(rng.randbytes(BLOCKS * KEY_BYTES) for _ in range(PROMPTS))


def stored(instance: str, keys: bytes, *, n: int, removed: bytes = b"") -> KvDelta:
    """A change of what an instance caches."""
    return KvDelta(
        instance=instance,
        boot="boot-1",
        order=Order(cluster=CLUSTER, claim=0, n=n),
        model=MODEL,
        block_tokens=BLOCK_TOKENS,
        stored=keys,
        removed=removed,
    )


def _event(kind: str, entry: Entry) -> PlacementEvent:
    return PlacementEvent(
        kind="placed" if kind == "placed" else "first_token",
        decision=entry.decision,
        request=entry.request,
        attempt=entry.attempt,
        instance=entry.instance,
        entry=entry,
    )
