"""Accounts: what every gateway can know by itself, its own requests in flight, and the frame of a rule that needs them.

The rules of this package are rebuilt from the public documents and sources that each file names, with the constants
published there, to be compared with; none of their code is here. Ties are broken at random where the source breaks them
by position or by a hash map's order: a fixed order would make one instance of an idle fleet hot.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import TypeVar

import msgspec
from msgspec import Struct

from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.decision import Request
from tokenfleet.core.predict.work import uncached_tokens
from tokenfleet.core.records import TERMINAL_KINDS, KvState, OutcomeEvent, PlacedOn
from tokenfleet.sim.router import Answer, Record, Setup

Name = TypeVar("Name")


class Placement(Struct, frozen=True, kw_only=True):
    """One own request in flight: its instance, the prompt's block keys and what the rule believed to be cached there.

    `tokens` are the prompt's, `unnamed_blocks` its full blocks without a key; `kv_state` is the source of the belief in
    `hit_tokens`.
    """

    instance: str
    tokens: int
    keys: tuple[bytes, ...] = ()
    unnamed_blocks: int = 0
    hit_tokens: int = 0
    kv_state: KvState = "none"

    @property
    def uncached_tokens(self) -> int:
        """Tokens that the instance computes if the belief holds."""
        return uncached_tokens(self.tokens, self.hit_tokens)


class Accounts:
    """A Router that answers every request at once, hears of nothing and keeps its own requests in flight.

    A rule gives `place`; `began`, `prefilled` and `ended` tell it how its placements go, once each.
    """

    def __init__(self, setup: Setup) -> None:
        self.instances = setup.instances
        self.rng = setup.rng
        self.in_flight = dict.fromkeys(self.instances, 0)
        self._placed: dict[tuple[str, int], Placement] = {}  # as many as are in flight
        self._prefilling: set[tuple[str, int]] = set()

    def place(self, request: Request, now_s: float) -> Placement:
        """Where the request goes; it goes there."""
        raise NotImplementedError  # each rule gives it; the hooks below may stay empty

    def began(self, placement: Placement) -> None:
        """The request is on its way."""

    def prefilled(self, placement: Placement) -> None:
        """It gave its first token, or ended without one."""

    def ended(self, placement: Placement) -> None:
        """It holds nothing any more."""

    def route(self, request: Request, now_s: float) -> Answer:
        placement = self.place(request, now_s)
        attempt = (request.id, request.attempt)
        self._placed[attempt] = placement
        self._prefilling.add(attempt)
        self.in_flight[placement.instance] += 1
        self.began(placement)
        return Answer(request=request.id, instance=placement.instance)

    def released(self, now_s: float) -> Sequence[Answer]:
        return ()

    @property
    def holding(self) -> int:
        return 0

    def heard(self, record: Record, now_s: float) -> None:
        pass

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        attempt = (event.request, event.attempt)
        placement = self._placed.get(attempt)
        if placement is None:
            return event
        over = event.kind in TERMINAL_KINDS
        if (over or event.kind == "first_token") and attempt in self._prefilling:
            self._prefilling.remove(attempt)
            self.prefilled(placement)
        if over:
            del self._placed[attempt]
            self.in_flight[placement.instance] -= 1
            self.ended(placement)
        believed = PlacedOn(
            hit_tokens=placement.hit_tokens, uncached_tokens=placement.uncached_tokens, kv_state=placement.kv_state
        )
        return msgspec.structs.replace(event, placed=believed)


def least(costs: Mapping[Name, float], rng: Random) -> Name:
    """The name with the least cost, by lot among equals; there is at least one."""
    low = min(costs.values())
    equal = [name for name, cost in costs.items() if cost == low]
    return equal[0] if len(equal) == 1 else rng.choice(equal)


def split_keys(request: Request) -> tuple[bytes, ...]:
    """The prompt's block keys, first block first."""
    packed = request.block_keys
    return tuple(packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES))
