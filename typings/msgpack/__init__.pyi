"""What TokenFleet uses of msgpack 1.2."""

from collections.abc import Callable, Sequence
from typing import Any

from msgpack import exceptions as exceptions

class Timestamp:
    seconds: int
    nanoseconds: int

def packb(o: object, *, use_bin_type: bool = True) -> bytes: ...
def unpackb(
    packed: bytes | bytearray | memoryview,
    *,
    raw: bool = False,
    use_list: bool = True,
    strict_map_key: bool = True,
    object_pairs_hook: Callable[[Sequence[tuple[Any, Any]]], object] | None = None,
    list_hook: Callable[[Sequence[Any]], object] | None = None,
    ext_hook: Callable[[int, bytes], object] = ...,
    max_buffer_size: int = ...,
    max_str_len: int = -1,
    max_bin_len: int = -1,
    max_array_len: int = -1,
    max_map_len: int = -1,
    max_ext_len: int = -1,
) -> Any: ...
