"""KV events: the recorded frames of a real vLLM, and the dialects of others."""

import base64
import contextlib
import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import builders as facts
from tokenfleet.adapters.engines.kv_events import PAYLOAD_BYTES_MAX, decode_batch, normalised
from tokenfleet.core.blocks import block_keys, chain_seed, unpacked
from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch
from tokenfleet.core.kvstate import EngineBlocks
from tokenfleet.core.prefix import PrefixIndex

FIXTURES = Path(__file__).parent.parent / "fixtures"
FRAMES = [
    [base64.b64decode(frame) for frame in json.loads(line)]
    for line in (FIXTURES / "vllm-0.32.0.kvevents.jsonl").read_text().splitlines()
]


def decoded(*events: Any, rank: list[int] | None = None) -> KvBatch:
    return decode_batch(msgpack.packb([1.5, list(events), *(rank or [])]))


def test_each_frame_of_a_real_vllm_is_one_chain_of_fifteen_blocks() -> None:
    for topic, sequence, payload in FRAMES:
        assert (topic, int.from_bytes(sequence, "big") in (1, 2, 3)) == (b"kv@127.0.0.1:18200@tiny", True)
        batch = decode_batch(payload)
        (event,) = batch.events
        assert isinstance(event, BlockStored)
        assert (batch.rank, event.block_size, event.parent, event.group) == (0, 32, None, 0)
        assert (event.adapter, event.salt, event.media) == ("", "", ())
        assert len(event.hashes) == len(set(event.hashes)) == 15
        assert event.tokens is not None
        assert len(event.tokens) == 4 * 480


def test_a_gateway_names_the_same_keys_as_the_agent_of_a_real_vllm() -> None:
    """Frame by frame: what the agent makes of the events is what a gateway makes of the prompt's tokens."""
    for block_tokens in (32, 64, 256):
        blocks = EngineBlocks(secret=b"s", model="tiny", block_tokens=block_tokens)
        expected: set[int] = set()
        for _, _, payload in FRAMES:
            batch = decode_batch(payload)
            blocks.apply(batch)
            (event,) = batch.events
            assert isinstance(event, BlockStored)
            prompt = np.frombuffer(event.tokens or b"", dtype="<u4")
            seed = chain_seed(b"s", model="tiny")
            expected |= set(unpacked(block_keys(prompt, seed=seed, block_tokens=block_tokens)).tolist())
            assert set(unpacked(blocks.keys()).tolist()) == expected
        assert len(expected) == 3 * (480 // block_tokens)


def test_the_array_form_of_older_engines_says_the_same_as_the_map() -> None:
    as_map = {
        "type": "BlockStored",
        "block_hashes": [7, 8],
        "parent_block_hash": 6,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    as_array = ["BlockStored", [7, 8], 6, [1, 2, 3, 4], 2, None, "GPU", None, [None, None], 0, "full_attention"]
    assert decoded(as_map) == decoded(as_array)
    assert decoded(as_array[:6]) == decoded(as_map)  # before medium was added
    assert decoded(["BlockRemoved", [7]], ["AllBlocksCleared"]) == decoded(
        {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"}, {"type": "AllBlocksCleared"}
    )


@pytest.mark.parametrize(("rank", "expected"), [([], 0), ([None], 0), ([3], 3)])
def test_the_rank_may_be_absent(rank: list[int], expected: int) -> None:
    assert decoded(rank=rank).rank == expected


@pytest.mark.parametrize(
    ("wire", "u64"),
    [(5, 5), (-1, 2**64 - 1), (b"\x00" * 24 + b"\x01" + b"\x00" * 6 + b"\x02", 2**56 + 2), (2**64 - 1, 2**64 - 1)],
)
def test_hashes_become_u64(wire: Any, u64: int) -> None:
    assert normalised(wire) == u64
    assert decoded({"type": "BlockRemoved", "block_hashes": [wire]}).events == (BlockRemoved(hashes=(u64,)),)


def stored(**fields: Any) -> BlockStored:
    whole = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2} | fields
    (event,) = decoded(whole).events
    assert isinstance(event, BlockStored)
    return event


def test_a_zero_parent_is_none() -> None:
    assert stored(parent_block_hash=0).parent is None
    assert stored(parent_block_hash=-2).parent == 2**64 - 2


def test_an_adapter_in_the_extra_keys_is_not_an_image_and_an_image_is_not_an_adapter() -> None:
    adapter = stored(lora_name="a-116", lora_id=4, extra_keys=[["a-116"], ["a-116"]])
    assert (adapter.adapter, adapter.salt, adapter.media) == ("a-116", "", ())
    image = stored(extra_keys=[[["a-116", 0]], None])
    assert (image.adapter, image.salt, image.media) == ("", "", (("a-116",), ()))
    both = stored(lora_name="a-116", extra_keys=[["a-116", ["cat", 1], "salt"], ["a-116", ["cat", -1]]])
    assert (both.adapter, both.salt, both.media) == ("a-116", "salt", (("cat",), ("cat",)))
    unnamed = stored(lora_id=4, extra_keys=[["a-116"], ["a-116"]])
    assert (unnamed.adapter, unnamed.media) == ("a-116", ())
    assert stored(lora_id=4).adapter == "#4"


def test_the_salt_stands_in_the_first_block_of_a_prompt_only() -> None:
    assert stored(extra_keys=[["tenant"], None]).salt == "tenant"
    assert stored(cache_salt="tenant").salt == "tenant"
    later = stored(parent_block_hash=9, extra_keys=[["tenant"], None])
    assert (later.salt, later.media) == ("", (("tenant",), ()))  # an older engine's image


@pytest.mark.parametrize("ids", [None, [], [[1, 2], [3, 4]], [-1, 2], [2**32], ["a"], [1.5], [True]])
def test_tokens_that_are_absent_or_none_are_not_guessed(ids: Any) -> None:
    assert stored(token_ids=ids).tokens is None


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "x": 1},
        ["Heartbeat", 1, 2, 3],
        {"no type": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "medium": "CPU"},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1, "locality": "REMOTE"},
        {"type": "BlockStored", "block_hashes": [1], "block_size": 1, "kv_cache_spec_kind": "sliding_window"},
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"},
    ],
)
def test_what_is_unknown_or_elsewhere_is_left_out_and_the_rest_of_the_batch_kept(event: Any) -> None:
    assert decoded(event, {"type": "AllBlocksCleared"}).events == (AllBlocksCleared(),)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([1.0]),
        msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [1]}]]),
        msgpack.packb([1.0, [["BlockStored", [1], None, [1], 0]]]),
        msgpack.packb([1.0, [{"type": "BlockRemoved", "block_hashes": [None]}]]),
        b"\x91" * 5000,
        bytes(PAYLOAD_BYTES_MAX + 1),
    ],
)
def test_what_can_not_be_read_says_so(payload: bytes) -> None:
    with pytest.raises(BadRecordError):
        decode_batch(payload)


@given(st.binary(max_size=200), st.sampled_from([frame[2] for frame in FRAMES]), st.integers(0, 900))
def test_broken_bytes_raise_nothing_else(noise: bytes, payload: bytes, at: int) -> None:
    for broken in (noise, payload[:at] + noise + payload[at + len(noise) :], payload[:at]):
        with contextlib.suppress(BadRecordError):
            decode_batch(broken)


def test_only_a_request_for_the_adapter_hits_the_blocks_stored_for_it() -> None:
    """From the engine's bytes to what four requests for the same tokens find."""
    blocks = EngineBlocks(secret=b"s", model="m", block_tokens=4)
    blocks.heard_from_start()
    whole = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": [1, 2, 3, 4], "block_size": 2}
    blocks.apply(decoded(whole | {"lora_name": "a-116", "lora_id": 4, "extra_keys": [["a-116"], ["a-116"]]}))
    index = PrefixIndex()
    index.apply(facts.stored("engine", unpacked(blocks.keys()).tolist()))

    def hits(**named: Any) -> dict[str, int]:
        tokens = np.array([1, 2, 3, 4], dtype=np.uint32)
        return index.hits(block_keys(tokens, seed=chain_seed(b"s", model="m", **named), block_tokens=4))

    assert hits(adapter="a-116") == {"engine": 1}
    assert hits() == {}
    assert hits(media=["a-116"]) == {}
    assert hits(cache_salt="a-116") == {}
