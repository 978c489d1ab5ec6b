"""Arms: the requests of both arms of a trial, counted as they settle.

A request belongs to the arm whose revision decided it, and to the trial if it arrived after the trial began. What it
counts for is a function of all that was heard of it, so it is counted anew with every event. One that is still open
counts as missed once its service level can't be met any more: a revision under which requests hang must not look good.
"""

from typing import Literal, NamedTuple

from tokenfleet.core.canary import Arm, bucket_of
from tokenfleet.core.goodput.judge import Attained, End
from tokenfleet.core.known import known

Logical = tuple[str, str]  # tenant and request: one tenant's words change nothing of another's
REQUESTS_MAX = 500_000  # bounds memory at some 150 MiB; more than any judgement needs


class Settled(NamedTuple):
    """How a logical request ended, or that it is open past its level. `revision` decided it, 0 when unknown;
    `arrived_s` is event time."""

    revision: int
    arrived_s: float
    request_class: str
    end: End | Literal["open"]
    attained: Attained
    ttft_s: float | None


class Arms:
    """Both arms of the trial of revision `canary` beside `base`, of requests that arrived from `since_s` on."""

    def __init__(self, *, base: int, canary: int, since_s: float) -> None:
        self.since_s = since_s
        self.of: dict[int, Arm] = {base: Arm(), canary: Arm()}
        self._counted: dict[Logical, Settled] = {}

    def hear(self, request: Logical, settled: Settled | None) -> None:
        """The request counts for `settled` now; None: it is open and may be met."""
        before = self._counted.get(request)
        if before == settled:
            return
        if before is not None:
            _count(self.of[before.revision], before, -1)
            del self._counted[request]
        if settled is None or settled.revision not in self.of or settled.arrived_s < self.since_s:
            return
        if len(self._counted) < REQUESTS_MAX:
            self._counted[request] = settled
            _count(self.of[settled.revision], settled, 1)


FAILED = frozenset({"failed", "timed_out", "lost"})


def _count(arm: Arm, settled: Settled, sign: int) -> None:
    arm.requests += sign
    arm.failed += sign * (settled.end in FAILED)
    arm.open += sign * (settled.end == "open")
    if settled.attained != "excluded":
        name = settled.request_class
        arm.offered[name] = arm.offered.get(name, 0) + sign
        arm.met[name] = arm.met.get(name, 0) + sign * (settled.attained == "met")
    if (ttft_s := known(settled.ttft_s)) is not None:
        bucket = bucket_of(ttft_s)
        arm.ttft[bucket] = arm.ttft.get(bucket, 0) + sign
