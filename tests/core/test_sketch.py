"""The sketch: never misses, rarely invents, travels in parts."""

import numpy as np
import pytest
from msgspec import msgpack

from tests.builders import keys
from tokenfleet.core.records import SketchChunk
from tokenfleet.core.sketch import KEYS_MAX, Sketch, Sketches, assemble


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def chunks(sketch: Sketch, **facts: object) -> tuple[SketchChunk, ...]:
    known: dict[str, object] = {"site": "c", "pool": "large-chat@c", "cluster": "k", "epoch": 1, "n": 1}
    return sketch.chunks(**(known | facts))  # pyright: ignore[reportArgumentType]


def test_a_million_blocks_fit_two_megabytes_at_the_stated_false_positive_rate() -> None:
    held = words(KEYS_MAX, 1)
    sketch = Sketch.of(held)
    assert len(sketch.bits) <= 2_000_000
    assert sketch.holds(held).all()
    absent = 500_000
    measured = sketch.holds(words(absent, 2)).sum() / absent
    assert sketch.false_positive_rate == pytest.approx(9.4e-4, rel=0.02)
    assert measured == pytest.approx(sketch.false_positive_rate, abs=5 * (9.4e-4 / absent) ** 0.5)


def test_keys_beyond_the_most_get_no_credit() -> None:
    many = words(KEYS_MAX + 100, 3)
    sketch = Sketch.of(many)
    assert sketch.keys == KEYS_MAX
    assert sketch.holds(many[KEYS_MAX:]).mean() < 0.1


def test_a_prefix_ends_at_its_first_missing_block() -> None:
    sketch = Sketch.of(keys(11, 22, 44, 55))
    assert sketch.prefix_hits(keys(11, 22, 33, 44)) == 2
    assert sketch.prefix_hits(keys(11, 22)) == 2
    assert sketch.prefix_hits(keys(33, 11)) == 0
    assert sketch.prefix_hits(b"") == 0


def test_an_empty_sketch_holds_nothing() -> None:
    empty = Sketch.of(b"")
    assert empty.prefix_hits(keys(0, 1, 2)) == 0
    assert empty.false_positive_rate == 0.0
    assert assemble(chunks(empty)) == empty


def test_chunks_fit_a_batch_and_make_up_the_sketch_in_any_order() -> None:
    sketch = Sketch.of(words(600_000, 4))
    parts = chunks(sketch, site="s" * 256, pool="p" * 256)
    assert len(parts) > 1
    assert all(len(msgpack.encode(part)) <= 512 * 1024 for part in parts)
    assert assemble(parts[::-1]) == sketch
    assert assemble(parts[1:]) is None
    assert assemble(()) is None


def test_only_a_whole_sketch_counts_and_an_older_one_changes_nothing() -> None:
    table = Sketches()
    old, new = Sketch.of(words(300_000, 5)), Sketch.of(words(300_000, 6))
    new_prefix = words(300_000, 6)[:5].astype("<u8").tobytes()
    for part in chunks(old, n=1):
        table.heard(part)
    first, *rest = chunks(new, n=2)
    table.heard(first)
    assert table.prefix_hits("c", "large-chat@c", new_prefix) == 0
    for part in chunks(old, n=1):
        table.heard(part)
    for part in rest:
        table.heard(part)
    assert table.prefix_hits("c", "large-chat@c", new_prefix) == 5


def test_another_cluster_replaces_and_a_forgotten_site_is_gone() -> None:
    table = Sketches()
    for part in chunks(Sketch.of(keys(1, 2)), epoch=9, n=9):
        table.heard(part)
    for part in chunks(Sketch.of(keys(3, 4)), cluster="another", epoch=0, n=1):
        table.heard(part)
    assert table.prefix_hits("c", "large-chat@c", keys(3, 4)) == 2
    assert table.prefix_hits("c", "large-chat@c", keys(1)) == 0
    table.retain(frozenset({"b"}))
    assert table.prefix_hits("c", "large-chat@c", keys(3, 4)) == 0
