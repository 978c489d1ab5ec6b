"""Slots: one serves one model at a time, drains before it sleeps, and forgets what it had cached."""

from collections.abc import Sequence

from msgspec.structs import replace

from tests.sim.worlds import TINY, row
from tokenfleet.core.decision import Request
from tokenfleet.core.records import CapacityShard, OutcomeEvent
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.router import Answer, Record, Setup
from tokenfleet.sim.served import Served
from tokenfleet.sim.slots import SLEEP_S, WAKE_S, Slots
from tokenfleet.sim.traces.rows import TraceRow

MODELS = ("a", "b")


class ByState:
    """Sends a request to the first instance that was last told to be ready for its model; without one it holds it."""

    def __init__(self, setup: Setup) -> None:
        self.told: list[tuple[float, dict[str, str]]] = []
        self._held: list[Request] = []

    @property
    def holding(self) -> int:
        return len(self._held)

    def route(self, request: Request, now_s: float) -> Answer:
        states = self.told[-1][1]
        target = next((name for name in states if name.endswith(request.model) and states[name] == "ready"), "")
        self._held += [] if target else [request]
        return Answer(request=request.id, instance=target)

    def released(self, now_s: float) -> Sequence[Answer]:
        held, self._held = self._held, []
        return [self.route(request, now_s) for request in held]

    def heard(self, record: Record, now_s: float) -> None:
        if isinstance(record, CapacityShard):
            self.told.append((now_s, {each.beat.instance: each.beat.state for each in record.rows}))

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        return event


class Moves:
    """Gives slots from one model to another at full seconds, and writes down what it is told."""

    def __init__(self, moves: dict[float, tuple[str, str]] | None = None) -> None:
        self.seen: list[tuple[str, str]] = []
        self._moves = moves or {}

    def offered(self, request: Request, now_s: float) -> None:
        self.seen.append(("offered", request.model))

    def placed(self, request: str, now_s: float) -> None:
        self.seen.append(("placed", request))

    def ended(self, event: OutcomeEvent, now_s: float) -> None:
        self.seen.append(("ended", event.pool))

    def advance(self, slots: Slots, now_s: float) -> None:
        if now_s in self._moves:
            slots.move(*self._moves[now_s], now_s)


def asks(at_s: float, model: str, *, out: int = 4, chain: int | None = None) -> TraceRow:
    return replace(row(at_s, out=out, chain=chain), model=model)


def serve(rows: Sequence[TraceRow], overseer: Moves, *serving: str) -> tuple[list[Served], Fleet, ByState]:
    routers: list[ByState] = []

    def made(setup: Setup) -> ByState:
        routers.append(ByState(setup))
        return routers[0]

    terms = FleetTerms(profile=TINY, instances=len(serving), models=MODELS, serving=serving)
    fleet = Fleet(terms, made, seed=1, overseer=overseer)
    return fleet.serve(rows), fleet, routers[0]


def test_a_slot_serves_its_own_model_and_no_other() -> None:
    ended, fleet, router = serve([asks(1.0, "a"), asks(1.0, "b")], Moves(), "a", "b")
    assert [fleet.engines[each.instance].name for each in ended] == ["i000.a", "i001.b"]
    assert router.told[0][1] == {"i000.a": "ready", "i000.b": "sleeping", "i001.a": "sleeping", "i001.b": "ready"}


def test_a_slot_drains_sleeps_and_wakes_as_another_model() -> None:
    """Nothing is preempted: what runs when the slot is taken ends where it is."""
    rows = [asks(0.9, "a", out=400), asks(2.0, "b")]
    ended, fleet, router = serve(rows, Moves({1.0: ("a", "b")}), "a")
    (move,) = fleet.slots.moves
    assert ended[0].finished_s is not None
    assert move.drained_s is not None
    assert move.ready_s is not None
    assert 4.0 < ended[0].finished_s <= move.drained_s < ended[0].finished_s + 0.5
    assert SLEEP_S + WAKE_S <= move.ready_s - move.drained_s < SLEEP_S + WAKE_S + 0.5
    assert ended[1].dispatched_s is not None
    assert move.ready_s <= ended[1].dispatched_s < move.ready_s + 0.5  # as soon as it is told
    ways = [(states["i000.a"], states["i000.b"]) for _, states in router.told]
    assert list(dict.fromkeys(ways)) == [
        ("ready", "sleeping"),
        ("draining", "sleeping"),
        ("sleeping", "starting"),
        ("sleeping", "ready"),
    ]


def test_the_slot_with_the_fewest_requests_goes() -> None:
    rows = [asks(0.5, "a", out=200), asks(20.0, "b")]
    _, fleet, _ = serve(rows, Moves({1.0: ("a", "b")}), "a", "a")
    assert [move.slot for move in fleet.slots.moves] == [1]  # the first one's request runs


def test_a_slot_that_slept_has_forgotten_what_it_had_cached() -> None:
    overseer = Moves({1.0: ("a", "b"), 20.0: ("b", "a")})
    rows = [asks(0.5, "a", chain=1), asks(0.8, "a", chain=1), asks(40.0, "a", chain=1)]
    ended, _, _ = serve(rows, overseer, "a")
    assert [each.cached_tokens > 0 for each in ended] == [False, True, False]


def test_the_overseer_hears_of_all_that_arrives_goes_out_and_ends() -> None:
    overseer = Moves()
    ended, _, _ = serve([asks(1.0, "b")], overseer, "a", "b")
    assert overseer.seen == [("offered", "b"), ("placed", ended[0].id), ("ended", "b@sim")]
