"""Prefix: credit for what is cached, none for what may not be."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import digest, keys, snapshot, stored
from tokenfleet.core.block_table import BlockTable, slots
from tokenfleet.core.expected import Expected
from tokenfleet.core.kv_stream import DOUBT_MAX_S
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import KvRecord


def index(*records: KvRecord) -> PrefixIndex:
    known = PrefixIndex()
    for record in records:
        known.apply(record)
    return known


def test_the_longest_unbroken_prefix_counts() -> None:
    known = index(stored("a", [1, 2, 3, 9]), stored("b", [1, 3, 4]), stored("c", [2, 3]), stored("d", [1, 2, 3, 4, 5]))
    assert known.hits(keys(1, 2, 3, 4)) == {"a": 3, "b": 1, "d": 4}
    assert known.hits(keys(7)) == {}
    assert known.hits(b"") == {}


def test_ten_thousand_blocks_are_walked_to_the_end() -> None:
    long = list(range(1, 10_001))
    assert index(stored("a", long), stored("b", long[:5000])).hits(keys(*long)) == {"a": 10_000, "b": 5000}


def test_removed_blocks_give_no_credit_and_leave_nothing_behind() -> None:
    known = index(stored("a", [1, 2]), stored("b", [1, 2]), stored("a", [], n=2, removed=keys(1)))
    assert known.hits(keys(1, 2)) == {"b": 2}
    known.apply(stored("b", [], n=2, removed=keys(1, 2)))
    known.apply(stored("a", [], n=3, removed=keys(2)))
    assert (known.hits(keys(1, 2)), known.blocks_total) == ({}, 0)


def test_a_repeated_record_and_a_repeated_block_change_nothing() -> None:
    known = index(stored("a", [1, 2]), stored("a", [1, 2]), stored("a", [2, 2, 3], n=2))
    assert known.blocks("a") == 3
    assert known.verify("a", digest([1, 2, 3]), boot="boot-1", now_s=1.0) == "exact"
    known.apply(stored("a", [], n=3, removed=keys(2)))
    assert known.hits(keys(1, 2)) == {"a": 1}


def test_an_instance_that_was_never_heard_of_has_nothing() -> None:
    known = PrefixIndex()
    assert (known.state("a"), known.blocks("a"), known.block_tokens("a")) == ("none", 0, 0)
    assert known.verify("a", digest([1]), boot="boot-1", now_s=1.0) == "none"


# -- gaps and snapshots -------------------------------------------------------------------------------------------


def test_a_gap_takes_the_credit_until_the_next_complete_snapshot() -> None:
    known = index(stored("a", [1]), stored("a", [3], n=3))
    assert (known.state("a"), known.hits(keys(1))) == ("none", {})
    known.apply(stored("a", [4], n=4))
    assert known.hits(keys(4)) == {}
    known.apply(snapshot("a", [1, 2], n=4, part=0, parts=2))
    assert known.state("a") == "none"
    known.apply(snapshot("a", [3, 4], n=4, part=1, parts=2))
    assert known.hits(keys(1, 2, 3, 4)) == {"a": 4}
    known.apply(stored("a", [5], n=5))
    assert known.hits(keys(1, 2, 3, 4, 5)) == {"a": 5}


def test_a_reader_that_comes_late_starts_with_a_snapshot() -> None:
    known = index(stored("a", [8], n=57), snapshot("a", [1, 2], n=57))
    assert known.hits(keys(1, 2)) == {"a": 2}
    assert index(snapshot("a", [1, 2], n=57)).hits(keys(1)) == {"a": 1}


def test_changes_between_the_parts_of_a_snapshot_are_not_lost() -> None:
    known = index(
        snapshot("a", [1, 2], n=57, part=0, parts=2),
        stored("a", [4], n=58, removed=keys(2)),
        snapshot("a", [3], n=57, part=1, parts=2),
    )
    assert known.verify("a", digest([1, 3, 4]), boot="boot-1", now_s=1.0) == "exact"
    assert known.hits(keys(1, 2)) == {"a": 1}


def test_a_snapshot_that_misses_a_change_on_its_way_mends_nothing() -> None:
    known = index(stored("a", [8], n=50), snapshot("a", [1], n=48), stored("a", [9], n=51))
    assert known.state("a") == "none"


def test_an_old_snapshot_does_not_take_back_what_is_known() -> None:
    known = index(stored("a", [1]), stored("a", [2], n=2), snapshot("a", [1], n=1), snapshot("a", [7], n=1, boot="old"))
    assert known.hits(keys(1, 2)) == {"a": 2}


def test_parts_of_two_snapshots_are_not_mixed() -> None:
    known = index(
        stored("a", [0], n=9),
        snapshot("a", [1], n=9, part=0, parts=2),
        snapshot("a", [4], n=10, part=1, parts=2),
        snapshot("a", [2], n=9, part=1, parts=2),
    )
    assert known.state("a") == "none"


# -- lives --------------------------------------------------------------------------------------------------------


def test_a_new_boot_and_a_clear_forget_everything() -> None:
    for last in (stored("a", [5], n=2, boot="boot-2"), stored("a", [5], n=2, cleared=True)):
        known = index(stored("a", [1, 2]), last)
        assert known.hits(keys(1)) == {}
        assert known.hits(keys(5)) == {"a": 1}


def test_an_engine_that_returns_with_another_block_size_starts_anew_and_is_believed() -> None:
    known = index(stored("a", [1, 2], block_tokens=256), stored("b", [1], block_tokens=256))
    known.apply(stored("a", [11], n=2, boot="boot-2", block_tokens=512))
    assert known.hits(keys(1, 2)) == {"b": 1}
    assert known.hits(keys(11)) == {"a": 1}
    assert (known.block_tokens("a"), known.block_tokens("b")) == (512, 256)


def test_an_agents_new_life_starts_from_nothing_and_its_old_one_is_not_heard() -> None:
    known = index(stored("a", [1, 2], n=1, claim=4), stored("a", [3], n=1, claim=9), stored("a", [4], n=2, claim=4))
    assert known.hits(keys(1)) == known.hits(keys(4)) == {}
    assert known.hits(keys(3)) == {"a": 1}


def test_another_cluster_replaces_what_is_known() -> None:
    known = index(stored("a", [1], n=7, claim=900), stored("a", [3], cluster="kafka-2"))
    assert known.hits(keys(1)) == {}
    assert known.hits(keys(3)) == {"a": 1}


def test_a_boot_that_telemetry_shows_first_gives_no_credit_for_the_old_ones_blocks() -> None:
    known = index(stored("a", [1, 2]))
    assert known.verify("a", digest([]), boot="boot-2", now_s=1.0) == "none"
    assert known.hits(keys(1)) == {}
    known.apply(stored("a", [3], n=2, boot="boot-2"))
    assert known.hits(keys(3)) == {"a": 1}


def test_a_dropped_instance_gives_no_credit_and_whoever_comes_next_inherits_none() -> None:
    known = index(stored("a", [1]), stored("b", [1]))
    known.drop("a")
    known.drop("a")
    assert known.hits(keys(1)) == {"b": 1}
    for n in range(2, 40):
        known.apply(stored("b", [n], n=n))
    known.apply(stored("c", [1]))
    assert known.hits(keys(1)) == {"b": 1, "c": 1}


# -- digests ------------------------------------------------------------------------------------------------------


def test_a_digest_that_was_just_passed_agrees() -> None:
    known = index(stored("a", [1]), stored("a", [2], n=2), stored("a", [3], n=3))
    assert known.verify("a", digest([1, 2]), boot="boot-1", now_s=1.0) == "exact"


def test_a_digest_that_is_reached_soon_agrees() -> None:
    known = index(stored("a", [1]))
    assert known.verify("a", digest([1, 2]), boot="boot-1", now_s=1.0) == "exact"
    known.apply(stored("a", [2, 3], n=2))
    known.apply(stored("a", [], n=3, removed=keys(3)))
    assert known.verify("a", digest([1, 2, 4]), boot="boot-1", now_s=1.0 + DOUBT_MAX_S) == "exact"


def test_a_digest_that_is_never_reached_takes_the_credit_until_the_next_snapshot() -> None:
    known = index(stored("a", [1, 2]))
    assert known.verify("a", digest([1]), boot="boot-1", now_s=1.0) == "exact"
    assert known.verify("a", digest([1]), boot="boot-1", now_s=1.0 + DOUBT_MAX_S) == "none"
    assert known.hits(keys(1)) == {}
    known.apply(stored("a", [3], n=2))
    assert known.state("a") == "none"
    known.apply(snapshot("a", [1, 3], n=2))
    assert known.hits(keys(1, 3)) == {"a": 2}
    assert known.verify("a", digest([1, 3]), boot="boot-1", now_s=9.0) == "exact"


def test_a_state_passed_long_ago_is_no_excuse() -> None:
    known = index(stored("a", [1]), stored("a", [2], n=2))
    for second in range(5):
        known.verify("a", digest([1, 2]), boot="boot-1", now_s=float(second))
    for second in range(5, 9):
        known.verify("a", digest([1]), boot="boot-1", now_s=float(second))
    assert known.state("a") == "none"


def test_a_lost_clear_shows_in_the_next_heartbeat() -> None:
    known = index(stored("a", [1, 2]))
    for second in range(6):
        known.verify("a", digest([1, 2]), boot="boot-1", now_s=float(second))
    assert known.verify("a", digest([]), boot="boot-1", now_s=6.0) == "none"
    assert known.hits(keys(1)) == {}


def test_an_approximate_stream_says_so() -> None:
    known = index(stored("a", [1], state="approx"))
    assert known.state("a") == "approx"
    known.apply(stored("a", [], n=2, state="none"))
    assert known.hits(keys(1)) == {}


def test_a_census_names_the_blocks_of_those_asked_for_with_credit_the_most_held_first() -> None:
    known = index(
        stored("a", [1, 2]), stored("b", [2, 3]), stored("c", [2, 9]), stored("d", [7]), stored("d", [8], n=3)
    )
    assert known.census(["a", "b", "d", "unknown"]).keys() == keys(2, 3, 1)
    assert known.census([]).keys() == b""


# -- the table under it -------------------------------------------------------------------------------------------


def test_a_flood_is_bounded_and_its_author_loses_credit() -> None:
    known = PrefixIndex(keys_max=1000)
    known.apply(stored("honest", range(1, 101)))
    mine: list[int] = []
    for n in range(1, 100):
        new = list(range(n * 1000, n * 1000 + 500))
        mine += new
        known.apply(stored("flood", new, n=n))
    assert known.blocks_total <= 1000
    for second in range(4):
        known.verify("flood", digest(mine), boot="boot-1", now_s=float(second))
    assert known.state("flood") == "none"
    assert known.hits(keys(*range(1, 101))) == {"honest": 100}


def test_retired_slots_are_swept_and_used_again() -> None:
    table = BlockTable(keys_max=10_000)
    stays, first = table.open(), table.open()
    table.store(stays, keys(1, 2))
    table.store(first, keys(2, 3, 4))
    table.retire(first)
    assert table.open() not in (stays, first)
    table.sweep(2)
    table.store(stays, keys(3))
    table.sweep(100)
    assert table.open() == first
    assert len(table) == 3
    assert table.planes(keys(1, 2, 3), 1 << stays, Expected()) == [1 << stays, 1 << stays]  # 3 blocks


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from("+-x~"), st.sets(st.integers(1, 12), max_size=6)), max_size=40
    )
)
def test_the_table_says_what_a_set_per_holder_says(steps: list[tuple[int, str, set[int]]]) -> None:
    table = BlockTable(keys_max=1000)
    held = {table.open(): set[int]() for _ in range(4)}
    for which, act, some in steps:
        slot = sorted(held)[which]
        packed = keys(*some)
        if act == "+":
            assert table.store(slot, packed).blocks == len(some - held[slot])
            held[slot] |= some
        elif act == "-":
            gone = some & held[slot]
            assert table.remove(slot, packed).xor == int(np.bitwise_xor.reduce(np.array([0, *gone], dtype="<u8")))
            held[slot] -= some
        elif act == "x":
            table.retire(slot)
            del held[slot]
            held[table.open()] = set()
        else:
            table.sweep(3)
        among = sum(1 << each for each in held)
        wanted = list(range(1, 13))
        planes = table.planes(keys(*wanted), among, Expected())
        found = Counter(slot for bit, plane in enumerate(planes) for slot in slots(plane) for _ in range(1 << bit))
        naive = {s: next((n for n, key in enumerate(wanted) if key not in have), 12) for s, have in held.items()}
        assert found == {s: n for s, n in naive.items() if n}


@pytest.mark.parametrize("blocks", [1, 2, 3, 127, 128, 255, 256, 257, 1000])
def test_prefixes_of_any_length_are_told_to_the_block(blocks: int) -> None:
    prompt = range(1, blocks + 1)
    held = {f"i-{n:03d}": min(n * 7 % 300, blocks) for n in range(70)} | {"all": blocks}
    known = index(*[stored(name, prompt[:depth]) for name, depth in held.items() if depth])
    assert known.hits(keys(*prompt)) == {name: depth for name, depth in held.items() if depth}


@pytest.mark.parametrize("seed", range(5))
def test_a_lossy_shuffled_stream_never_gives_credit_for_what_is_not_there(seed: int) -> None:
    """Records are lost and repeated; whatever the index credits, the agent holds, once a digest was agreed."""
    rng, known = Random(seed), PrefixIndex()
    held: set[int] = set()
    for n in range(1, 400):
        add = {rng.randrange(1, 60) for _ in range(5)} - held
        cut = {key for key in held if rng.random() < 0.1}
        held = (held - cut) | add
        record = stored("a", sorted(add), n=n, removed=keys(*sorted(cut)))
        for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 2))):
            known.apply(record)
        if n % 40 == 0:
            for part, some in enumerate((sorted(held)[::2], sorted(held)[1::2])):
                known.apply(snapshot("a", some, n=n, part=part, parts=2))
            assert known.state("a") == "exact"
        heard = known.hits(keys(*sorted(held)))
        if known.order("a")[1] == n and known.state("a") != "none":
            assert heard == ({"a": len(held)} if held else {})
