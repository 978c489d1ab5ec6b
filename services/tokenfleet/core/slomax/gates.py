"""Gates: the feasibility gate of each pool of one site, and which of what the site hears teaches them.

A first token is a residual, whichever replica was told of it; only the replica that judged a request hears of its end.
"""

from tokenfleet.core.goodput.judge import attained_of
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import Entry, OutcomeEvent, PlacementEvent
from tokenfleet.core.slomax.feasible import Gate


class Gates:
    """By model, since a site has one pool of each. They follow the policy in force."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._gates: dict[str, Gate] = {}

    def of(self, model: str) -> Gate:
        found = self._gates.get(model)
        if found is None:
            found = self._gates[model] = Gate(model, self._policy.slomax.gate)
        return found

    def follow(self, policy: Policy) -> None:
        """Another policy is in force; pools of models that it lacks are forgotten."""
        self._policy = policy
        self._gates = {model: gate for model, gate in self._gates.items() if model in policy.models}
        for gate in self._gates.values():
            gate.terms = policy.slomax.gate

    def told(self, event: PlacementEvent) -> None:
        """Another replica tells of a placement."""
        if event.kind == "first_token" and event.entry is not None:
            self.first_token(event.entry, actual_s=event.entry.age_s)

    def first_token(self, entry: Entry, *, actual_s: float) -> None:
        """The first token of a placement came so long after it was dispatched."""
        if entry.predicted_ttft_s is not None and entry.model in self._policy.models:
            self.of(entry.model).first_token(predicted_s=entry.predicted_ttft_s, actual_s=actual_s)

    def ended(self, event: OutcomeEvent, *, now_s: float) -> None:
        """A request ended; who cancelled in time says nothing."""
        gate = self._gates.get(event.model)
        if gate is None or event.request not in gate:
            return
        attained = attained_of(event, self._policy)
        if attained != "excluded":
            gate.ended(event.request, in_time=attained == "met", now_s=now_s)

    def refusing_nobody(self) -> dict[str, str]:
        """The models whose gate has switched itself off, with the reason: to be raised as an alarm."""
        return {model: gate.queues_only for model, gate in self._gates.items() if gate.queues_only}
