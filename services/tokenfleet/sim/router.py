"""Router: what decides for one simulated gateway, and all that it gets to see.

The fleet (sim/fleet.py) calls it in virtual time. Nothing else reaches a router: no output length, no engine state
but what telemetry carries, nothing of another gateway but what that one published and the link delivered.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from msgspec import Struct

from tokenfleet.core.accounts import Feedback
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.records import (
    CapacityShard,
    KvDelta,
    KvSnapshot,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
)
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.telemetry import SITE

# Records that a link delivers: delayed, and as the link is set also lost, repeated or out of order.
Record = CapacityShard | KvDelta | KvSnapshot | PlacementEnvelope | Feedback

Publish = Callable[[PlacementEvent], None]  # puts an event on the topic that the other gateways follow


class Answer(Struct, frozen=True, kw_only=True):
    """Where the request goes; neither `instance` nor `refused`: it is held until `released` names it.

    `decision` names the answer in the request's outcome events. `refused` says why it goes nowhere.
    """

    request: str
    instance: str = ""
    decision: str = ""
    refused: str = ""


class Router(Protocol):
    """One gateway's rule with its own accounts."""

    def route(self, request: Request, now_s: float) -> Answer:
        """The answer to a request that arrives now. A refused or routed one is never released later."""
        ...

    def released(self, now_s: float) -> Sequence[Answer]:
        """Held requests that go out now. Asked when one is held anew, after each of its own first tokens, and every
        50 ms while `holding`."""
        ...

    @property
    def holding(self) -> int:
        """Requests held."""
        ...

    def heard(self, record: Record, now_s: float) -> None:
        """A record that a link delivers to this gateway now."""
        ...

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        """How one of its own requests goes (`first_token`, `finished`), as its link of outcomes brings it: usually at
        once. Gives the event back with what was believed at placement, for the outcomes topic."""
        ...


class Setup(Struct, frozen=True, kw_only=True):
    """What a router is made from.

    `instances` are the names of all engines, in order; all are of one `profile`, at the `site`. `gateway` names this
    one among `gateways` alike. `rng` is the router's own chance. `policy` holds the classes' terms and bounds; None:
    there are none. The rest is TokenPilot's: `weights` (None: the shipped ones), the engine coefficients that it starts
    from as multiples of the true ones, and whether outcomes teach it better.
    """

    gateway: str
    gateways: int = 1
    instances: tuple[str, ...]
    profile: Profile
    rng: Random
    publish: Publish
    site: str = SITE
    policy: Policy | None = None
    weights: TokenPilotPolicy | None = None
    prior_factor: float = 1.0
    learning: bool = False


MakeRouter = Callable[[Setup], Router]
