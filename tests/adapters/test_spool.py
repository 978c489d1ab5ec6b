"""Spool: nothing that was kept is lost by kill -9, the bound holds, and a full disk is counted, not raised."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.adapters.spool import Lane, Spool
from tokenfleet.adapters.spool_segment import Segment, Spooled, frame_of
from tokenfleet.core.errors import SetupError


def placement(n: int, size: int = 8) -> Spooled:
    return Spooled(topic="placements", site="b", partition=n % 4, value=n.to_bytes(8, "big") + b"x" * (size - 8))


def decision(n: int, size: int = 8) -> Spooled:
    return Spooled(topic="decisions", site="b", key="r", value=n.to_bytes(8, "big") + b"x" * (size - 8))


def numbers(lane: Lane) -> list[int]:
    """Send all that waits and return it, in order."""
    taken: list[int] = []
    while lane.records:
        spooled, position = lane.read(256)
        taken += [int.from_bytes(record.value[:8], "big") for record in spooled]
        lane.sent(position, len(spooled))
    return taken


def lanes(spool: Spool) -> dict[str, Lane]:
    return {lane.name: lane for lane in spool.lanes}


def test_what_is_kept_comes_back_in_order_and_gives_the_disk_back(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        assert all(spool.append(placement(n)) for n in range(100))
        assert (spool.records, spool.lost["placements"]) == (100, 0)
        assert numbers(lanes(spool)["placements"]) == list(range(100))
        assert (spool.records, spool.bytes_long) == (0, 0)


def test_a_restart_sends_the_rest_and_counts_its_starts(tmp_path: Path) -> None:
    with Spool(tmp_path) as spool:
        first = spool.start_count
        assert spool.recovered == 0
        for n in range(10):
            spool.append(placement(n))
    with Spool(tmp_path) as spool:
        assert (spool.start_count, spool.recovered) == (first + 1, 10)
        spool.append(placement(10))
        assert numbers(lanes(spool)["placements"]) == list(range(11))
    with Spool(tmp_path) as spool:
        assert (spool.start_count, spool.recovered) == (first + 2, 0)


def test_a_lost_folder_does_not_begin_the_count_again(tmp_path: Path) -> None:
    """Decision ids are made of it: the same ones twice would be one row in PostgreSQL."""
    counts: list[int] = []
    for _ in range(3):
        with Spool(tmp_path / "spool") as spool:
            counts.append(spool.start_count)
        shutil.rmtree(tmp_path / "spool")
        time.sleep(0.01)
    assert counts == sorted(set(counts))


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with Spool(tmp_path), pytest.raises(SetupError, match="folder of its own"):
        Spool(tmp_path)
    Spool(tmp_path).close()


def test_evidence_goes_first_and_placements_last(tmp_path: Path) -> None:
    """200 records of 1 KiB each lane into 256 KiB: placements all stay, the oldest decisions go, and are counted."""
    with Spool(tmp_path, bytes_max=256 * 1024) as spool:
        for n in range(200):
            spool.append(decision(n, 1000))
        for n in range(200):
            assert spool.append(placement(n, 1000))
        assert spool.bytes_long <= 256 * 1024
        kept = numbers(lanes(spool)["decisions"])
        assert numbers(lanes(spool)["placements"]) == list(range(200))
        assert spool.lost == {"decisions": 200 - len(kept), "outcomes": 0, "placements": 0}
        assert kept == list(range(200 - len(kept), 200))


def test_when_only_placements_are_left_the_oldest_of_them_go(tmp_path: Path) -> None:
    with Spool(tmp_path, bytes_max=64 * 1024) as spool:
        for n in range(200):
            assert spool.append(placement(n, 1000))
        kept = numbers(lanes(spool)["placements"])
        assert kept == list(range(200 - len(kept), 200))
        assert spool.lost["placements"] == 200 - len(kept) > 0
        for n in range(70):
            spool.append(placement(n, 1000))
        assert not spool.append(decision(1, 4000))  # evidence never pushes a placement out
        assert spool.lost["decisions"] == 1


def test_a_record_that_went_while_it_was_being_sent_confuses_nothing(tmp_path: Path) -> None:
    with Spool(tmp_path, bytes_max=64 * 1024) as spool:
        lane = lanes(spool)["placements"]
        for n in range(60):
            spool.append(placement(n, 1000))
        sending, position = lane.read(2048)
        for n in range(60, 120):
            spool.append(placement(n, 1000))
        lane.sent(position, len(sending))
        assert numbers(lane)[-1] == 119


def test_a_full_disk_is_counted_and_never_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Spool(tmp_path) as spool:
        spool.append(placement(0))
        real_write = os.write

        def half_write(fd: int, data: bytes) -> int:
            return real_write(fd, data[: len(data) // 2])  # what the kernel does when some of it fits

        def no_space(fd: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        for write in (half_write, no_space):
            monkeypatch.setattr(os, "write", write)
            assert not spool.append(placement(1))
        monkeypatch.undo()
        assert (spool.disk_errors, spool.lost["placements"]) == (2, 2)
        assert spool.append(placement(2))
        assert numbers(lanes(spool)["placements"]) == [0, 2]


def test_a_disk_that_takes_no_new_segment_is_counted_and_never_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spool(tmp_path, bytes_max=100) as spool:
        assert spool.append(placement(0))

        def no_space(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "open", no_space)
        assert not spool.append(placement(1))
        monkeypatch.undo()
        assert (spool.disk_errors, spool.lost["placements"]) == (1, 1)
        assert numbers(lanes(spool)["placements"]) == [0]


def test_a_full_disk_keeps_no_spool_from_starting_and_gives_no_number_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Spool(tmp_path) as spool:
        numbers_given = [spool.start_count]

    def no_space(self: Path, text: str) -> int:
        raise OSError(28, "No space left on device")

    for wall_s in (4e9, 5e9):
        with monkeypatch.context() as full:
            full.setattr(Path, "write_text", no_space)
            full.setattr("tokenfleet.adapters.spool.wall_s", lambda wall_s=wall_s: wall_s)
            with Spool(tmp_path) as spool:
                numbers_given.append(spool.start_count)
    with Spool(tmp_path) as spool:
        numbers_given.append(spool.start_count)
    assert len(set(numbers_given)) == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_the_kernels_own_refusal_is_counted(tmp_path: Path) -> None:
    (tmp_path / "placements-00000001.seg").symlink_to("/dev/full")
    with Spool(tmp_path) as spool:
        assert not spool.append(placement(1))
        assert spool.lost["placements"] == 1


KILLED = """
import sys
from pathlib import Path
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.spool_segment import Spooled
spool = Spool(Path(sys.argv[1]))
n = 0
while True:
    spool.append(Spooled(topic="placements", site="b", partition=0, value=n.to_bytes(8, "big") + b"x" * 5000))
    n += 1
    sys.stdout.write(f"{n}\\n")
    sys.stdout.flush()
"""


def test_kill_9_in_the_middle_of_appending_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        answered = 0
        while answered < 200:
            answered = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        answered = max([answered, *(int(line) for line in process.stdout.read().split(b"\n") if line)])
        process.stdout.close()
        process.wait()
        with Spool(tmp_path) as spool:
            kept = numbers(lanes(spool)["placements"])
        assert kept == list(range(len(kept)))
        assert len(kept) >= answered


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.data())
def test_a_torn_tail_costs_only_what_was_torn(values: list[bytes], data: st.DataObject) -> None:
    """Cut or damage a segment anywhere: what lies whole before is read, and appending goes on behind it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "placements-00000001.seg"
        frames = [frame_of(Spooled(topic="placements", site="b", value=value)) for value in values]
        whole = b"".join(frames)
        at = data.draw(st.integers(0, len(whole) - 1))
        damaged = whole[:at]
        if data.draw(st.booleans()):
            damaged += bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
        path.write_bytes(damaged)
        before = sum(1 for end in (len(b"".join(frames[: i + 1])) for i in range(len(frames))) if end <= at)
        segment = Segment(path)
        assert segment.records == before
        segment.append(frames[0])
        assert [record.value for record, _ in segment.read(0, 10**6)] == [*values[:before], values[0]]
        segment.close()


def test_damage_found_while_sending_gives_up_that_segment_only(tmp_path: Path) -> None:
    with Spool(tmp_path, bytes_max=64 * 4096) as spool:
        for n in range(12):
            spool.append(placement(n, 1000))
        first = min(tmp_path.glob("placements-*.seg"))
        with first.open("r+b") as file:
            file.seek(20)
            file.write(b"\x00\xff\x00")
        kept = numbers(lanes(spool)["placements"])
        assert kept == list(range(12 - len(kept), 12))
        assert spool.lost["placements"] == 12 - len(kept) > 0
