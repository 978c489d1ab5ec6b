"""Agents: engines' caches as their agents tell of them, to one pilot, in virtual time.

Agents are made of the parts that the real ones are made of: the numbering of the engine's batches, its blocks, the log
of records. What they tell travels over links, as in a simulated fleet.
"""

import heapq
from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from tokenfleet.adapters.engines.kv_log import KvLog
from tokenfleet.adapters.engines.kv_sequence import KvSequence
from tokenfleet.core.blocks import block_keys, canonical_block_tokens, chain_seed
from tokenfleet.core.decision import Request
from tokenfleet.core.kvevents import BlockStored, KvBatch, KvEvent
from tokenfleet.core.kvstate import EngineBlocks
from tokenfleet.core.records import CapacityRow, CapacityShard, Heartbeat, KvRecord, Order
from tokenfleet.sim.links import Link, Links, LinkTerms
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.router import Setup
from tokenfleet.sim.telemetry import CLUSTER, MODEL, SITE, TENANT

TICK_S, TICKS_A_SCRAPE, TICKS_A_RECORD = 0.05, 5, 2  # the agents' periods: 0.25 s for telemetry, 0.1 s for blocks
PERIOD_S = TICK_S * TICKS_A_SCRAPE
SECRET = b"site secret"


class Agent:
    """One instance and what its agent knows of it; `block_size` is that of the engine, in tokens."""

    def __init__(self, name: str, *, block_size: int, block_tokens: int, claim: int) -> None:
        self.name = name
        self.block_size = block_size
        self.boot = "boot-1"
        self.claim = claim
        self.running = 0
        self.log = KvLog(name)
        self.boots(self.boot, block_tokens=block_tokens)

    def boots(self, boot: str, *, block_tokens: int) -> None:
        """The engine's process begins, and announces everything from its first block on."""
        self.boot = boot
        self._numbers = KvSequence()
        self._numbers.restart(0)
        self._next = 0
        self.blocks = EngineBlocks(secret=SECRET, model=MODEL, block_tokens=block_tokens)
        self.blocks.heard_from_start()

    def hears(self, *events: KvEvent, number: int | None = None) -> None:
        """One batch of the engine; `number` names one that was published before."""
        if number is None:
            number, self._next = self._next, self._next + 1
        payload = repr(events).encode()
        if self._numbers.judge(number, payload) == "again":
            return
        self._numbers.took(number, payload, replayed=False)
        self.blocks.apply(KvBatch(rank=0, events=events))

    def stores(self, tokens: int, **named: Any) -> int:
        """The engine has computed a prompt's first `tokens` tokens; the number of the batch that says so."""
        self.hears(self.announcement(tokens, **named))
        return self._next - 1

    def announcement(self, tokens: int, **named: Any) -> BlockStored:
        """All whole engine blocks of the prompt, under hashes that say where they stand."""
        whole = tokens // self.block_size
        return BlockStored(
            hashes=tuple(range(1, whole + 1)),
            parent=None,
            tokens=prompt(whole * self.block_size).tobytes(),
            block_size=self.block_size,
            **named,
        )

    def records(self) -> list[KvRecord]:
        return [*self.log.changes(self.blocks, boot=self.boot, cluster=CLUSTER, claim=self.claim)]

    def beat(self) -> Heartbeat:
        return Heartbeat(
            instance=self.name,
            boot=self.boot,
            age_s=0.0,
            address=self.name,
            model=MODEL,
            running=float(self.running),
            waiting=0.0,
            kv_used_blocks=0.0,
            kv_total_blocks=1_000_000 // self.block_size,
            block_size=self.block_size,
            digest=self.log.told,
        )


class Quarter:
    """A pilot and the agents of its instances, by name and with the size of their engines' blocks."""

    def __init__(self, engines: Mapping[str, int], *, links: Links | None = None) -> None:
        self.links = links or Links()
        self.now_s = 0.0
        self.block_tokens = canonical_block_tokens(engines.values())
        self.agents = {name: self._agent(name, size) for name, size in engines.items()}
        setup = Setup(
            gateway="g0",
            instances=tuple(engines),
            profile=profiles()["L70"],
            rng=Random(1),
            publish=lambda event: None,
        )
        self.pilot = Pilot(setup)
        self._ticks = self._sent = self._asked = 0
        self._on_their_way: list[tuple[float, int, KvRecord | CapacityShard]] = []
        self.passes(1.0)

    def leaves(self, name: str) -> Agent:
        return self.agents.pop(name)

    def comes(self, name: str, *, block_size: int, boot: str) -> None:
        """An instance of the name comes (again), under an agent that begins to watch it."""
        self.agents[name] = self._agent(name, block_size)
        self.agents[name].boots(boot, block_tokens=self.block_tokens)

    def passes(self, seconds: float) -> None:
        """Time passes; agents scrape and tell, links bring."""
        for _ in range(round(seconds / TICK_S)):
            self._ticks += 1
            self.now_s = self._ticks * TICK_S
            self._bring()
            if self._ticks % TICKS_A_RECORD == 0:
                for agent in self.agents.values():
                    for record in agent.records():
                        self._send(record, self.links.kv)
            if self._ticks % TICKS_A_SCRAPE == 0:
                self._scrape()
            self._bring()

    def asks(self, tokens: int, **named: Any) -> Request:
        """A request for the first `tokens` tokens of the prompt, as its gateway names their blocks."""
        self._asked += 1
        seed = chain_seed(SECRET, model=MODEL, **named)
        return Request(
            id=f"r{self._asked}",
            model=MODEL,
            tenant=TENANT,
            origin=SITE,
            prompt_tokens=tokens,
            block_keys=block_keys(prompt(tokens), seed=seed, block_tokens=self.block_tokens),
            block_tokens=self.block_tokens,
            declared_class="chat",
        )

    def goes_to(self, request: Request) -> str:
        """The instance that the pilot sends it to now."""
        return self.pilot.route(request, self.now_s).instance

    def credit(self, tokens: int, **named: Any) -> dict[str, int]:
        """Cached tokens that a request for the prompt would be credited with, by instance."""
        pool = self.pilot.site.pool(MODEL, self.now_s, self.asks(tokens, **named))
        return {view.instance: view.hit_tokens for view in pool.instances if view.hit_tokens}

    def _agent(self, name: str, block_size: int) -> Agent:
        claim = round(self.now_s / TICK_S)
        return Agent(name, block_size=block_size, block_tokens=self.block_tokens, claim=claim)

    def _scrape(self) -> None:
        order = Order(cluster=CLUSTER, claim=0, n=self._ticks)
        rows = [
            CapacityRow(beat=agent.beat(), order=order, agent="agent", age_s=0.0, agent_silent_s=0.0)
            for agent in self.agents.values()
        ]
        shard = CapacityShard(
            site=SITE,
            shard=0,
            cluster=CLUSTER,
            epoch=0,
            n=self._ticks,
            period_s=PERIOD_S,
            telemetry_age_s=0.0,
            rows=tuple(rows),
        )
        self._send(shard, self.links.telemetry)

    def _send(self, record: KvRecord | CapacityShard, terms: LinkTerms) -> None:
        self._sent += 1
        for at_s in Link(terms, Random(self._sent)).arrivals_s(self.now_s):
            heapq.heappush(self._on_their_way, (at_s, self._sent, record))

    def _bring(self) -> None:
        while self._on_their_way and self._on_their_way[0][0] <= self.now_s + 1e-9:
            _, _, record = heapq.heappop(self._on_their_way)
            self.pilot.heard(record, self.now_s)

    def loses(self, *, kv: bool) -> None:
        """Whether the records of blocks are lost from now on."""
        self.links = replace(self.links, kv=replace(self.links.kv, loss=1.0 if kv else 0.0))


def prompt(tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    """The first tokens of the one prompt that everybody asks."""
    return np.arange(7, 7 + tokens, dtype=np.uint32)
