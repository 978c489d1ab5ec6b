"""Engine blocks to canonical keys: whole blocks, copies, inheritance, net changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.core.blocks import block_keys, chain_seed, unpacked, xor_of
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvEvent
from tokenfleet.core.kvstate import EngineBlocks

SECRET = b"s"
SIZE, CANONICAL = 2, 4  # engine block and canonical block, in tokens


def blocks_of(**more: int) -> EngineBlocks:
    blocks = EngineBlocks(secret=SECRET, model="m", block_tokens=CANONICAL, **more)
    blocks.heard_from_start()
    return blocks


def stored(
    hashes: list[int],
    tokens: list[int],
    parent: int | None = None,
    *,
    adapter: str = "",
    salt: str = "",
    media: tuple[tuple[str, ...], ...] = (),
    size: int = SIZE,
) -> BlockStored:
    packed = np.asarray(tokens, dtype="<u4").tobytes()
    return BlockStored(
        hashes=tuple(hashes), parent=parent, tokens=packed, block_size=size, adapter=adapter, salt=salt, media=media
    )


def removed(*hashes: int) -> BlockRemoved:
    return BlockRemoved(hashes=hashes)


def apply(blocks: EngineBlocks, *events: KvEvent, rank: int = 0) -> None:
    blocks.apply(KvBatch(rank=rank, events=events))


def keys(tokens: list[int], **fields: str) -> bytes:
    seed = chain_seed(SECRET, model="m", **fields)  # type: ignore[arg-type]
    return block_keys(np.asarray(tokens, dtype=np.uint32), seed=seed, block_tokens=CANONICAL)


def key_set(packed: bytes) -> set[int]:
    return set(unpacked(packed).tolist())


def test_a_key_is_stored_when_all_its_engine_blocks_are_there_and_removed_when_the_first_goes() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1], [1, 2]))
    assert blocks.keys() == b""
    apply(blocks, stored([2, 3], [3, 4, 5, 6], parent=1))
    assert blocks.keys() == keys([1, 2, 3, 4])
    apply(blocks, stored([4], [7, 8], parent=3))
    assert key_set(blocks.keys()) == key_set(keys([1, 2, 3, 4, 5, 6, 7, 8]))
    apply(blocks, removed(1))
    assert key_set(blocks.keys()) == key_set(keys([1, 2, 3, 4, 5, 6, 7, 8])[8:])


def test_a_block_that_comes_back_completes_its_canonical_block_again() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2], [1, 2, 3, 4]), removed(1))
    assert blocks.keys() == b""
    apply(blocks, stored([1], [1, 2]))
    assert blocks.keys() == keys([1, 2, 3, 4])


def test_two_suffixes_share_the_engine_blocks_before_them() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2], [1, 2, 3, 4]), stored([5], [9, 9], parent=1))
    assert key_set(blocks.keys()) == key_set(keys([1, 2, 3, 4]) + keys([1, 2, 9, 9]))
    apply(blocks, removed(2))
    assert blocks.keys() == keys([1, 2, 9, 9])
    apply(blocks, removed(1))
    assert blocks.keys() == b""


def test_a_second_copy_keeps_the_block_when_the_first_goes() -> None:
    blocks = blocks_of(blocks_max=100)
    apply(blocks, stored([1, 2], [1, 2, 3, 4]), stored([1, 2], [1, 2, 3, 4]), removed(1, 2))
    assert blocks.keys() == keys([1, 2, 3, 4])
    apply(blocks, removed(2))
    assert blocks.keys() == b""


def test_no_more_copies_are_believed_than_the_engine_has_blocks() -> None:
    """An engine that reports reuse as BlockStored (kv_cache_report_mode=full) removes once."""
    blocks = blocks_of(blocks_max=2)
    apply(blocks, *[stored([1, 2], [1, 2, 3, 4])] * 50, removed(2))
    assert blocks.keys() == b""
    blocks = blocks_of(blocks_max=3)
    apply(blocks, *[stored([1, 2], [1, 2, 3, 4])] * 50)  # one block seems to have two copies
    apply(blocks, stored([3, 4], [5, 6, 7, 8]), removed(1, 2))  # no room for them: they never were
    assert blocks.keys() == keys([5, 6, 7, 8])


def test_children_inherit_adapter_and_salt_along_the_chain() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1], [1, 2], salt="tenant", adapter="a-116"))
    apply(blocks, stored([2, 3, 4], [3, 4, 5, 6, 7, 8], parent=1))
    assert key_set(blocks.keys()) == key_set(keys([1, 2, 3, 4, 5, 6, 7, 8], adapter="a-116", cache_salt="tenant"))


def test_an_adapter_an_image_and_the_base_model_never_share_keys() -> None:
    found: list[bytes] = []
    for extra in ({"adapter": "a-116"}, {}, {"media": (("a-116",), ())}, {"salt": "a-116"}):
        blocks = blocks_of()
        apply(blocks, stored([1, 2], [1, 2, 3, 4], **extra))  # type: ignore[arg-type]
        found.append(blocks.keys())
    assert len(set(found)) == 4
    assert found[0] == keys([1, 2, 3, 4], adapter="a-116")


def test_all_blocks_cleared_is_net_with_what_follows_in_the_same_batch() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2], [1, 2, 3, 4]))
    assert blocks.take() is not None
    apply(blocks, AllBlocksCleared(), stored([7, 8], [5, 6, 7, 8]))
    change = blocks.take()
    assert change is not None
    assert (change.cleared, change.removed, change.stored) == (True, b"", keys([5, 6, 7, 8]))
    assert blocks.keys() == change.stored
    assert blocks.take() is None


def test_stored_and_removed_between_two_takes_is_no_change() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2], [1, 2, 3, 4]), removed(2))
    assert blocks.take() is None
    apply(blocks, stored([2], [3, 4], parent=1))
    assert blocks.take() is not None
    apply(blocks, removed(2), stored([2], [3, 4], parent=1))
    assert blocks.take() is None


def test_the_digest_is_count_and_xor_of_the_keys() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]))
    digest = blocks.digest()
    assert (digest.blocks, digest.xor, digest.state) == (2, xor_of(blocks.keys()), "exact")


def test_a_chain_whose_start_was_not_heard_is_a_lower_bound() -> None:
    blocks = blocks_of()
    apply(blocks, stored([9], [1, 2], parent=77), stored([1, 2], [1, 2, 3, 4]))
    assert (blocks.keys(), blocks.state) == (keys([1, 2, 3, 4]), "approx")
    apply(blocks, AllBlocksCleared())
    assert blocks.state == "exact"


def test_what_is_lost_is_cleared_and_approximate_until_the_engine_clears() -> None:
    blocks = blocks_of()
    apply(blocks, stored([1, 2], [1, 2, 3, 4]))
    blocks.take()
    blocks.lost()
    change = blocks.take()
    assert change is not None
    assert change.cleared
    assert (blocks.keys(), blocks.state, blocks.digest().xor) == (b"", "approx", 0)


@pytest.mark.parametrize("event", [
    BlockStored(hashes=(1, 2), parent=None, tokens=None, block_size=SIZE),
    BlockStored(hashes=(1, 2), parent=None, tokens=b"1234", block_size=SIZE),
    stored([1], [1, 2, 3], size=3),
])  # fmt: skip
def test_blocks_that_no_key_can_be_made_of_give_no_credit(event: BlockStored) -> None:
    blocks = blocks_of()
    apply(blocks, event)
    assert (blocks.keys(), blocks.state) == (b"", "none")


def test_ranks_keep_their_own_blocks_of_the_same_hash() -> None:
    blocks = blocks_of()
    for rank in (0, 1):
        apply(blocks, stored([1, 2], [1, 2, 3, 4]), rank=rank)
    blocks.take()
    apply(blocks, AllBlocksCleared(), rank=0)
    assert (blocks.keys(), blocks.take()) == (keys([1, 2, 3, 4]), None)
    apply(blocks, removed(1), rank=1)
    assert blocks.keys() == b""


CHAINS = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 8], [5, 6, 7]]


def named(prefix: tuple[int, ...]) -> int:
    return int("".join(map(str, prefix)))


@given(st.lists(st.tuples(st.sampled_from(["store", "remove", "clear", "take"]), st.integers(0, 3), st.integers(1, 4))))
def test_a_reader_that_applies_the_changes_holds_the_same_keys(steps: list[tuple[str, int, int]]) -> None:
    """Whatever order blocks come and go in: changes add up to the state, and the state is what is wholly present."""
    blocks, reader, present = blocks_of(), set[int](), dict[tuple[int, ...], int]()
    for act, chain, length in steps:
        path = CHAINS[chain][:length]
        if act == "store":  # a prompt computed: every prefix of it is announced
            prefixes = [tuple(path[: n + 1]) for n in range(len(path))]
            fresh = [prefix for prefix in prefixes if prefix not in present]
            for prefix in fresh:
                parent = named(prefix[:-1]) if len(prefix) > 1 else None
                apply(blocks, stored([named(prefix)], [path[len(prefix) - 1]] * SIZE, parent))
                present[prefix] = 1
        elif act == "remove":
            if tuple(path) in present and not any(
                len(p) > len(path) and p[: len(path)] == tuple(path) for p in present
            ):
                apply(blocks, removed(named(tuple(path))))
                del present[tuple(path)]
        elif act == "clear":
            apply(blocks, AllBlocksCleared())
            present.clear()
        elif (change := blocks.take()) is not None:
            reader = set() if change.cleared else reader
            reader = (reader - key_set(change.removed)) | key_set(change.stored)
            assert reader == key_set(blocks.keys())
    whole = {p for p in present if len(p) % 2 == 0}
    expected = [key_set(keys([token for token in p for _ in range(SIZE)])[-8:]) for p in whole]
    assert key_set(blocks.keys()) == set[int]().union(*expected)
    assert blocks.digest().xor == xor_of(blocks.keys())
    apply(blocks, *[removed(named(p)) for p in sorted(present, key=len)])
    assert blocks._blocks == {}  # nothing is kept for blocks that are gone
