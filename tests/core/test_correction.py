"""Correction: what an engine counts and no entry explains is foreign, and nothing counts twice."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import beat, ended, placed, placements, row, shard
from tests.core.test_ledger import ledger
from tokenfleet.core.capacity import CapacityTable, InstanceRow
from tokenfleet.core.correction import Corrections
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.policy import LedgerPolicy
from tokenfleet.core.records import PlacementEvent


def seen(
    n: int, *, now_s: float, running: float | None = 0.0, waiting: float | None = 0.0, **facts: object
) -> InstanceRow:
    table = CapacityTable()
    of = row(beat("a", running=running, waiting=waiting, **facts), n=n, age_s=0.5)
    table.apply(shard(of, n=n), offset=n, now_s=now_s, live=True)
    return table.rows()[0]


def corrections(known: Ledger) -> Corrections:
    return Corrections(known, LedgerPolicy())


def test_health_and_telemetry_never_zero_the_ledger() -> None:
    known = ledger(*(placed(f"d{k:02}") for k in range(50)))
    view = corrections(known)
    for n in range(1, 21):
        view.heard(seen(n, now_s=100.0 + n, running=50.0), 100.0 + n)
    view.heard(seen(21, now_s=121.0, running=None, scrape_failed_for_s=1.0, refused=True), 121.0)
    view.heard(seen(22, now_s=122.0, running=50.0), 122.0)
    found = view.standing(seen(22, now_s=122.0, running=50.0)).at(122.0)
    assert (found.queued, found.foreign, len(known)) == (50, 0, 50)


def test_more_at_the_engine_than_was_placed_is_foreign_at_the_mean_work() -> None:
    known = ledger(placed(work_s=0.4, uncached_tokens=1000, kv_tokens=2000), now_s=50.0)
    view = corrections(known)
    heard = seen(1, now_s=100.0, running=3.0, waiting=2.0)
    view.heard(heard, 100.0)
    found = view.standing(heard).at(100.0)
    assert (found.foreign, found.queued, found.decoding) == (4, 3, 2)
    assert found.backlog_s == pytest.approx(0.8)
    assert found.kv_held_tokens == pytest.approx(10_000)
    assert known.load("a", 100.0).queued == 1


def test_what_this_replica_placed_since_the_scrape_left_comes_on_top() -> None:
    known = ledger()
    for name in ("d1", "d2"):
        known.apply(placed(name), partition=0, now_s=100.0)
    view = corrections(known)
    heard = seen(1, now_s=100.1, running=3.0)
    view.heard(heard, 100.1)
    assert view.standing(heard).at(100.1).foreign == 3


def test_what_another_replica_placed_may_have_been_counted_whenever_it_is_heard() -> None:
    known = ledger(placed("d1"), now_s=100.0)
    view = corrections(known)
    heard = seen(1, now_s=100.1, running=3.0)
    view.heard(heard, 100.1)
    assert view.standing(heard).at(100.1).foreign == 2
    for name, left in (("d2", 1), ("d3", 0), ("d4", 0)):
        known.hear(placements(placed(name)), partition=0, now_s=100.2)
        assert view.standing(heard).at(100.2).foreign == left
    assert view.standing(heard) == known.standing("a")


def others_place(known: Ledger, view: Corrections, *, beats: int, work_s: float) -> InstanceRow:
    """One placement of another replica, ended at once, and one heartbeat in each of so many seconds."""
    for n in range(1, beats + 1):
        known.hear(placements(placed(f"o{n}", work_s=work_s)), partition=0, now_s=200.0 + n)
        known.hear(placements(ended(f"o{n}")), partition=0, now_s=200.0 + n)
        view.heard(seen(n, now_s=200.0 + n), 200.0 + n)
    return seen(beats, now_s=200.0 + beats)


def test_what_others_place_and_nobody_has_told_yet_is_expected() -> None:
    """As many seconds of work as they placed there lately in the time that their words take."""
    known = ledger()
    known.apply(placed("d1", "b"), partition=0, now_s=100.0)
    known.hear(placements(placed("d1", "b")), partition=0, now_s=100.2)  # own words are read back 0.2 s later
    view = corrections(known)
    heard = others_place(known, view, beats=200, work_s=0.5)
    assert view.standing(heard).load.backlog_s == pytest.approx(0.5 * 0.2, rel=0.01)
    assert view.standing(heard).load.queued == 0


def test_own_placements_are_not_expected_they_are_known() -> None:
    known = ledger()
    view = corrections(known)
    for n in range(1, 20):
        known.apply(placed(f"d{n}"), partition=0, now_s=100.0 + n)
        known.hear(placements(placed(f"d{n}")), partition=0, now_s=100.2 + n)
        known.apply(ended(f"d{n}"), partition=0, now_s=100.3 + n)
        view.heard(seen(n, now_s=100.5 + n), 100.5 + n)
    assert view.standing(seen(19, now_s=119.5)) == known.standing("a")


def test_nothing_is_expected_that_would_have_been_heard() -> None:
    known = ledger()
    view = corrections(known)
    heard = others_place(known, view, beats=200, work_s=0.5)
    assert view.standing(heard) == known.standing("a")


def test_the_expectation_fades_when_others_place_elsewhere() -> None:
    known = ledger()
    known.apply(placed("d1", "b"), partition=0, now_s=100.0)
    known.hear(placements(placed("d1", "b")), partition=0, now_s=100.2)
    view = corrections(known)
    others_place(known, view, beats=100, work_s=5.0)
    heard = seen(200, now_s=400.0)
    view.heard(heard, 400.0)
    assert 0.0 < view.standing(heard).load.backlog_s < 0.01


def test_a_request_that_ended_since_the_scrape_is_not_foreign() -> None:
    known = ledger(placed("d1"), placed("d2"), now_s=50.0)
    known.apply(ended("d1"), partition=0, now_s=100.0)
    view = corrections(known)
    heard = seen(1, now_s=100.1, running=2.0)
    view.heard(heard, 100.1)
    assert view.standing(heard).at(100.1).foreign == 0
    known.apply(ended("d2"), partition=0, now_s=100.2)
    assert view.standing(heard).at(100.2).foreign == 0


def test_a_request_whose_end_overtook_it_was_counted() -> None:
    known = ledger()
    view = corrections(known)
    heard = seen(1, now_s=100.1, running=1.0)
    view.heard(heard, 100.1)
    known.hear(placements(ended("d1")), partition=0, now_s=100.2)
    known.hear(placements(placed("d1")), partition=0, now_s=100.3)
    assert view.standing(heard) == known.standing("a")


class Stay(NamedTuple):
    """One sequence on the engine, its times in quarters of a second, and how long its words travel."""

    ours: bool
    placed: int
    stays: int
    placed_travels: int
    end_travels: int


QUARTERS = st.integers(0, 20)
STAYS = st.builds(Stay, st.booleans(), QUARTERS, st.integers(1, 20), QUARTERS, QUARTERS)
SCRAPES = st.lists(st.tuples(QUARTERS, st.integers(0, 8)), min_size=1, max_size=5)


@settings(max_examples=200, deadline=None)
@given(stays=st.lists(STAYS, max_size=8), scrapes=SCRAPES)
def test_whatever_is_heard_when_no_sequence_counts_twice(stays: list[Stay], scrapes: list[tuple[int, int]]) -> None:
    """Foreign is at most what was counted and not heard of; when all was heard, nothing is."""
    known, table = Ledger(), CapacityTable()
    view = Corrections(known, LedgerPolicy(correction_beats=1000))  # phantoms are another matter
    names = {f"d{number}": stay for number, stay in enumerate(stays)}
    heard_of: set[str] = set()

    def hear(event: PlacementEvent, now_s: float, *, ours: bool) -> None:
        if ours:
            known.apply(event, partition=0, now_s=now_s)
        else:
            known.hear(placements(event), partition=0, now_s=now_s)
        if event.kind == "placed":
            heard_of.add(event.decision)

    def beat_of(n: int, at: int, now_s: float) -> None:
        running = float(sum(stay.placed <= at < stay.placed + stay.stays for stay in stays))
        of = row(beat("a", running=running), n=n, age_s=now_s - at / 4)
        table.apply(shard(of, n=n), offset=n, now_s=now_s, live=True)
        view.heard(table.rows()[0], now_s)

    def foreign_max(at: int) -> int:
        return sum(
            stay.placed <= at < stay.placed + stay.stays and name not in heard_of for name, stay in names.items()
        )

    words: list[tuple[int, int, Callable[[float], None]]] = []
    for name, stay in names.items():
        came = stay.placed if stay.ours else stay.placed + stay.placed_travels
        words.append((came, 0, partial(hear, placed(name), ours=stay.ours)))
        words.append((stay.placed + stay.stays + stay.end_travels, 0, partial(hear, ended(name), ours=stay.ours)))
    judged = sorted(scrapes)
    for n, (at, travels) in enumerate(judged, 1):
        words.append((at + travels, n, partial(beat_of, n, at)))

    for at, _, say in sorted(words, key=lambda word: word[:2]):
        say(at / 4)
        for seen_row in table.rows():
            standing = view.standing(seen_row)
            assert standing.load.foreign <= foreign_max(judged[seen_row.order.n - 1][0])
    (seen_row,) = table.rows()
    assert view.standing(seen_row) == known.standing("a")


def test_fewer_at_the_engine_counts_only_after_three_heartbeats_and_takes_the_oldest() -> None:
    known = ledger(placed("d1", kv_tokens=10_000), now_s=50.0)
    known.apply(placed("d2", kv_tokens=500), partition=0, now_s=60.0)
    view = corrections(known)
    for n in (1, 2):
        view.heard(seen(n, now_s=100.0 + n, running=1.0), 100.0 + n)
        view.heard(seen(n, now_s=100.0 + n, running=1.0), 100.1 + n)  # one heartbeat, in many shard messages
        assert view.standing(seen(n, now_s=100.0 + n)).at(100.0 + n).kv_held_tokens == 10_500
    heard = seen(3, now_s=103.0, running=1.0)
    view.heard(heard, 103.0)
    assert view.standing(heard).at(103.0).kv_held_tokens == 500
    assert len(known) == 2


def test_a_new_boot_is_an_engine_count_of_zero() -> None:
    known = ledger(placed("d1"), placed("d2"), now_s=50.0)
    view = corrections(known)
    for n in (1, 2, 3):
        view.heard(seen(n, now_s=100.0 + n, boot="boot-2"), 100.0 + n)
    known.apply(placed("d3"), partition=0, now_s=103.1)
    assert view.standing(seen(3, now_s=103.2, boot="boot-2")).at(103.2).queued == 1


@given(running=st.floats(), waiting=st.floats(), used=st.floats())
def test_no_gauge_can_make_a_load_negative_or_unknown(running: float, waiting: float, used: float) -> None:
    known = ledger(placed(), now_s=50.0)
    view = corrections(known)
    heard = seen(1, now_s=100.0, running=running, waiting=waiting, kv_used_blocks=used)
    view.heard(heard, 100.0)
    found = view.standing(heard).at(100.0)
    assert all(
        math.isfinite(value) and value >= 0
        for value in (found.backlog_s, found.queued_tokens, found.context_tokens, found.kv_held_tokens, found.foreign)
    )
