"""Kafka reading: what a reader is given, where it begins, and when it has read to the end."""

from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar

from msgspec import Struct

from tokenfleet.adapters.topics import Topic

M_co = TypeVar("M_co", bound=Struct, covariant=True)


class Record(Struct, Generic[M_co], frozen=True, kw_only=True):
    """One message and where it lies.

    `cluster` is the Kafka cluster id: (cluster, offset) orders claims. `live` is False for what was read while
    catching up (at start, after an own gap, after Kafka came back): its age is unknown. `read_at_s` is when this
    process got it (monotonic): ages count from there, also when a pause lies before its use. `appended_wall_s` is when
    the log took it (Unix seconds of the broker, or of the writer where the topic keeps the writer's time).
    """

    topic: Topic[M_co]
    site: str
    cluster: str
    partition: int
    offset: int
    message: M_co
    live: bool
    read_at_s: float = 0.0
    appended_wall_s: float = 0.0


class Start(Struct, frozen=True):
    """Where a reader without a position of its own begins; `seconds` only for `ago`."""

    kind: Literal["beginning", "end", "last", "ago"]
    seconds: float = 0.0


BEGINNING = Start("beginning")
END = Start("end")
LAST = Start("last")  # the last batch: one snapshot a batch makes a reader complete with it


def ago(seconds: float) -> Start:
    """Begin this long before the newest record, by the time that the log itself carries: no clock of ours."""
    return Start("ago", seconds)


class Gate:
    """Whether each partition has been read to the end that its log had when the reader last fell behind."""

    def __init__(self) -> None:
        self._ends: dict[int, int | None] = {}  # shut partitions; None: the end is still to be asked for

    def shut(self, partitions: Iterable[int]) -> None:
        """These are behind by an unknown amount."""
        for partition in partitions:
            self._ends[partition] = None

    def forget(self, partitions: Iterable[int]) -> None:
        """These are not read any more."""
        for partition in partitions:
            self._ends.pop(partition, None)

    @property
    def unknown(self) -> bool:
        """Whether an end must be asked for."""
        return None in self._ends.values()

    def aim(self, ends: Mapping[int, int]) -> None:
        """The ends as of now, for the partitions that have none yet."""
        for partition, end in ends.items():
            if partition in self._ends and self._ends[partition] is None:
                self._ends[partition] = end

    def reach(self, partition: int, position: int) -> None:
        """All before `position` has been taken in."""
        end = self._ends.get(partition)
        if end is not None and position >= end:
            del self._ends[partition]

    def is_open(self, partition: int) -> bool:
        return partition not in self._ends

    @property
    def all_open(self) -> bool:
        return not self._ends
