"""Capacity: one site's instances, from shard messages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import beat, order, row, shard
from tokenfleet.core.beat import AGE_UNKNOWN_S, CEILINGS, cleaned
from tokenfleet.core.capacity import CapacityTable, liveness
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import CapacityRow, CapacityShard, Histogram

POLICY = LivenessPolicy()


def table(*shards: CapacityShard, live: bool = True, now_s: float = 100.0) -> CapacityTable:
    known = CapacityTable()
    for offset, each in enumerate(shards):
        known.apply(each, offset=offset, now_s=now_s, live=live)
    return known


def names(known: CapacityTable) -> list[str]:
    return [each.beat.instance for each in known.rows()]


def judged(of: CapacityRow, *, after_s: float = 0.0, live: bool = True) -> tuple[str, bool]:
    found = liveness(table(shard(of), live=live).rows()[0], 100.0 + after_s, POLICY)
    return found.availability, found.suspect


def test_rows_come_in_the_order_of_their_names() -> None:
    assert names(table(shard(beat("c"), beat("a")), shard(beat("b"), shard=1))) == ["a", "b", "c"]


def test_an_instance_absent_from_all_shards_is_gone() -> None:
    known = table(shard(beat("a"), beat("b")), shard(beat("c"), shard=1), shard(beat("b"), n=2))
    assert names(known) == ["b", "c"]
    assert known.row("a") is None


def test_who_is_gone_is_told_once_no_other_shard_lists_it() -> None:
    known = table(shard(beat("a"), beat("b")), shard(beat("b"), shard=1))
    assert known.apply(shard(n=2), offset=2, now_s=100.0, live=True).gone == ("a",)
    assert known.apply(shard(shard=1, n=2), offset=2, now_s=100.0, live=True).gone == ("b",)


def test_a_deposed_writer_is_refused() -> None:
    known = table(shard(beat("old"), epoch=5, n=90), shard(beat("new"), epoch=9, n=1))
    assert not known.apply(shard(beat("zombie"), epoch=5, n=91), offset=99, now_s=101.0, live=True).accepted
    assert names(known) == ["new"]


def test_a_writers_first_message_is_its_own_epoch() -> None:
    known = CapacityTable()
    known.apply(shard(beat("old"), epoch=7, n=50), offset=60, now_s=100.0, live=True)
    assert known.apply(shard(beat("new"), epoch=-1, n=1), offset=61, now_s=100.1, live=True).accepted
    assert not known.apply(shard(beat("old"), epoch=7, n=51), offset=62, now_s=100.2, live=True).accepted
    assert known.apply(shard(beat("newer"), epoch=61, n=2), offset=63, now_s=100.3, live=True).accepted
    assert known.orders() == {0: ("kafka-1", 61, 2)}


def test_a_message_read_twice_does_not_make_its_rows_younger() -> None:
    known = table(shard(row(beat("a"), age_s=0.5)))
    assert not known.apply(shard(row(beat("a"), age_s=0.5)), offset=0, now_s=150.0, live=True).accepted
    assert known.rows()[0].age_s(150.0) == pytest.approx(50.5)


def test_another_cluster_replaces_everything_known() -> None:
    known = table(shard(beat("old"), epoch=9, n=9))
    assert known.apply(shard(beat("new"), cluster="kafka-2", epoch=-1), offset=0, now_s=101.0, live=True).accepted
    assert names(known) == ["new"]


def test_a_rows_age_adds_up_terms_of_one_clock_each() -> None:
    known = table(shard(row(beat("a"), age_s=0.4), telemetry_age_s=0.2), now_s=1000.0)
    assert known.rows()[0].age_s(1002.0) == pytest.approx(2.4)
    assert known.age_s(1002.0) == pytest.approx(2.2)


def test_before_any_shard_the_age_is_unknown() -> None:
    assert CapacityTable().age_s(5.0) is None


def test_what_was_read_while_catching_up_is_suspect_until_the_next_message() -> None:
    known = table(shard(beat("a")), live=False)
    assert liveness(known.rows()[0], 100.0, POLICY).suspect
    assert known.age_s(100.0) is None
    known.apply(shard(beat("a"), n=2), offset=2, now_s=100.1, live=True)
    assert not liveness(known.rows()[0], 100.1, POLICY).suspect


@pytest.mark.parametrize(
    ("of", "after_s", "want"),
    [
        (row(beat()), 0.0, ("ready", False)),
        (row(beat(refused=True)), 0.0, ("out", False)),
        (row(beat(scrape_failed_for_s=10.5)), 0.0, ("out", False)),
        (row(beat(scrape_failed_for_s=9.5)), 0.0, ("ready", False)),
        (row(beat(), agent_silent_s=9.0), 0.5, ("ready", False)),
        (row(beat(), agent_silent_s=9.0), 1.5, ("ready", True)),
        (row(beat(scrape_failed_for_s=10.5), agent_silent_s=11.0), 0.0, ("ready", True)),
        (row(beat(refused=True), agent_silent_s=11.0), 0.0, ("out", False)),
        (row(beat(), age_s=None), 0.0, ("ready", True)),
        (row(beat(), age_s=11.0), 0.0, ("ready", True)),
        (row(beat(), age_s=math.nan), 0.0, ("ready", True)),
        (row(beat(), age_s=-30.0), 0.0, ("ready", True)),
        (row(beat(), agent_silent_s=-1e9), 5e8, ("ready", True)),
        (row(beat(state="draining")), 0.0, ("draining", False)),
        (row(beat(state="sleeping")), 0.0, ("sleeping", False)),
        (row(beat(state="starting")), 0.0, ("starting", False)),
    ],
)
def test_who_is_out_and_who_is_only_suspect(of: CapacityRow, after_s: float, want: tuple[str, bool]) -> None:
    assert judged(of, after_s=after_s) == want


def test_a_silent_shard_makes_its_rows_suspect_and_keeps_them() -> None:
    known = table(shard(beat("a"), beat("b")))
    found = [liveness(each, 111.0, POLICY) for each in known.rows()]
    assert [(each.availability, each.suspect) for each in found] == [("ready", True), ("ready", True)]


def test_of_two_claims_to_one_instance_the_later_heard_stays_and_both_are_told() -> None:
    stale = shard(row(beat("a", waiting=1), agent="old", n=900, agent_silent_s=8.0), shard=0)
    fresh = shard(row(beat("a", waiting=2), agent="new", n=3, agent_silent_s=0.1), shard=1)
    for pair in ((stale, fresh), (fresh, stale)):
        known = CapacityTable()
        known.apply(pair[0], offset=0, now_s=100.0, live=True)
        assert known.apply(pair[1], offset=0, now_s=100.0, live=True).conflicts == ("a",)
        assert known.rows()[0].agent == "new"
    known.apply(shard(shard=1, n=2), offset=1, now_s=100.2, live=True)
    assert known.rows()[0].agent == "old"


@given(
    said=st.lists(
        st.tuples(st.integers(0, 2), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9), max_size=4)),
        max_size=12,
    )
)
def test_the_table_is_the_last_message_of_each_shard(said: list[tuple[int, dict[str, int]]]) -> None:
    known, last = CapacityTable(), dict[int, dict[str, int]]()
    for n, (number, listed) in enumerate(said, start=1):
        rows = (row(beat(name), agent=f"{number}", n=n, agent_silent_s=float(s)) for name, s in listed.items())
        applied = known.apply(shard(*rows, shard=number, n=n), offset=n, now_s=100.0, live=True)
        last[number] = listed
        claims = {name: [k for k, listed in last.items() if name in listed] for name in "abcd"}
        assert names(known) == [name for name in "abcd" if claims[name]]
        for each in known.rows():
            ways = claims[each.beat.instance]
            assert last[each.shard][each.beat.instance] == min(last[k][each.beat.instance] for k in ways)
        assert applied.conflicts == tuple(name for name in "abcd" if name in listed and len(claims[name]) > 1)


def test_a_rolling_update_leaves_one_ready_whatever_the_order() -> None:
    first = shard(beat("v1"), beat("v2", state="starting"), n=1)
    last = shard(beat("v1", state="draining"), beat("v2"), n=2)
    for messages in ((first, last), (last, first), (last, last, first)):
        found = {each.beat.instance: liveness(each, 100.0, POLICY).availability for each in table(*messages).rows()}
        assert found == {"v1": "draining", "v2": "ready"}


def test_an_engine_that_comes_back_with_another_block_size_is_believed() -> None:
    known = table(
        shard(row(beat("a", block_size=32), n=1), n=1),
        shard(row(beat("a", boot="boot-2", block_size=64), n=2), n=2),
    )
    found = known.rows()[0].beat
    assert (found.boot, found.block_size) == ("boot-2", 64)


def test_an_idle_engines_division_by_zero_is_unknown_and_the_rest_is_kept() -> None:
    idle = beat("a", running=0.0, in_flight_tokens=math.nan, ttft=Histogram(sum_s=math.nan, count=0.0))
    found = table(shard(idle)).rows()[0].beat
    assert (found.running, found.in_flight_tokens, found.ttft) == (0.0, None, None)


@given(
    values=st.fixed_dictionaries({name: st.none() | st.floats() for name in CEILINGS}),
    age_s=st.floats(),
    failed_s=st.floats(),
)
def test_only_believable_values_are_left(values: dict[str, float | None], age_s: float, failed_s: float) -> None:
    found = cleaned(beat("a", **values, age_s=age_s, scrape_failed_for_s=failed_s))
    for name, most in CEILINGS.items():
        left = getattr(found, name)
        assert left is None or (left == values[name] and 0 <= left <= most)
    assert found.age_s == age_s if 0 <= age_s <= 1e9 else found.age_s == AGE_UNKNOWN_S
    assert math.isfinite(found.scrape_failed_for_s)
    assert cleaned(found) == found


def test_sizes_of_zero_are_unknown() -> None:
    found = cleaned(beat("a", block_size=0, kv_total_blocks=0))
    assert (found.block_size, found.kv_total_blocks) == (None, None)


def test_a_good_heartbeat_is_not_copied() -> None:
    good = beat("a")
    assert cleaned(good) is good


def test_order_is_kept_with_the_row() -> None:
    assert table(shard(row(beat("a"), n=7))).rows()[0].order == order(7)
