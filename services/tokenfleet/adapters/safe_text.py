"""Safe text: values as PostgreSQL takes them; what it refuses is made harmless here, at the rim.

PostgreSQL refuses NUL in text and jsonb, lone surrogates, NaN in jsonb, keys over 2.7 kB in a btree and times out of
range; each would sink the batch that the row is in.
"""

import hashlib
import math
import re
from datetime import UTC, date, datetime
from typing import Any, cast

import msgspec
from msgspec import Struct

REPLACEMENT = "\ufffd"
KEY_BYTES_MAX = 400  # five of them fit in a btree row
UNSAFE = re.compile("[\x00\ud800-\udfff]")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WALL_MAX_S = 253_000_000_000.0  # in the year 9987; datetime ends with 9999


def safe(text: str) -> str:
    """The text with U+FFFD for what PostgreSQL can't hold."""
    return UNSAFE.sub(REPLACEMENT, text)


def safe_key(text: str) -> str:
    """The text, or its beginning and its digest when it is too long for an index: equal texts stay equal."""
    clean = safe(text)
    encoded = clean.encode()
    if len(encoded) <= KEY_BYTES_MAX:
        return clean
    return encoded[: KEY_BYTES_MAX // 2].decode(errors="ignore") + "…" + hashlib.sha256(encoded).hexdigest()


def safe_moment(at_wall_s: float) -> datetime:
    """The label as a time with zone; the epoch for one that is no time at all."""
    if not 0.0 <= at_wall_s <= WALL_MAX_S:
        return EPOCH
    return datetime.fromtimestamp(at_wall_s, UTC)


def day_of(at_wall_s: float) -> date:
    """The UTC day of a label."""
    return safe_moment(at_wall_s).date()


def safe_json(value: Struct) -> str:
    """JSON that jsonb takes and `from_json` reads back; numbers that are none become the strings "nan" and "inf"."""
    try:
        encoded = msgspec.json.encode(value)
        if b"\\u0000" not in encoded and _reads_back(encoded, type(value)):
            return encoded.decode()
    except UnicodeEncodeError:
        pass
    return msgspec.json.encode(_cleaned(msgspec.to_builtins(value))).decode()


def from_json(text: str, kind: type[Struct]) -> Any:
    """What `safe_json` wrote. Raises msgspec.ValidationError for what another version wrote and this one can't read."""
    return msgspec.json.decode(text, type=kind, strict=False)


def _reads_back(encoded: bytes, kind: type[Struct]) -> bool:
    """False when a number that is none was written as null where null can't stand."""
    try:
        msgspec.json.decode(encoded, type=kind)
    except msgspec.ValidationError:
        return False
    return True


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {safe(str(key)): _cleaned(item) for key, item in cast(dict[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_cleaned(item) for item in cast(list[Any], value)]
    return value
