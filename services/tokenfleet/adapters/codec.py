"""Codec: how a record becomes the bytes of one Kafka message and back.

Values are msgpack maps with a `type` tag; the header `tf-schema` names topic and version (`telemetry/1`).
What can't be read is a BadRecordError whose message never holds a byte of the payload.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Generic, TypeVar, Union

import msgpack
import msgspec
from msgspec import Struct

from tokenfleet.adapters.topics import RECORD_BYTES_MAX, Topic
from tokenfleet.core.errors import BadRecordError

M = TypeVar("M", bound=Struct)
Header = tuple[str, bytes]

SCHEMA_HEADER = "tf-schema"
TRACE_HEADER = "traceparent"  # W3C Trace Context


def encode(topic: Topic[M], message: M) -> bytes:
    """The value of one Kafka record.

    Raises BadRecordError for a message of another topic, one larger than RECORD_BYTES_MAX, and one that holds
    what msgpack can't carry (lone surrogates, integers past 64 bits).
    """
    if not isinstance(message, topic.messages):
        raise BadRecordError(f"{topic.name}: a {type(message).__name__} does not belong here")
    try:
        value = _ENCODER.encode(message)
    except (msgspec.MsgspecError, UnicodeError, OverflowError, TypeError) as error:
        raise BadRecordError(f"{topic.name}: can't be encoded: {type(error).__name__}") from error
    if len(value) > RECORD_BYTES_MAX:
        raise BadRecordError(f"{topic.name}: {len(value)} bytes are more than {RECORD_BYTES_MAX}")
    return value


def decode(topic: Topic[M], value: bytes | None, headers: Iterable[tuple[str, bytes | None]] = ()) -> M:
    """The message in a record's value. Unknown fields are ignored, fields that are missing take their default.

    Raises BadRecordError, with the reason, for a record of a newer version than this reader, no value, too large a
    value, and bytes that are not one msgpack value of the topic's messages: cut short, trailing bytes, nested
    too deeply, extension types, a key twice, containers larger than the record.
    """
    _refuse_newer(topic, headers)
    if value is None:
        raise BadRecordError("no value")
    if len(value) > RECORD_BYTES_MAX:
        raise BadRecordError(f"{len(value)} bytes are more than {RECORD_BYTES_MAX}")
    codec = _codec(topic.name, topic.messages)
    try:
        message = codec.decode(value)
        # Equal bytes were written by this very schema, so nothing can hide in them; it costs a third of a scan.
        if _ENCODER.encode(message) != value:
            _scan(value)
    except msgspec.ValidationError as error:
        raise BadRecordError(f"wrong shape{_path(str(error))}") from error
    except (msgspec.MsgspecError, msgpack.exceptions.UnpackException, ValueError, OverflowError) as error:
        raise BadRecordError(f"not one msgpack value: {_reason(error)}") from error
    except RecursionError as error:
        raise BadRecordError("nested too deeply") from error
    return message


def headers_of(topic: Topic[Any], traceparent: str = "") -> tuple[Header, ...]:
    """The headers of every record of a topic; `traceparent` joins it to a trace."""
    schema = _schema_header(topic.name, topic.version)
    return (schema, (TRACE_HEADER, traceparent.encode())) if traceparent else (schema,)


class _Codec(Generic[M]):
    """The decoder of one topic, typed."""

    def __init__(self, messages: tuple[type[M], ...]) -> None:
        self._decoder = msgspec.msgpack.Decoder[Any](Union[messages])  # noqa: UP007  # a union made at run time

    def decode(self, value: bytes) -> M:
        return self._decoder.decode(value)


_ENCODER = msgspec.msgpack.Encoder()


@cache
def _codec(_name: str, messages: tuple[type[M], ...]) -> _Codec[M]:
    return _Codec(messages)


@cache
def _schema_header(name: str, version: int) -> Header:
    return (SCHEMA_HEADER, f"{name}/{version}".encode())


def _refuse_newer(topic: Topic[Any], headers: Iterable[tuple[str, bytes | None]]) -> None:
    for name, value in headers:
        if name != SCHEMA_HEADER or value == _schema_header(topic.name, topic.version)[1]:
            continue
        told, _, version = (value or b"").decode("ascii", "replace").partition("/")
        if told != topic.name or not (version.isascii() and version.isdigit() and len(version) <= VERSION_DIGITS_MAX):
            raise BadRecordError(f"header {SCHEMA_HEADER} does not name {topic.name}/{topic.version}")
        if int(version) > topic.version:
            raise BadRecordError(f"written as {topic.name}/{int(version)}; this reader knows up to /{topic.version}")


VERSION_DIGITS_MAX = 9


def _scan(value: bytes) -> None:
    """Walk a value that another schema wrote, with limits taken from its own size. Raises what msgpack raises."""
    msgpack.unpackb(
        value,
        raw=False,
        strict_map_key=True,
        object_pairs_hook=_checked_map,
        list_hook=_checked_list,
        ext_hook=_refuse_extension,
    )


def _checked_map(pairs: Sequence[tuple[object, object]]) -> None:
    """Called for every map, inner ones first; what it returns stands for the map, so nothing is kept."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice")
    _checked_list([value for _, value in pairs])


def _checked_list(values: Sequence[object]) -> None:
    if any(isinstance(value, msgpack.Timestamp) for value in values):  # the one extension that asks no hook
        _refuse_extension(-1, b"")


def _refuse_extension(_code: int, _data: bytes) -> None:
    raise ValueError("an extension type")


def _path(text: str) -> str:
    """Where msgspec found the fault: ` at $.beats[...].age_s`. Its other words may quote a value: left out."""
    _, found, path = text.rpartition(" - at ")
    return f" at {path.strip('`')[:PATH_SHOWN_MAX]}" if found else ""


PATH_SHOWN_MAX = 120


def _reason(error: Exception) -> str:
    """One of our own words, or the kind of the library's error: library texts may quote the payload."""
    text = str(error)
    if isinstance(error, ValueError) and text in ("a key stands twice", "an extension type"):
        return text
    for known in ("truncated", "trailing characters", "recursion", "exceeds max"):
        if known in text:
            return known
    return type(error).__name__
