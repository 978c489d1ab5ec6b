"""Spool segment: one append-only file of framed records, whole after kill -9 but for a torn tail.

A frame is its payload's length and CRC-32 (both little-endian u32), then the payload: msgpack of a `Spooled`.
Writes are not flushed to the disk: they survive the process, not the machine.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from tokenfleet.adapters.topics import RECORD_BYTES_MAX

FRAME = struct.Struct("<II")
PAYLOAD_BYTES_MAX = RECORD_BYTES_MAX + 4096  # the value with its address; a larger length is a torn frame


class Spooled(Struct, frozen=True, kw_only=True):
    """One record on its way: topic name, site, partition (-1: by `key`) and the encoded value."""

    topic: str
    site: str
    partition: int = -1
    key: str = ""
    value: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Spooled)


def frame_of(spooled: Spooled) -> bytes:
    payload = _ENCODER.encode(spooled)
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


class Segment:
    """One file. `records` counts its whole frames, `bytes_long` their bytes."""

    def __init__(self, path: Path) -> None:
        """Open or create; an existing file is cut behind its last whole frame. Raises OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.records = 0
        self.bytes_long = 0
        size = os.fstat(self._fd).st_size
        while (frame := self._whole_frame(self.bytes_long, size)) is not None:
            self.records += 1
            self.bytes_long += FRAME.size + len(frame)
        self.torn_bytes = size - self.bytes_long
        if self.torn_bytes:
            os.ftruncate(self._fd, self.bytes_long)

    def append(self, frame: bytes) -> None:
        """Append whole or not at all. Raises OSError."""
        try:
            written = os.write(self._fd, frame)
        except OSError:
            os.ftruncate(self._fd, self.bytes_long)
            raise
        if written < len(frame):  # the disk is full: the kernel took what fitted
            os.ftruncate(self._fd, self.bytes_long)
            raise OSError(f"{self.path.name}: {written} of {len(frame)} bytes fitted")
        self.records += 1
        self.bytes_long += len(frame)

    def read(self, offset: int, bytes_max: int) -> Iterator[tuple[Spooled, int]]:
        """Records from `offset` on, each with the offset behind it; at least one if there is one."""
        began = offset
        while offset < self.bytes_long and (offset == began or offset - began < bytes_max):
            payload = self._whole_frame(offset, self.bytes_long)
            if payload is None:  # changed under us: what is behind it can't be found
                return
            offset += FRAME.size + len(payload)
            yield _DECODER.decode(payload), offset

    def clear(self) -> None:
        """Forget all records and give the disk back."""
        os.ftruncate(self._fd, 0)
        self.records = self.bytes_long = 0

    def close(self) -> None:
        os.close(self._fd)

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)

    def _whole_frame(self, offset: int, size: int) -> bytes | None:
        if offset + FRAME.size > size:
            return None
        length, checksum = FRAME.unpack(os.pread(self._fd, FRAME.size, offset))
        if length > PAYLOAD_BYTES_MAX or offset + FRAME.size + length > size:
            return None
        payload = os.pread(self._fd, length, offset + FRAME.size)
        return payload if zlib.crc32(payload) == checksum else None
