"""Spool: records that must not be lost when this process is killed or Kafka is away, until Kafka has them.

One lane a topic, each a row of segment files. When the bound is reached, the oldest segment of the least
precious lane goes, and what went is counted. Nothing here raises to a caller that appends.
"""

import fcntl
import logging
import os
from collections import deque
from pathlib import Path
from typing import Self

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.spool_segment import Segment, Spooled, frame_of
from tokenfleet.core.errors import SetupError

BYTES_MAX = 1024**3
SEGMENTS_A_SPOOL = 64  # a segment is what goes at once: 16 MiB of 1 GiB
LANES = ("decisions", "outcomes", "placements")  # evidence goes first, placements last

logger = logging.getLogger(__name__)


Position = tuple[int, int]  # segment number and offset in it: all before it is sent


class Lane:
    """The records of one topic, oldest first; read from `_sent` on."""

    def __init__(self, folder: Path, name: str, *, segment_bytes_max: int) -> None:
        self.name = name
        self.lost = 0
        self._folder, self._segment_bytes_max = folder, segment_bytes_max
        found = sorted((int(path.stem.rpartition("-")[2]), path) for path in folder.glob(f"{name}-*.seg"))
        self._segments: deque[tuple[int, Segment]] = deque((number, Segment(path)) for number, path in found)
        self._sent = 0  # offset in the first segment; a restart sends that segment from its beginning
        self._sent_records = 0
        if not self._segments:
            self._open(1)

    @property
    def records(self) -> int:
        """How many wait."""
        return sum(segment.records for _, segment in self._segments) - self._sent_records

    @property
    def bytes_long(self) -> int:
        return sum([segment.bytes_long for _, segment in self._segments])

    def append(self, frame: bytes) -> None:
        """Raises OSError."""
        number, last = self._segments[-1]
        if last.bytes_long and last.bytes_long + len(frame) > self._segment_bytes_max:
            self._open(number + 1)
        self._segments[-1][1].append(frame)

    def read(self, bytes_max: int) -> tuple[list[Spooled], Position]:
        """The oldest records of one segment, up to about `bytes_max`, and the position behind them."""
        while not (taken := list(self._segments[0][1].read(self._sent, bytes_max))) and self.records:
            self.give_up_oldest()  # empty, or damaged on the disk: nothing more can be found in it
        number = self._segments[0][0]
        return [spooled for spooled, _ in taken], (number, taken[-1][1] if taken else self._sent)

    def sent(self, position: Position, records: int) -> None:
        """Kafka has all before `position`; a position in a segment that went meanwhile says nothing."""
        number, first = self._segments[0]
        if position[0] != number:
            return
        self._sent, self._sent_records = position[1], self._sent_records + records
        if self._sent < first.bytes_long:
            return
        if len(self._segments) > 1:
            self._drop_first()
        else:
            first.clear()
            self._sent = self._sent_records = 0

    def give_up_oldest(self) -> bool:
        """Let the oldest segment go and count its records as lost; False when there is nothing to go."""
        _, first = self._segments[0]
        waiting = first.records - self._sent_records
        if len(self._segments) == 1:
            if not waiting:
                return False
            self._open(self._segments[0][0] + 1)
        self.lost += waiting
        self._drop_first()
        return True

    def close(self) -> None:
        for _, segment in self._segments:
            segment.close()

    def _drop_first(self) -> None:
        self._segments.popleft()[1].remove()
        self._sent = self._sent_records = 0

    def _open(self, number: int) -> None:
        self._segments.append((number, Segment(self._folder / f"{self.name}-{number:08}.seg")))


class Spool:
    """The lanes of one process in one folder, which it owns by a lock.

    `start_count` is new with every start, also over the loss of the folder. `recovered` counts the records of former
    starts. `disk_errors` counts appends that the disk refused; their records are in `lost`.
    """

    def __init__(self, folder: Path, *, bytes_max: int = BYTES_MAX, lanes: tuple[str, ...] = LANES) -> None:
        """Raises SetupError when another process owns the folder or it can't be used."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(folder / "lock")
            self.start_count = _counted(folder / "starts")
            self._lanes = {
                name: Lane(folder, name, segment_bytes_max=max(1, bytes_max // SEGMENTS_A_SPOOL)) for name in lanes
            }
        except OSError as error:
            raise SetupError(f"spool {folder}: {error}; name a folder of its own that can be written") from error
        self.recovered = sum(lane.records for lane in self._lanes.values())
        self.disk_errors = 0
        self._bytes_max = bytes_max

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """From the least precious to the most."""
        return tuple(self._lanes.values())

    @property
    def lost(self) -> dict[str, int]:
        """Records that went without being sent, by lane."""
        return {lane.name: lane.lost for lane in self.lanes}

    @property
    def records(self) -> int:
        """How many wait to be sent."""
        return sum(lane.records for lane in self.lanes)

    @property
    def bytes_long(self) -> int:
        return sum([lane.bytes_long for lane in self._lanes.values()])

    def append(self, spooled: Spooled) -> bool:
        """Keep a record; its lane is its topic's name. False when it is lost at once: counted, reported, not raised."""
        lane = self._lanes[spooled.topic]
        frame = frame_of(spooled)
        try:
            if not self._make_room(len(frame), lane):
                lane.lost += 1
                return False
            lane.append(frame)
        except OSError as error:
            if self.disk_errors == 0:
                logger.error("spool: the disk refuses records, and they are counted as lost: %s", error)
            self.disk_errors += 1
            lane.lost += 1
            return False
        return True

    def close(self) -> None:
        for lane in self.lanes:
            lane.close()
        os.close(self._lock)

    def _make_room(self, size: int, lane: Lane) -> bool:
        """Let less precious records go, then this lane's own oldest, never a more precious lane's."""
        while self.bytes_long + size > self._bytes_max:
            order = self.lanes[: self.lanes.index(lane) + 1]
            if not any(other.give_up_oldest() for other in order):
                return False
        return True


def _locked(path: Path) -> int:
    """Raises OSError when another process holds it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _counted(path: Path) -> int:
    """One more than the number in the file, kept by rename. Without a file that can be read, the Unix milliseconds:

    ids made of it must not be those of a former folder, which was lost while Kafka and PostgreSQL kept its records.
    A disk that refuses the new count is told in the log.
    """
    try:
        count = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        count = round(wall_s() * 1000)
    new = path.with_suffix(".new")
    try:
        new.write_text(str(count))
        new.replace(path)
    except OSError as error:  # a full disk keeps nobody from deciding; the count it can't keep must not come again
        logger.error("spool: the disk refuses the count of starts, so the clock numbers this one: %s", error)
        return max(count, round(wall_s() * 1000))
    return count
