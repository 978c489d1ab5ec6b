"""What an agent tells of an instance's blocks, read by what every replica reads it with."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.adapters.engines import kv_log
from tokenfleet.adapters.engines.kv_log import PART_BYTES_MAX, KvLog
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvEvent
from tokenfleet.core.kvstate import EngineBlocks
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import KvDelta, KvRecord, KvSnapshot


def new_blocks() -> EngineBlocks:
    blocks = EngineBlocks(secret=b"s", model="m", block_tokens=1)
    blocks.heard_from_start()
    return blocks


def apply(blocks: EngineBlocks, *events: KvEvent) -> None:
    blocks.apply(KvBatch(rank=0, events=events))


def stored(*names: int) -> BlockStored:
    """Blocks of one token each, in a chain of their own."""
    tokens = np.asarray(names, dtype="<u4").tobytes()
    return BlockStored(hashes=names, parent=None, tokens=tokens, block_size=1)


def changes(log: KvLog, blocks: EngineBlocks, *, boot: str = "b", claim: int = 1) -> list[KvRecord]:
    return list(log.changes(blocks, boot=boot, cluster="c", claim=claim))


def snapshot(log: KvLog, blocks: EngineBlocks, *, boot: str = "b", claim: int = 1) -> list[KvRecord]:
    return list(log.snapshot(blocks, boot=boot, cluster="c", claim=claim))


def numbers(records: list[KvRecord]) -> list[tuple[str, int]]:
    return [("delta" if isinstance(record, KvDelta) else "snapshot", record.order.n) for record in records]


def test_the_first_word_is_a_snapshot_then_only_changes_are_told() -> None:
    log, blocks = KvLog("i"), new_blocks()
    assert numbers(changes(log, blocks)) == [("snapshot", 1)]
    assert changes(log, blocks) == []
    apply(blocks, stored(1))
    assert numbers(changes(log, blocks)) == [("delta", 2)]
    assert changes(log, blocks) == []


def test_a_periodic_snapshot_has_the_number_of_the_last_change() -> None:
    log, blocks = KvLog("i"), new_blocks()
    assert numbers(snapshot(log, blocks)) == [("snapshot", 1)]
    assert numbers(snapshot(log, blocks)) == [("snapshot", 1)]
    apply(blocks, stored(1))
    assert numbers(snapshot(log, blocks)) == [("delta", 2), ("snapshot", 2)]


def test_a_new_boot_and_a_new_claim_begin_with_a_snapshot() -> None:
    log, blocks = KvLog("i"), new_blocks()
    changes(log, blocks)
    records = changes(log, blocks, boot="b2")
    assert (numbers(records), records[0].boot) == ([("snapshot", 2)], "b2")
    assert numbers(changes(log, blocks, boot="b2", claim=9)) == [("snapshot", 1)]


def test_a_change_of_state_is_told() -> None:
    log, blocks = KvLog("i"), new_blocks()
    changes(log, blocks)
    blocks.lost()
    (record,) = changes(log, blocks)
    assert (record.state, log.told.state) == ("approx", "approx")


def test_snapshots_come_in_parts_below_a_records_bound() -> None:
    log, blocks = KvLog("i"), new_blocks()
    names = range(PART_BYTES_MAX // 8 + 1)
    apply(blocks, stored(*names))
    records = changes(log, blocks)
    assert [(r.part, r.parts) for r in records if isinstance(r, KvSnapshot)] == [(0, 2), (1, 2)]
    assert all(len(r.keys) <= PART_BYTES_MAX for r in records if isinstance(r, KvSnapshot))
    index = PrefixIndex()
    for record in records:
        index.apply(record)
    assert index.blocks("i") == len(names)


def test_a_change_too_large_for_a_record_is_told_as_a_snapshot() -> None:
    log, blocks = KvLog("i"), new_blocks()
    changes(log, blocks)
    apply(blocks, stored(*range(PART_BYTES_MAX // 8 + 1)))
    assert numbers(changes(log, blocks)) == [("snapshot", 2)] * 2


STEPS = st.one_of(
    st.tuples(st.just("store"), st.integers(1, 6)),
    st.tuples(st.just("remove"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["clear", "lost", "tell", "tell but lose", "snapshot", "boot", "claim"]), st.just(0)),
)


@given(st.lists(STEPS))
def test_a_reader_agrees_after_every_record_that_arrives_and_never_claims_more_than_was_told(
    steps: list[tuple[str, int]],
) -> None:
    log, blocks, index = KvLog("i"), new_blocks(), PrefixIndex()
    boot, claim = 0, 1
    for act, name in [*steps, ("tell", 0)]:
        match act:
            case "store":
                apply(blocks, stored(name))
            case "remove":
                apply(blocks, BlockRemoved(hashes=(name,)))
            case "clear":
                apply(blocks, AllBlocksCleared())
            case "lost":
                blocks.lost()
            case "boot":
                boot += 1
            case "claim":
                claim += 1
            case "tell but lose":
                if changes(log, blocks, boot=str(boot), claim=claim):
                    log.tell_whole()
            case _:
                tell = snapshot if act == "snapshot" else changes
                for record in tell(log, blocks, boot=str(boot), claim=claim):
                    index.apply(record)
                assert index.blocks("i") == log.told.blocks
                assert index.verify("i", log.told, boot=str(boot), now_s=0.0) == log.told.state


def test_the_bound_of_a_part_leaves_room_for_the_rest_of_the_record() -> None:
    assert kv_log.PART_BYTES_MAX % 8 == 0
    assert kv_log.PART_BYTES_MAX + 4096 <= 512 * 1024
