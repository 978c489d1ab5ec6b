"""Overseer: what moves slots between models, and all that it gets to see."""

from typing import Protocol

from tokenfleet.core.decision import Request
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.sim.slots import Slots


class Overseer(Protocol):
    """One for the site, told of all gateways' requests as the owner of its pools is."""

    def offered(self, request: Request, now_s: float) -> None:
        """A request arrives."""
        ...

    def placed(self, request: str, now_s: float) -> None:
        """A request goes to an engine: it waits no longer."""
        ...

    def ended(self, event: OutcomeEvent, now_s: float) -> None:
        """How a request ended."""
        ...

    def advance(self, slots: Slots, now_s: float) -> None:
        """Asked each second: it may move a slot."""
        ...
