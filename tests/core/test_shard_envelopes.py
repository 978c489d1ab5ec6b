"""Envelopes: how far the placements of each replica have been read."""

from tests.builders import placements
from tokenfleet.core.shard.envelopes import Envelopes
from tokenfleet.core.shard.records import Holder


def test_an_envelope_counts_as_read_when_all_before_it_are() -> None:
    holder = Holder(replica="decide-1", start=placements().start)
    read = Envelopes()
    read.caught_up()
    for n, all_up_to in ((1, 1), (3, 1), (4, 1), (2, 4), (2, 4)):
        read.read(placements(n=n))
        assert read.has_read(holder, all_up_to)
        assert not read.has_read(holder, all_up_to + 1)
    stranger = Holder(replica="other", start="1")
    assert read.has_read(stranger, 0)
    assert not read.has_read(stranger, 1)


def test_a_reader_that_begins_in_the_middle_takes_what_lies_before_as_read() -> None:
    holder = Holder(replica="decide-1", start=placements().start)
    read = Envelopes()
    for n in (70, 71, 50, 52, 51):  # two partitions, one after the other
        read.read(placements(n=n))
    assert read.has_read(holder, 52)
    assert not read.has_read(holder, 70)
    for n in range(53, 70):
        read.read(placements(n=n))
    assert read.has_read(holder, 71)
    read.caught_up()
    assert not read.has_read(Holder(replica="new", start="1"), 1)


def test_in_another_log_what_of_the_old_one_was_not_read_is_not_waited_for() -> None:
    read, holder = Envelopes(), Holder(replica="decide-1", start=placements().start)
    read.caught_up()
    read.read(placements(n=1, replica="decide-1"))
    read.begins_anew()
    read.read(placements(n=5, replica="decide-1"))  # 2 to 4 went with the old log
    read.caught_up()
    assert read.has_read(holder, 5)
