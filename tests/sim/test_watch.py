"""The watch over a router: what was cached when a request was placed, without a word in its placement."""

from collections.abc import Sequence

from tests.sim.setups import BLOCK, asks, event, setup, stored
from tokenfleet.core.decision import Request
from tokenfleet.sim.baselines.accounts import Accounts, Placement
from tokenfleet.sim.router import Answer, Setup
from tokenfleet.sim.watch import Reuse, Watch


class ToFirst(Accounts):
    """Everything goes to the first instance."""

    def place(self, request: Request, now_s: float) -> Placement:
        return Placement(instance=self.instances[0], tokens=request.prompt_tokens)


class Holding(ToFirst):
    """Everything is held until it is asked for, and then goes to the last instance; `no` is refused."""

    def __init__(self, of: Setup) -> None:
        super().__init__(of)
        self.held: list[str] = []

    def route(self, request: Request, now_s: float) -> Answer:
        if request.id == "no":
            return Answer(request="no", refused="no_instances")
        self.held.append(request.id)
        return Answer(request=request.id)

    def released(self, now_s: float) -> Sequence[Answer]:
        answers = [Answer(request=name, instance=self.instances[-1]) for name in self.held]
        self.held.clear()
        return answers


def tokens(available: int, captured: int) -> Reuse:
    return Reuse(available_tokens=available * BLOCK, captured_tokens=captured * BLOCK)


def test_reuse_is_what_was_cached_at_placement_there_and_elsewhere() -> None:
    watch = Watch()
    router = watch.over(ToFirst)(setup("a", "b"))
    router.heard(stored("a", 1), 0.0)
    router.heard(stored("b", 1, 2, 3), 0.0)
    assert router.route(asks("r", 1, 2, 3, 4), 0.0).instance == "a"
    router.heard(stored("a", 2, 3, n=2), 1.0)  # cached later: too late for this one
    router.route(asks("none", 9), 1.0)
    assert watch.reuse == {"r": tokens(3, 1), "none": tokens(0, 0)}


def test_a_held_request_is_placed_when_it_is_released() -> None:
    watch = Watch()
    router = watch.over(Holding)(setup("a", "b"))
    router.route(asks("r", 1, 2), 0.0)
    router.route(asks("no", 1, 2), 0.0)
    assert watch.reuse == {}
    router.heard(stored("b", 1, 2), 0.5)
    assert [answer.instance for answer in router.released(1.0)] == ["b"]
    assert watch.reuse == {"r": tokens(2, 2)}


def test_of_several_gateways_the_first_one_tells_what_is_cached() -> None:
    watch = Watch()
    make = watch.over(ToFirst)
    one, other = make(setup("a")), make(setup("a", gateway="other"))
    other.heard(stored("a", 1), 0.0)  # its link is quicker
    other.route(asks("early", 1), 0.0)
    one.heard(stored("a", 1), 0.1)
    other.route(asks("late", 1), 0.1)
    assert watch.reuse == {"early": tokens(0, 0), "late": tokens(1, 1)}


def test_the_router_s_own_answers_and_events_pass_through() -> None:
    router = Watch().over(ToFirst)(setup("a"))
    router.route(asks("r", 1), 0.0)
    assert router.holding == 0
    assert router.settled(event("r"), 1.0).placed is not None
