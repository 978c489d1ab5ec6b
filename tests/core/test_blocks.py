"""Block keys: fixed vectors, chains, and what must not share a key."""

import timeit

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tokenfleet.core.blocks import (
    NO_PARENT,
    block_keys,
    canonical_block_tokens,
    chain_seed,
    child_key,
    unpacked,
    xor_of,
)

SECRET = b"site secret"


def tokens(count: int, first: int = 0) -> NDArray[np.uint32]:
    return np.arange(first, first + count, dtype=np.uint32)


def test_golden_vectors() -> None:
    """Gateways and agents of other versions and languages compute these very values."""
    plain = chain_seed(SECRET, model="llama")
    full = chain_seed(SECRET, model="llama", adapter="a", cache_salt="x", media=("m",))
    assert (plain, full) == (6189793303851061837, 451360287067111575)
    assert block_keys(tokens(600), seed=full, block_tokens=256).hex() == "272b2453879823c1ccb3d389d9ae8d14"
    assert block_keys(tokens(0), seed=full, block_tokens=256) == b""


def test_a_key_is_the_hash_of_its_parent_and_its_tokens() -> None:
    seed = chain_seed(SECRET, model="m")
    first, second = unpacked(block_keys(tokens(512), seed=seed, block_tokens=256))
    assert first == xxh3_64_intdigest(bytes(8) + tokens(256).tobytes(), seed)
    assert second == xxh3_64_intdigest(int(first).to_bytes(8, "little") + tokens(256, 256).tobytes(), seed)


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 0), (255, 0), (256, 1), (257, 1), (512, 2)])
def test_only_full_blocks_have_a_key(count: int, blocks: int) -> None:
    assert len(block_keys(tokens(count), seed=1, block_tokens=256)) == 8 * blocks


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 8))
def test_a_chain_can_be_gone_on_with(head: int, tail: int, block: int) -> None:
    head -= head % block
    whole = block_keys(tokens(head + tail), seed=7, block_tokens=block)
    first = block_keys(tokens(head), seed=7, block_tokens=block)
    parent = int(unpacked(first)[-1]) if first else NO_PARENT
    assert whole == first + block_keys(tokens(tail, head), seed=7, block_tokens=block, parent=parent)


def test_agents_link_one_block_at_a_time() -> None:
    one = child_key(bytes(8), tokens(256).tobytes(), 3)
    two = child_key(one, tokens(256, 256).tobytes(), 3)
    assert one + two == block_keys(tokens(512), seed=3, block_tokens=256)


def test_fields_never_stand_in_for_one_another() -> None:
    """Adapter `a-116`, image `a-116` and salt `a-116` are three different prefixes, and none is the base."""
    seeds = [
        chain_seed(SECRET, model="m"),
        chain_seed(SECRET, model="m", adapter="a-116"),
        chain_seed(SECRET, model="m", cache_salt="a-116"),
        chain_seed(SECRET, model="m", media=("a-116",)),
        chain_seed(SECRET, model="m", media=("a-", "116")),
        chain_seed(SECRET, model="ma-116"),
        chain_seed(b"other", model="m"),
    ]
    assert len(set(seeds)) == len(seeds)


def test_without_the_secret_no_block_can_be_guessed_not_even_after_a_known_one() -> None:
    dictionary = [tokens(256, start) for start in range(2000)]
    seed = chain_seed(SECRET, model="m")
    keys = unpacked(block_keys(np.concatenate([dictionary[11], dictionary[12]]), seed=seed, block_tokens=256)).tolist()
    known = int(keys[0])
    for guessed_secret in (b"", b"secret"):
        guess = chain_seed(guessed_secret, model="m")
        for words in dictionary:
            for attempt_seed, parent in ((guess, 0), (guess, known), (known, 0), (0, known)):
                assert unpacked(block_keys(words, seed=attempt_seed, block_tokens=256, parent=parent))[0] not in keys


@pytest.mark.parametrize(
    ("sizes", "canonical"),
    [
        ([], 256),
        ([16], 256),
        ([16, 64], 256),
        ([256], 256),
        ([784], 784),
        ([16, 24], 288),
        ([512, 16], 512),
        ([100], 300),
    ],
)
def test_the_canonical_block_holds_whole_blocks_of_every_engine(sizes: list[int], canonical: int) -> None:
    assert canonical_block_tokens(sizes) == canonical


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="≥ 1"):
        canonical_block_tokens([16, 0])


def test_xor_of_keys_forgets_their_order() -> None:
    keys = block_keys(tokens(1024), seed=1, block_tokens=256)
    backwards = unpacked(keys)[::-1].tobytes()
    assert xor_of(keys) == xor_of(backwards) != 0
    assert xor_of(keys + keys) == xor_of(b"") == 0


def test_a_long_prompt_costs_well_under_a_millisecond() -> None:
    prompt = tokens(12_000)
    best_s = min(timeit.repeat(lambda: block_keys(prompt, seed=5, block_tokens=256), number=20, repeat=5)) / 20
    assert best_s < 0.003  # measured 37 µs; ten times the budget of 0.3 ms, so that a busy machine passes
