"""Slots: accelerators that each serve one of several models, while the weights of the others sleep in host memory.

A slot has an engine process a model, of which one is awake. To serve another model its engine is drained, for nothing
is preempted, put to sleep, which empties its cache, and the other one is woken.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from tokenfleet.core.records import EngineState
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.telemetry import MODEL, SITE, KvBook

# vLLM's sleep mode at level 1, weights of 59 GB an accelerator (235B parameters in FP8 on four of them; a 70B model in
# BF16 has 35 GB on four): 5.8 to 6.0 s to sleep, 5.3 to 5.7 s to wake. Measured by the vLLM project (Zero-Reload Model
# Switching with vLLM Sleep Mode, 2025-10-26, https://blog.vllm.ai/2025/10/26/sleep-mode.html, first figure).
SLEEP_S = 6.0
WAKE_S = 5.7
DRAIN_MIN_S = 1.0  # until all gateways have read that it drains: work that was on its way is still served


@dataclass(slots=True)
class Engine:
    """One engine process: what it computes, what its agent knows of its cache, and whether it serves."""

    name: str
    machine: EngineMachine
    book: KvBook
    model: str = MODEL
    state: EngineState = "ready"
    wakes_at_s: float = math.inf


class Move(Struct, kw_only=True):
    """A slot's way from one model to another; `drained_s` and `ready_s` None: not yet."""

    slot: int
    source: str
    target: str
    begun_s: float
    drained_s: float | None = None
    ready_s: float | None = None


class Slots:
    """Which model each slot serves. One slot moves at a time; `moves` has them all, in order."""

    def __init__(self, engines: Sequence[dict[str, Engine]], serving: Sequence[str]) -> None:
        self.serving = list(serving)
        self.moves: list[Move] = []
        self._engines = engines
        for slot, model in enumerate(serving):
            for name, engine in engines[slot].items():
                engine.state = "ready" if name == model else "sleeping"

    @property
    def moving(self) -> bool:
        return bool(self.moves) and self.moves[-1].ready_s is None

    def counts(self) -> Counter[str]:
        """Slots of each model; one that moves counts for the model that it will serve."""
        return Counter(self.serving)

    def move(self, source: str, target: str, now_s: float) -> None:
        """Gives a slot of one model to another: that with the fewest requests."""
        assert not self.moving, "one slot moves at a time"
        own = [slot for slot, model in enumerate(self.serving) if model == source]
        slot = min(own, key=lambda slot: self._requests(self._engines[slot][source]))
        self.serving[slot] = target
        self._engines[slot][source].state = "draining"
        self.moves.append(Move(slot=slot, source=source, target=target, begun_s=now_s))

    def advance(self, now_s: float) -> None:
        """The move under way goes on as far as it can by now; the slot's engines are up to date."""
        if not self.moving:
            return
        move = self.moves[-1]
        old, new = self._engines[move.slot][move.source], self._engines[move.slot][move.target]
        if move.drained_s is None and now_s >= move.begun_s + DRAIN_MIN_S and not self._requests(old):
            old.machine.clear_cache(now_s)
            old.state, new.state, move.drained_s = "sleeping", "starting", now_s
        if move.drained_s is not None and now_s >= move.drained_s + SLEEP_S + WAKE_S:
            new.state, move.ready_s = "ready", now_s

    @staticmethod
    def _requests(engine: Engine) -> int:
        load = engine.machine.load()
        return load.running + load.waiting


def engines_of(profile: Profile, *, slots: int, models: Sequence[str], site: str = SITE) -> list[dict[str, Engine]]:
    """Each slot's engines by model, in the order of their names; the only site's are named by number alone."""
    prefix = "i" if site == SITE else f"{site}-i"

    def engine(name: str, model: str) -> Engine:
        book = KvBook(name, profile.block_size, model=model)
        return Engine(name=name, machine=EngineMachine(profile), book=book, model=model)

    several = len(models) > 1
    return [
        {model: engine(f"{prefix}{slot:03}.{model}" if several else f"{prefix}{slot:03}", model) for model in models}
        for slot in range(slots)
    ]
