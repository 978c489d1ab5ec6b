"""Blind: rules that look at no cache, only at turns, lots and counts of requests."""

from tokenfleet.core.decision import Request
from tokenfleet.sim.baselines.accounts import Accounts, Placement, least
from tokenfleet.sim.baselines.telemetry import Telemetry
from tokenfleet.sim.router import Record, Setup


class RoundRobin(Accounts):
    """Each instance in turn, from one drawn at the start (Envoy's ROUND_ROBIN begins at a random host)."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._turn = self.rng.randrange(len(self.instances))

    def place(self, request: Request, now_s: float) -> Placement:
        instance = self.instances[self._turn]
        self._turn = (self._turn + 1) % len(self.instances)
        return Placement(instance=instance, tokens=request.prompt_tokens)


class RandomChoice(Accounts):
    """Each instance with the same chance."""

    def place(self, request: Request, now_s: float) -> Placement:
        return Placement(instance=self.rng.choice(self.instances), tokens=request.prompt_tokens)


class PowerOfTwo(Accounts):
    """Of two distinct instances drawn by lot the one with fewer own requests in flight.

    M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001; the rule
    `power_of_two` of sgl-project/sglang (sgl-model-gateway/src/policies/power_of_two.rs at 065f331).
    """

    def place(self, request: Request, now_s: float) -> Placement:
        drawn = self.rng.sample(self.instances, min(2, len(self.instances)))
        instance = min(drawn, key=lambda name: self.in_flight[name])  # on a tie the first, itself drawn by lot
        return Placement(instance=instance, tokens=request.prompt_tokens)


class LeastRequests(Accounts):
    """The instance with the fewest own requests in flight: Envoy's LEAST_REQUEST over all hosts."""

    def place(self, request: Request, now_s: float) -> Placement:
        return Placement(instance=least(self.in_flight, self.rng), tokens=request.prompt_tokens)


class LeastStale(Accounts):
    """The instance with the fewest running and waiting requests by its last telemetry, whatever was sent since.

    So a burst between two scrapes goes where the last scrape saw the least.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._telemetry = Telemetry(self.instances)

    def place(self, request: Request, now_s: float) -> Placement:
        seen = self._telemetry.seen
        requests = {name: beat.running + beat.waiting for name, beat in seen.items()}
        return Placement(instance=least(requests, self.rng), tokens=request.prompt_tokens)

    def heard(self, record: Record, now_s: float) -> None:
        self._telemetry.hear(record)
