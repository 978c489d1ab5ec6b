"""Worlds: small simulated fleets and routers that write down all that reaches them."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tokenfleet.core.decision import Request
from tokenfleet.core.records import OutcomeEvent, PlacementEvent
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links, LinkTerms
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.router import Answer, MakeRouter, Record, Setup
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.rows import TraceRow

TINY = Profile(
    source="round figures: 10 ms a step, 1 ms a token, one block is 16 tokens",
    prefill_base_s=0.010,
    decode_base_s=0.010,
    floor_points=((1, 0.010),),
    token_s=0.001,
    pair_s=0.0,
    context_s=1e-6,
    kv_bytes_per_token=1,
    kv_tokens=16 * 64,
    token_budget=64,
    sequences_max=8,
    block_size=16,
)
LOSSY = LinkTerms(delay_s=0.02, jitter_s=0.05, loss=0.2, duplicate=0.2, reorder=0.2, late_s=0.5)
BAD_LINKS = Links(telemetry=LOSSY, kv=LOSSY, placements=LOSSY, feedback=LOSSY)


def row(at_s: float, *, prompt: int = 64, out: int = 4, chain: int | None = None, shared: int = 0) -> TraceRow:
    """A request whose blocks are those of conversation `chain`, the first `shared` of all."""
    ids = () if chain is None else tuple((0 if i < shared else chain * 1_000) + i for i in range(-(-prompt // 16)))
    return TraceRow(at_s=at_s, prompt_tokens=prompt, output_tokens=out, hash_ids=ids, block_tokens=16)


def fleet(make_router: MakeRouter, *, instances: int = 2, seed: int = 1, **terms: Any) -> Fleet:
    return Fleet(FleetTerms(profile=TINY, instances=instances, **terms), make_router, seed=seed)


class Recorder:
    """Routes to each instance in turn and writes down what it hears: (seconds, what)."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.seen: list[tuple[float, Request | Record | OutcomeEvent]] = []
        self._routed = 0

    holding = 0

    def route(self, request: Request, now_s: float) -> Answer:
        self.seen.append((now_s, request))
        self._routed += 1
        return Answer(request=request.id, instance=self.setup.instances[self._routed % len(self.setup.instances)])

    def released(self, now_s: float) -> Sequence[Answer]:
        return ()

    def heard(self, record: Record, now_s: float) -> None:
        self.seen.append((now_s, record))

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        self.seen.append((now_s, event))
        return event

    def of(self, kind: type[Any]) -> list[tuple[float, Any]]:
        return [(at_s, what) for at_s, what in self.seen if isinstance(what, kind)]


class Announcer(Recorder):
    """Publishes what it places and how it goes, as a replica with a ledger does."""

    def route(self, request: Request, now_s: float) -> Answer:
        answer = super().route(request, now_s)
        self.setup.publish(
            PlacementEvent(kind="ended", decision=request.id, request=request.id, attempt=0, instance=answer.instance)
        )
        return answer


class Holder(Recorder):
    """Holds every request until `wait_s` after its arrival, or for ever."""

    wait_s = 0.12

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.held: list[tuple[float, Request]] = []

    @property
    def holding(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]  # a plain 0 in the parent
        return len(self.held)

    def route(self, request: Request, now_s: float) -> Answer:
        self.held.append((now_s, request))
        return Answer(request=request.id)

    def released(self, now_s: float) -> Sequence[Answer]:
        due = [request for at_s, request in self.held if at_s + self.wait_s <= now_s]
        self.held = [(at_s, request) for at_s, request in self.held if at_s + self.wait_s > now_s]
        return [super(Holder, self).route(request, now_s) for request in due]


def kept(made: list[Recorder], make: Callable[[Setup], Recorder] = Recorder) -> MakeRouter:
    """Makes routers and keeps them at hand."""

    def make_router(setup: Setup) -> Recorder:
        made.append(make(setup))
        return made[-1]

    return make_router


def fates(served: Sequence[Served]) -> list[str]:
    """How each request ended; a request that ended twice, or ran after a refusal, would be neither of these."""
    found: list[str] = []
    for each in served:
        states = {
            "refused": bool(each.refused) and each.dispatched_s is None,
            "finished": each.finished_s is not None and not each.refused,
            "unfinished": each.finished_s is None and not each.refused,
        }
        found.append(" ".join(name for name, holds in states.items() if holds))
    return found


def transcript(recorder: Recorder) -> list[tuple[float, str]]:
    """What reached it, comparable."""
    return [(at_s, msgspec.json.encode(what).hex()) for at_s, what in recorder.seen]
