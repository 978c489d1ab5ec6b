"""Decide's health: what was lost is told, and keeps no replica out for good that answers all."""

from pathlib import Path

from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.spool_segment import Spooled
from tokenfleet.processes import decide


def test_a_replica_is_not_ready_while_records_are_lost_and_for_a_minute_after(tmp_path: Path) -> None:
    now_s = 1000.0
    large = Spooled(topic="decisions", site="b", partition=0, value=b"x" * 4096)
    with Spool(tmp_path, bytes_max=4096) as spool:
        look = decide._spool_state(spool, clock=lambda: now_s)
        assert look() == (True, "0 records wait")
        for lost in (1, 2):
            assert not spool.append(large)
            assert look() == (False, f"0 records wait, {lost} were lost for want of room")
            now_s += decide.LOST_TOLD_S - 1.0
            assert not look()[0]
        now_s += 1.0
        assert look() == (True, "0 records wait, 2 were lost for want of room")
