"""KV events on the wire: the engines' msgpack in all its dialects, under strict limits, to core.kvevents.

A batch is `[time, events, rank?]`. An event is a map with a `type`, or in older engines an array whose first element
is the type and whose fields follow in the order of their introduction. Foreign bytes: nothing is trusted to be there.
"""

from typing import Any, cast

import msgpack
import numpy as np

from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved, BlockStored, KvBatch, KvEvent

PAYLOAD_BYTES_MAX = 16 * 1024 * 1024  # a step that stores 100,000 tokens is about 0.6 MB
ITEMS_MAX = 2_000_000
U64 = 2**64 - 1
HASH_BYTES = 8
DEVICE_MEDIA = frozenset({"", "GPU"})  # what lies on CPU or disk must be loaded first and gives no prefix for free
WHOLE_ATTENTION = frozenset({"", "full_attention", "mla_attention"})  # a window's blocks are no prefix

STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")

Fields = dict[str, Any]


def decode_batch(payload: bytes) -> KvBatch:
    """The batch of one message; events of unknown type, other media or partial attention are left out.

    Raises BadRecordError if the payload is no batch or an event of a known type can't be read: its change is lost.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise BadRecordError(f"KV events: {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}")
    try:
        unpacked: Any = msgpack.unpackb(
            payload,
            strict_map_key=False,
            max_str_len=PAYLOAD_BYTES_MAX,
            max_bin_len=PAYLOAD_BYTES_MAX,
            max_array_len=ITEMS_MAX,
            max_map_len=256,
            max_ext_len=0,
        )
        _time, events, *rest = cast(list[Any], unpacked)
        decoded = [_event(event) for event in events]
        rank = int(rest[0] or 0) if rest else 0
    except (ValueError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise BadRecordError(f"KV events: {type(error).__name__}: {str(error)[:200]}") from error
    return KvBatch(rank=rank, events=tuple(event for event in decoded if event is not None))


def _event(event: Any) -> KvEvent | None:
    kind, fields = _fields(event)
    if kind == "AllBlocksCleared":
        return AllBlocksCleared()
    if kind not in ("BlockStored", "BlockRemoved") or not _counts(fields):
        return None
    hashes = tuple(normalised(value) for value in fields["block_hashes"])
    group = fields.get("group_idx") or 0
    if kind == "BlockRemoved":
        return BlockRemoved(hashes=hashes, group=int(group))
    return _stored(fields, hashes, int(group))


def _fields(event: Any) -> tuple[str, Fields]:
    if isinstance(event, dict):
        fields = cast(Fields, event)
        return str(fields.get("type", "")), fields
    kind, *values = event
    names = {"BlockStored": STORED_FIELDS, "BlockRemoved": REMOVED_FIELDS}.get(kind, ())
    return str(kind), dict(zip(names, values, strict=False))


def _counts(fields: Fields) -> bool:
    """Whether the blocks lie on the device, here, and hold whole prefixes."""
    return (
        (fields.get("medium") or "") in DEVICE_MEDIA
        and (fields.get("locality") or "LOCAL") == "LOCAL"
        and (fields.get("kv_cache_spec_kind") or "") in WHOLE_ATTENTION
    )


def _stored(fields: Fields, hashes: tuple[int, ...], group: int) -> BlockStored:
    block_size = int(fields["block_size"])
    if block_size < 1:
        raise ValueError(f"block size {block_size}")
    parent = fields.get("parent_block_hash")
    first = parent is None or parent == 0  # simulators write 0 for none
    adapter, salt, media = _extras(fields, len(hashes), first)
    return BlockStored(
        hashes=hashes,
        parent=None if first else normalised(parent),
        tokens=_tokens(fields.get("token_ids")),
        block_size=block_size,
        adapter=adapter,
        salt=salt,
        media=media,
        group=group,
    )


def normalised(value: Any) -> int:
    """An engine's block hash as u64: bytes by their last 8, big-endian; negative ones by their two's complement."""
    if isinstance(value, bytes):
        return int.from_bytes(value[-HASH_BYTES:], "big")
    return int(value) & U64


def _tokens(ids: Any) -> bytes | None:
    """Token ids as little-endian u32; None if absent or not one number a token (pairs, with speculative decoding)."""
    if not ids:
        return None
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 2**32:
        return None
    return tokens.astype("<u4").tobytes()


def _extras(fields: Fields, blocks: int, first: bool) -> tuple[str, str, tuple[tuple[str, ...], ...]]:
    """Adapter, salt and media ids, told apart by place and form.

    vLLM puts into a block's extra keys, in this order: the adapter's name, media ids (pairs of id and offset; bare
    strings in older versions), and in the first block of a prompt the salt. An adapter is not an image.
    """
    adapter, adapter_id = str(fields.get("lora_name") or ""), fields.get("lora_id")
    salt = str(fields.get("cache_salt") or "")
    media: list[tuple[str, ...]] = []
    for at, extra in enumerate(cast(list[Any], fields.get("extra_keys") or [])[:blocks]):
        keys = list(cast(list[Any], extra)) if isinstance(extra, (list, tuple)) else [] if extra is None else [extra]
        if not adapter and adapter_id is not None and keys and isinstance(keys[0], str):
            adapter = keys[0]
        if keys and (adapter or adapter_id is not None) and keys[0] in (adapter, adapter_id):
            del keys[0]
        if first and at == 0 and not salt and keys and isinstance(keys[-1], str):
            salt = keys.pop()
        media.append(tuple(_medium_id(key) for key in keys))
    if not adapter and adapter_id is not None:
        adapter = f"#{adapter_id}"  # only the engine knows its name: it matches no request, rightly
    return adapter, salt, (*media, *((),) * (blocks - len(media))) if any(media) else ()


def _medium_id(key: Any) -> str:
    """The id of a medium; its offset within the block shows in the tokens already."""
    if isinstance(key, (list, tuple)):
        key = next(iter(cast(list[Any], key)), "")
    return key.hex() if isinstance(key, bytes) else str(key)
