"""Queues by priority: what goes out when, and where, by hand-made facts."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tests.sim.setups import asks, event, setup
from tokenfleet.core.records import OutcomeKind
from tokenfleet.sim.baselines.priority import Pools, Priority
from tokenfleet.sim.router import Answer

LONG, CHAT, BATCH = 20_000, 1_000, 2_500


class Gateway:
    """One gateway over the named instances."""

    def __init__(self, *instances: str, make: type[Priority] | type[Pools] = Priority) -> None:
        self.router = make(setup(*instances))
        self._classes: dict[str, str] = {}

    def ask(self, *names: str, tokens: int = 0, at_s: float = 0.0) -> None:
        """Requests named after their class: c1, l1, b1."""
        for name in names:
            request_class, usual = {"c": ("chat", CHAT), "l": ("long", LONG), "b": ("batch", BATCH)}[name[0]]
            self._classes[name] = request_class
            request = replace(asks(name, tokens=tokens or usual), declared_class=request_class)
            assert self.router.route(request, at_s) == Answer(request=name)

    def out(self, at_s: float = 0.0) -> list[str]:
        return [f"{answer.request} {answer.instance}" for answer in self.router.released(at_s)]

    def names(self, at_s: float = 0.0) -> list[str]:
        return [word.split()[0] for word in self.out(at_s)]

    def hear(self, *names: str, kind: OutcomeKind = "first_token", at_s: float = 0.0) -> None:
        for name in names:
            told = replace(event(name, kind), request_class=self._classes[name])
            assert self.router.settled(told, at_s) == told


def numbered(kind: str, count: int) -> Sequence[str]:
    return [f"{kind}{number}" for number in range(count)]


def test_chat_goes_before_long_before_batch_and_each_class_in_order() -> None:
    gateway = Gateway("x")
    gateway.ask("b1", "l1", "c2", "c1", tokens=100)
    assert gateway.names() == ["c2", "c1", "l1", "b1"]
    assert gateway.router.holding == 0


def test_a_request_goes_to_the_open_instance_with_the_least_work() -> None:
    gateway = Gateway("x", "y", "z")
    gateway.ask("c1", tokens=8_000)
    gateway.ask("c2", tokens=4_000)
    gateway.ask("c3", tokens=2_000)
    gateway.ask("c4", tokens=500)
    places = dict(word.split() for word in gateway.out())
    assert {places[name] for name in ("c1", "c2", "c3")} == {"x", "y", "z"}
    assert places["c4"] == places["c3"]


@pytest.mark.parametrize(("kind", "backlog_max_s"), [("c", 0.6), ("l", 0.3), ("b", 0.05)])
def test_a_class_waits_while_all_instances_have_more_work_than_its_bound(kind: str, backlog_max_s: float) -> None:
    gateway = Gateway("x")
    gateway.ask("c0", tokens=20_000)  # 0.93 s of work
    assert gateway.names() == ["c0"]
    gateway.ask(f"{kind}1", tokens=100)
    work_s = 5 * 0.0075 + 20_000 * 3.78e-5 + 4.94e-10 * 20_000**2 / 2  # five steps of 4,096 tokens
    assert gateway.names(work_s - backlog_max_s - 0.001) == []
    assert gateway.router.holding == 1
    assert gateway.names(work_s - backlog_max_s + 0.001) == [f"{kind}1"]


def test_work_ends_with_the_first_token_and_no_earlier_than_it_takes() -> None:
    gateway = Gateway("x")
    gateway.ask("c0", tokens=20_000)
    assert gateway.names() == ["c0"]
    gateway.ask("b1")
    gateway.hear("c0", at_s=0.2)
    assert gateway.names(0.2) == ["b1"]
    late = Gateway("x")
    late.ask("c0", tokens=4_000)
    late.ask("c1", tokens=12_000)
    assert late.names() == ["c0", "c1"]
    late.ask("b1")
    assert late.names(5.0) == []  # c0 is overdue, yet c1's work is still to come


@pytest.mark.parametrize(("kind", "running_max"), [("c", 200), ("l", 6), ("b", 24)])
def test_so_many_of_a_class_run_on_an_instance(kind: str, running_max: int) -> None:
    gateway = Gateway("x")
    names = numbered(kind, running_max + 1)
    gateway.ask(*names, tokens=100)
    sent: list[str] = []
    while now := gateway.names():
        gateway.hear(*now)
        sent += now
    assert sent == names[:-1]
    gateway.hear(names[0], kind="finished")
    assert gateway.names() == names[-1:]


def test_two_long_prompts_at_most_wait_for_their_first_token_on_an_instance() -> None:
    gateway = Gateway("x")
    gateway.ask("l1", "l2", "l3", tokens=100)
    assert gateway.names() == ["l1", "l2"]
    gateway.hear("l1")
    assert gateway.names() == ["l3"]


@pytest.mark.parametrize(("kind", "share", "output"), [("c", 0.97, 211), ("l", 0.90, 343), ("b", 0.80, 291)])
def test_a_class_may_fill_the_memory_up_to_its_share(kind: str, share: float, output: int) -> None:
    total = 1_228_800
    fits = Gateway("x")
    fits.ask(f"{kind}1", tokens=int(share * total) - output)
    assert fits.names() == [f"{kind}1"]
    too_large = Gateway("x")
    too_large.ask(f"{kind}1", tokens=int(share * total) - output + 1)
    assert too_large.names() == []


def test_memory_is_free_again_when_a_request_has_ended() -> None:
    gateway = Gateway("x")
    gateway.ask("l1", tokens=1_000_000)
    assert gateway.names() == ["l1"]
    gateway.hear("l1")
    gateway.ask("l2", tokens=1_000_000)
    assert gateway.names() == []
    gateway.hear("l1", kind="finished")
    assert gateway.names() == ["l2"]


def test_the_second_in_line_begins_when_the_first_is_through() -> None:
    gateway = Gateway("x")
    gateway.ask("c1", "c2", tokens=8_000)  # 0.33 s of work each
    assert gateway.names() == ["c1", "c2"]
    gateway.hear("c1", at_s=0.5)
    gateway.ask("b1")
    assert gateway.names(0.7) == []
    assert gateway.names(0.8) == ["b1"]


def test_what_decodes_beside_it_makes_a_prompt_take_longer() -> None:
    opens_s: dict[int, float] = {}  # for batch, behind a prompt of 3,950: one step of 4,096 tokens, or two beside 150
    for decoding in (0, 150):
        gateway = Gateway("x")
        decodes = numbered("c", decoding)
        gateway.ask(*decodes, tokens=16)
        while now := gateway.names():
            gateway.hear(*now)
        gateway.ask("l1", tokens=3_950)
        assert gateway.names() == ["l1"]
        gateway.ask("b1")
        opens_s[decoding] = next(at_s for at_s in (ms / 1_000 for ms in range(1_000)) if gateway.names(at_s))
    assert opens_s[150] == pytest.approx(opens_s[0] + 0.0075, abs=0.0011)


def test_who_waits_in_one_class_holds_up_its_own_class_only() -> None:
    gateway = Gateway("x")
    gateway.ask("l1", tokens=1_200_000)  # fits nowhere
    gateway.ask("l2", tokens=100)
    gateway.ask("b1", tokens=100)
    assert gateway.names() == ["b1"]


def test_a_request_that_ends_without_a_first_token_leaves_nothing_behind() -> None:
    gateway = Gateway("x")
    gateway.ask("c1", tokens=20_000)
    assert gateway.names() == ["c1"]
    gateway.hear("c1", kind="failed")
    gateway.ask("b1")
    assert gateway.names() == ["b1"]


def test_of_two_pools_one_is_chat_s_and_the_other_has_no_bounds_for_chat_s_sake() -> None:
    gateway = Gateway("w", "x", "y", "z", make=Pools)
    gateway.ask(*numbered("c", 9), tokens=100)
    gateway.ask(*numbered("b", 70), *numbered("l", 4), tokens=100)
    places: dict[str, set[str]] = {"c": set(), "l": set(), "b": set()}
    counts = dict.fromkeys(places, 0)
    while now := gateway.out():
        for word in now:
            name, instance = word.split()
            places[name[0]].add(instance)
            counts[name[0]] += 1
            gateway.hear(name)
    assert places["c"] == {"w", "x"}
    assert places["l"] | places["b"] == {"y", "z"}
    assert counts == {"c": 9, "l": 4, "b": 70}  # more than 24 of batch on one of them
    gateway.hear("c0", "b0", "l0", kind="finished")
