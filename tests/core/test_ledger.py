"""Ledger: exactly what was placed and has not ended, whatever the order, the repeats and the losses."""

import math
from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.builders import ended, first_token, placed, placements, progress
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.load import Load
from tokenfleet.core.records import PlacementEvent

Word = Callable[..., PlacementEvent]


def ledger(*events: PlacementEvent, now_s: float = 100.0) -> Ledger:
    known = Ledger()
    known.hear(placements(*events), partition=0, now_s=now_s)
    return known


def listen(known: Ledger, start_s: float, for_s: int, *, partition: int = 0, live: bool = True) -> None:
    for second in range(for_s + 1):
        known.advance(partition, start_s + second, live=live)


# -- what an entry adds up to -------------------------------------------------------------------------------------


def test_a_placement_counts_until_its_first_token_as_work_and_until_its_end_as_kv() -> None:
    known = ledger(placed(work_s=0.5, uncached_tokens=700, kv_tokens=900))
    assert known.load("a", 100.0) == Load(
        backlog_s=0.5,
        queued=1,
        queued_tokens=700,
        kv_held_tokens=900,
        class_running={"chat": 1},
        class_queued={"chat": 1},
        class_kv_tokens={"chat": 900},
    )
    known.apply(first_token(), partition=0, now_s=100.4)
    assert known.load("a", 100.4) == Load(
        decoding=1,
        context_tokens=900,
        kv_held_tokens=900,
        class_running={"chat": 1},
        class_kv_tokens={"chat": 900},
    )
    known.apply(ended(), partition=0, now_s=101.0)
    assert known.load("a", 101.0) == Load()


def test_the_heads_work_wears_off_with_time_and_nobody_elses() -> None:
    known = ledger(placed("d1", work_s=0.5), placed("d2", work_s=2.0, age_s=-0.0), now_s=100.0)
    assert known.load("a", 100.2).backlog_s == pytest.approx(2.3)
    assert known.load("a", 109.0).backlog_s == pytest.approx(2.0)
    known.apply(first_token("d1"), partition=0, now_s=109.0)
    assert known.load("a", 109.0).backlog_s == pytest.approx(2.0)
    assert known.load("a", 110.5).backlog_s == pytest.approx(0.5)


@pytest.mark.parametrize("work_s", [math.nan, math.inf, -math.inf, -1.0, 1e300])
def test_work_that_is_no_number_of_seconds_is_taken_for_the_mean(work_s: float) -> None:
    known = ledger(placed("d1", work_s=0.2), placed("d2", work_s=0.4), placed("d3", work_s=work_s))
    assert known.load("a", 100.0).backlog_s == pytest.approx(0.9)
    assert known.mean_work.samples == 2


@pytest.mark.parametrize("age_s", [math.nan, math.inf, -math.inf, -1.0])
def test_an_age_that_is_no_number_of_seconds_is_none(age_s: float) -> None:
    known = ledger(placed("d1", work_s=2.0, age_s=age_s))
    assert known.load("a", 100.5).backlog_s == pytest.approx(1.5)


def test_a_first_token_out_of_turn_does_not_restart_the_head() -> None:
    known = ledger(placed("d1", work_s=2.0, age_s=1.0), placed("d2", work_s=1.0))
    known.apply(first_token("d2"), partition=0, now_s=100.5)
    assert known.load("a", 100.5).backlog_s == pytest.approx(0.5)


def test_a_placement_is_as_old_as_its_report_says() -> None:
    assert ledger(placed(work_s=1.0, age_s=0.4)).load("a", 100.0).backlog_s == pytest.approx(0.6)


def test_own_placements_tell_how_late_others_are_heard() -> None:
    known = Ledger()
    known.hear(placements(placed("d0")), partition=0, now_s=90.0)
    assert known.lag_s == 0.0
    known.apply(placed("d1"), partition=0, now_s=100.0)
    known.apply(placed("d2"), partition=0, now_s=100.0)
    for read_s in (100.2, 160.0):  # read once more after a fault of the broker
        known.hear(placements(placed("d1"), placed("d0")), partition=0, now_s=read_s)
        assert known.lag_s == pytest.approx(0.2)
    known.hear(placements(placed("d2")), partition=0, now_s=100.7)
    assert known.lag_s == pytest.approx(0.25)


def test_loads_are_kept_apart() -> None:
    known = ledger(placed("d1", "a"), placed("d2", "b", request_class="long"))
    assert known.load("b", 100.0).class_running == {"long": 1}
    assert known.load("c", 100.0) == Load()
    assert sorted(entry.decision for entry in known.entries()) == ["d1", "d2"]


# -- who ends whom ------------------------------------------------------------------------------------------------


def test_three_picks_that_time_out_cancel_and_finish_three_times_leave_nothing() -> None:
    known = ledger(placed("d1"), placed("d2"), placed("d3"))
    for decision in ("d1", "d2", "d3", "d3", "d3"):
        known.apply(ended(decision), partition=0, now_s=101.0)
        assert len(known) >= 0
    assert known.load("a", 101.0) == Load()


def test_a_second_placement_of_the_same_attempt_does_not_replace_the_first() -> None:
    known = ledger(placed("d1", "a", request="r"), placed("d2", "b", request="r"))
    assert len(known) == 2


@pytest.mark.parametrize("word", [first_token, progress])
def test_an_event_that_names_a_decision_ends_its_rivals(word: Word) -> None:
    known = ledger(placed("d1", "a", request="r"), placed("d2", "b", request="r"))
    known.apply(word("d1", "a", request="r"), partition=0, now_s=100.1)
    assert ["d1" in known, "d2" in known] == [True, False]
    known.apply(placed("d2", "b", request="r"), partition=0, now_s=100.2)
    assert "d2" not in known


def test_another_attempt_is_another_entry() -> None:
    known = ledger(placed("d1", request="r", attempt=0), first_token("d2", request="r", attempt=1))
    assert len(known) == 2


def test_an_end_that_overtakes_its_placement_still_ends_it() -> None:
    assert len(ledger(ended(), placed())) == 0


def test_an_entry_lost_on_the_way_comes_back_with_its_progress() -> None:
    known = ledger(progress(kv_tokens=5000))
    assert known.load("a", 100.0).kv_held_tokens == 5000


# -- silence ------------------------------------------------------------------------------------------------------


def test_silence_ends_an_entry_only_while_its_partition_is_read_at_its_end() -> None:
    known = ledger(placed())
    listen(known, 100.0, 600, live=False)
    listen(known, 1000.0, 55)
    assert len(known) == 1
    known.advance(0, 9000.0, live=True)  # a pause of this process is no silence
    assert len(known) == 1
    listen(known, 9000.0, 10)
    assert len(known) == 0
    assert known.load("a", 9010.0) == Load()


def test_progress_keeps_an_entry_alive() -> None:
    known = ledger(placed())
    for start in range(100, 400, 10):
        listen(known, start, 10)
        known.apply(progress(), partition=0, now_s=start + 10.0)
    assert len(known) == 1


def test_another_partition_read_at_its_end_ages_nothing_here() -> None:
    known = ledger(placed())
    listen(known, 100.0, 300, partition=1)
    assert len(known) == 1


# -- order and repeats --------------------------------------------------------------------------------------------

DECISIONS = ("d1", "d2", "d3", "d4")
WORDS = (placed, first_token, progress, ended)
events = st.lists(st.tuples(st.sampled_from(DECISIONS), st.sampled_from(WORDS)), max_size=14)


def told(said: list[tuple[str, Word]]) -> list[PlacementEvent]:
    """d1 and d2 are rival answers to one request, on two instances; d3 and d4 stand alone."""
    where = {"d1": ("a", "r1"), "d2": ("b", "r1"), "d3": ("a", "r3"), "d4": ("b", "r4")}
    return [word(name, where[name][0], request=where[name][1]) for name, word in said]


@given(said=events, data=st.data())
def test_any_order_and_any_repeats_give_the_same_ledger(said: list[tuple[str, Word]], data: st.DataObject) -> None:
    straight = ledger(*told(said))
    shuffled = data.draw(st.permutations(said + [each for each in said if data.draw(st.booleans())]))
    other = ledger(*told(shuffled))
    for instance in ("a", "b"):
        assert straight.load(instance, 100.0) == other.load(instance, 100.0)


class Storm(RuleBasedStateMachine):
    """P23: whatever is said in whatever order, the sums are those of a naive book, and after all ends exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.live: dict[str, str] = {}  # decision → instance
        self.gone: set[str] = set()

    @rule(number=st.integers(0, 30), word=st.sampled_from((placed, first_token, progress)))
    def say(self, number: int, word: Word) -> None:
        name = f"d{number:02}"
        self.ledger.apply(word(name, f"i{number % 3}", work_s=0.1 * number), partition=number % 3, now_s=1.0)
        if name not in self.gone:
            self.live[name] = f"i{number % 3}"

    @rule(number=st.integers(0, 30))
    def end(self, number: int) -> None:
        name = f"d{number:02}"
        self.ledger.apply(ended(name, f"i{number % 3}"), partition=number % 3, now_s=1.0)
        self.gone.add(name)
        self.live.pop(name, None)

    @invariant()
    def sums_are_the_books(self) -> None:
        counted = Counter(self.live.values())
        for instance in ("i0", "i1", "i2"):
            load = self.ledger.load(instance, 1.0)
            assert load.queued + load.decoding == counted[instance]
            assert load.kv_held_tokens == 1200 * counted[instance]
            assert min(load.backlog_s, load.queued_tokens, load.context_tokens) >= 0
        assert len(self.ledger) == len(self.live)

    def teardown(self) -> None:
        for name in list(self.live):
            self.ledger.apply(ended(name, self.live[name]), partition=0, now_s=2.0)
        assert all(self.ledger.load(f"i{k}", 2.0) == Load() for k in range(3))


Storm.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
test_storm = pytest.mark.timeout(120)(Storm.TestCase)


def test_a_hundred_thousand_events_in_disorder_leave_exactly_nothing() -> None:
    rng, known, said = Random(7), Ledger(), []
    for number in range(20_000):
        name, instance = f"d{number}", f"i{number % 7}"
        last = rng.choice((ended, ended, None))  # None: the end is lost, silence will tell
        said += [
            (number + rng.random() * 50, word(name, instance)) for word in (placed, first_token, progress, progress)
        ]
        if last:
            said += [(number + rng.random() * 80, last(name, instance))] * rng.choice((1, 3))
    assert len(said) > 100_000
    for _, event in sorted(said, key=lambda each: each[0]):
        known.apply(event, partition=0, now_s=1.0)
    listen(known, 1.0, 62)
    assert len(known) == 0
    assert all(known.load(f"i{k}", 100.0) == Load() for k in range(7))


def test_kv_tokens_are_those_of_what_has_not_ended() -> None:
    ledger = Ledger()
    for name, tokens in (("d1", 100), ("d2", 20)):
        ledger.apply(placed(name, "a", request=name, kv_tokens=tokens), partition=0, now_s=1.0)
    assert ledger.kv_tokens("a") == 120
    ledger.apply(ended("d1", "a", request="d1"), partition=0, now_s=2.0)
    assert (ledger.kv_tokens("a"), ledger.kv_tokens("b")) == (20, 0)
