"""Routing: TokenPilot's answer to one request and what made it."""

from typing import Literal

from msgspec import Struct

from tokenfleet.core.decision import Candidate, Reason
from tokenfleet.core.policy import BlindRule
from tokenfleet.core.records import PlacedOn

# How the target was found: least cost; a draw or the prefix's home among near-ties; the session's last instance kept;
# the less loaded of two drawn, because all are suspect or TokenPilot is off; a blind rule of the policy.
How = Literal["", "least_cost", "near_tie", "prefix_home", "session", "suspect", "off"] | BlindRule


class Routing(Struct, frozen=True, kw_only=True):
    """Where one request goes, or the reason why nowhere (`target` is empty then, `detail` says what exists instead).

    `candidates` are the chosen one first, then the cheapest others. `considered` counts the pool's instances,
    `excluded` those that each filter removed, `relaxed` names the soft filters that were lifted.
    `gap_s` = the runner-up's cost − the target's; `deciding` is the term in which the target gained most on it.
    `predicted_ttft_s` includes the network. `suspect_only`: nothing unsuspected had room, so the answer is stale.
    `placed` is what was believed of the target, for the outcome to carry.
    """

    target: str = ""
    address: str = ""
    reason: Reason = ""
    detail: str = ""
    how: How = ""
    candidates: tuple[Candidate, ...] = ()
    considered: int = 0
    excluded: dict[str, int] = {}
    relaxed: tuple[str, ...] = ()
    runner_up: str = ""
    gap_s: float | None = None
    deciding: str = ""
    predicted_ttft_s: float | None = None
    suspect_only: bool = False
    placed: PlacedOn | None = None
    sentence: str = ""
