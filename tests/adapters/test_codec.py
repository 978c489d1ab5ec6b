"""Codec: what is written is read back; what can't be read is refused without a word of the payload."""

import contextlib
import resource
import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.adapters.codec import SCHEMA_HEADER, decode, encode, headers_of
from tokenfleet.adapters.golden import golden_messages
from tokenfleet.adapters.topics import CONTROL, RECORD_BYTES_MAX, TELEMETRY, Topic
from tokenfleet.core.errors import BadRecordError
from tokenfleet.core.records import AgentClaim, Control, KvDelta

GOLDEN = golden_messages()
SECRET = "the-secret-prompt"
CLAIM = b"\x83\xa4type\xabagent_claim\xa5agent\xa1a\xa4site\xa1b"


def refused(value: bytes | None, headers: tuple[tuple[str, bytes], ...] = (), topic: Topic[Any] = TELEMETRY) -> str:
    with pytest.raises(BadRecordError) as caught:
        decode(topic, value, headers)
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("topic", "message"), GOLDEN, ids=lambda value: getattr(value, "name", ""))
def test_every_message_comes_back(topic: Topic[Any], message: msgspec.Struct) -> None:
    assert decode(topic, encode(topic, message), headers_of(topic)) == message


def test_a_newer_writers_fields_are_ignored_and_an_older_ones_take_defaults() -> None:
    value = msgpack.packb({"type": "control", "instance": "i", "colour": {"of": ["the", "future"]}})
    assert decode(CONTROL, value) == Control(instance="i")


BAD = {
    "empty": b"",
    "cut short": CLAIM[:-1],
    "trailing bytes": CLAIM + b"\xc0",
    "two records": CLAIM + CLAIM,
    "not a map": b"\x93\x01\x02\x03",
    "array encoded": msgpack.packb(["agent_claim", "a", "b"]),
    "no tag": b"\x82\xa5agent\xa1a\xa4site\xa1b",
    "unknown tag": msgpack.packb({"type": SECRET}),
    "wrong type": msgpack.packb({"type": "agent_claim", "agent": 7, "site": "b"}),
    "missing field": msgpack.packb({"type": "agent_claim", "agent": SECRET}),
    "a key twice": b"\x84" + CLAIM[1:] + b"\xa4site\xa1c",
    "a key twice inside": b"\x84" + CLAIM[1:] + b"\xa1q\x82\xa1k\x01\xa1k\x02",
    "extension": b"\x84" + CLAIM[1:] + b"\xa1q\xd4\x05\x01",
    "timestamp": b"\x84" + CLAIM[1:] + b"\xa1q\xd6\xff\x00\x00\x00\x00",
    "timestamp in a list": b"\x84" + CLAIM[1:] + b"\xa1q\x91\xd6\xff\x00\x00\x00\x00",
    "key no text": b"\x84" + CLAIM[1:] + b"\x91\x01\x01",
    "text no utf-8": b"\x84" + CLAIM[1:] + b"\xa1q\xa1\xff",
    "deep arrays": b"\x84" + CLAIM[1:] + b"\xa1q" + b"\x91" * 900_000 + b"\x01",
    "deep maps": b"\x84" + CLAIM[1:] + b"\xa1q" + b"\x81\xa1a" * 300_000 + b"\x01",
    "never used": b"\xc1",
}
CLAIMS = {  # a few bytes that claim containers of billions of elements
    f"{name} of {size}": b"\x84" + CLAIM[1:] + b"\xa1q" + code + struct.pack(">I", size) + b"\x00" * 8
    for name, code in {
        "array": b"\xdd",
        "map": b"\xdf",
        "bytes": b"\xc6",
        "text": b"\xdb",
        "extension": b"\xc9",
    }.items()
    for size in (2**20, 2**31 - 1, 2**32 - 1)
}
BEATS = {  # the same in a field that we know
    f"beats of {size}": b"\x82\xa4type\xa9telemetry\xa5beats\xdd" + struct.pack(">I", size)
    for size in (2**20, 2**31 - 1, 2**32 - 1)
}


@pytest.mark.parametrize("value", [*BAD.values()], ids=[*BAD])
def test_malformed_bytes_are_refused(value: bytes) -> None:
    assert refused(value)


def test_claims_of_huge_containers_are_refused_and_take_no_memory() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (*CLAIMS.values(), *BEATS.values()):
        refused(value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 32 * 1024


def test_no_value_and_too_large_a_value_are_refused() -> None:
    assert refused(None) == "no value"
    assert str(RECORD_BYTES_MAX) in refused(b"\x00" * (RECORD_BYTES_MAX + 1))


def test_a_newer_version_is_told_apart_from_rubbish() -> None:
    assert "telemetry/2" in refused(CLAIM, ((SCHEMA_HEADER, b"telemetry/2"),))
    assert "does not name" in refused(CLAIM, ((SCHEMA_HEADER, b"control/1"),))
    assert "does not name" in refused(CLAIM, ((SCHEMA_HEADER, SECRET.encode()),))
    assert decode(TELEMETRY, CLAIM, ((SCHEMA_HEADER, b"telemetry/1"), ("other", b"\xff"))) == AgentClaim(
        agent="a", site="b"
    )


def test_the_size_limit_holds_to_the_byte() -> None:
    empty = len(encode(CONTROL, Control(instance="i", reason="x" * 65536))) - 65536
    largest = Control(instance="i", reason="x" * (RECORD_BYTES_MAX - empty))
    assert len(encode(CONTROL, largest)) == RECORD_BYTES_MAX
    assert decode(CONTROL, encode(CONTROL, largest)) == largest
    with pytest.raises(BadRecordError, match=str(RECORD_BYTES_MAX)):
        encode(CONTROL, Control(instance="i", reason=largest.reason + "x"))


def test_what_does_not_belong_or_can_not_be_carried_is_not_sent() -> None:
    with pytest.raises(BadRecordError, match="does not belong"):
        encode(CONTROL, AgentClaim(agent="a", site="b"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(BadRecordError, match="can't be encoded"):
        encode(CONTROL, Control(instance="\ud800"))


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(value: bytes) -> None:
    for topic, _ in GOLDEN:
        with contextlib.suppress(BadRecordError):
            decode(topic, value)


@given(st.sampled_from(GOLDEN), st.data())
def test_no_damage_raises_anything_else(golden: tuple[Topic[Any], msgspec.Struct], data: st.DataObject) -> None:
    topic, message = golden
    value = bytearray(encode(topic, message))
    at = data.draw(st.integers(0, len(value) - 1))
    value[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadRecordError):
        decode(topic, bytes(value))


BLOCK_KEYS = st.lists(st.binary(min_size=8, max_size=8), max_size=8).map(b"".join)


@given(BLOCK_KEYS, BLOCK_KEYS, st.booleans())
def test_block_keys_travel_as_they_are(removed: bytes, stored: bytes, cleared: bool) -> None:
    [(topic, golden)] = [(t, m) for t, m in GOLDEN if isinstance(m, KvDelta)]
    delta = msgspec.structs.replace(golden, removed=removed, stored=stored, cleared=cleared)
    assert decode(topic, encode(topic, delta)) == delta
