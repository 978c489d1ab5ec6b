"""Rules: how an instance is chosen blindly, as many gateways do; in force they show on live load what the cost brings.

Each picks among the slots that the hard filters left. Loads are the ledger's; equal ones are drawn among.
"""

from collections.abc import Callable
from random import Random

from tokenfleet.core.columns import Columns, Flags
from tokenfleet.core.policy import BlindRule

Pick = Callable[[Columns, list[int], int, Random], tuple[int, int]]


def picked(rule: BlindRule, columns: Columns, left: Flags | None, turn: int, rng: Random) -> tuple[int, int]:
    """The slot that `rule` takes among those `left` (None: all, never nobody), and the other one it looked at, −1 if it
    looked at none or at all. `turn` counts this replica's placements in the pool."""
    slots: list[int] = list(range(len(columns))) if left is None else left.nonzero()[0].tolist()
    return (slots[0], -1) if len(slots) == 1 else RULES[rule](columns, slots, turn, rng)


def _in_turn(columns: Columns, slots: list[int], turn: int, rng: Random) -> tuple[int, int]:
    return slots[turn % len(slots)], -1


def _any(columns: Columns, slots: list[int], turn: int, rng: Random) -> tuple[int, int]:
    return rng.choice(slots), -1


def _less_loaded_of_two(columns: Columns, slots: list[int], turn: int, rng: Random) -> tuple[int, int]:
    """Power of two choices on what the ledger counts, the one load that silence can't falsify. Two of equal load are as
    likely."""
    one, other = rng.sample(slots, 2)
    return (one, other) if columns.open[one] <= columns.open[other] else (other, one)


def _least_loaded(columns: Columns, slots: list[int], turn: int, rng: Random) -> tuple[int, int]:
    least = columns.open[slots].min()
    return rng.choice([slot for slot in slots if columns.open[slot] == least]), -1


RULES: dict[BlindRule, Pick] = {
    "power_of_two": _less_loaded_of_two,
    "least_requests": _least_loaded,
    "round_robin": _in_turn,
    "random": _any,
}
