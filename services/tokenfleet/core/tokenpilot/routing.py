"""Routing: TokenPilot's answer to one request and what made it."""

from msgspec import Struct

from tokenfleet.core.decision import Candidate, How, Reason
from tokenfleet.core.records import PlacedOn


class Routing(Struct, frozen=True, kw_only=True):
    """Where one request goes, or the reason why nowhere (`target` is empty then, `detail` says what exists instead).

    `candidates` are the chosen one first, then the cheapest others. `considered` counts the pool's instances,
    `excluded` those that each filter removed, `relaxed` names the soft filters that were lifted. `gap_s` = the
    runner-up's cost − the target's; `deciding` is the term in which the target gained most on it. `predicted_ttft_s`
    includes the network. `suspect_only`: nothing unsuspected had room, so the answer is stale. `placed` is what was
    believed of the target, for the outcome to carry. `how` the target was found, among `near_ties` with the part
    `drawn` of the draw.
    """

    target: str = ""
    address: str = ""
    reason: Reason = ""
    detail: str = ""
    how: How = ""
    near_ties: int = 0
    drawn: tuple[float, float] | None = None
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
