"""Claim: one writer at a time, and the rightful one is always heard again."""

from tests.builders import beat, shard
from tokenfleet.adapters.claim import EPOCH_UNKNOWN, Claim
from tokenfleet.core.capacity import CapacityTable


class Log:
    """A partition with one reader, and writers that each have a claim."""

    def __init__(self) -> None:
        self.end = 7
        self.reader = CapacityTable()

    def write(self, claim: Claim, name: str, *, cluster: str = "kafka-1") -> bool:
        """Whether the reader accepted it."""
        message = shard(beat(name), n=claim.next(cluster), epoch=claim.epoch, cluster=cluster)
        offset, self.end = self.end, self.end + 1
        claim.written(offset)
        return self.reader.apply(message, offset=offset, now_s=1.0, live=True).accepted


def test_the_first_message_claims_and_the_others_follow_under_its_offset() -> None:
    log, claim = Log(), Claim()
    assert [log.write(claim, "a") for _ in range(3)] == [True] * 3
    assert (claim.epoch, claim.n) == (7, 3)


def test_a_successor_deposes_whoever_wrote_before() -> None:
    log, old, new = Log(), Claim(), Claim()
    log.write(old, "old")
    log.write(new, "new")
    assert not log.write(old, "old")
    assert [each.beat.instance for each in log.reader.rows()] == ["new"]


def test_after_a_paused_writers_late_claim_the_rightful_one_is_heard_again() -> None:
    log, paused, owner = Log(), Claim(), Claim()
    log.write(owner, "owner")
    log.write(paused, "paused")
    assert not log.write(owner, "owner")
    assert [log.write(owner, "owner") for _ in range(3)] == [True] * 3
    assert owner.epoch != EPOCH_UNKNOWN


def test_another_clusters_log_is_claimed_anew() -> None:
    log, claim = Log(), Claim()
    log.write(claim, "a")
    log.end = 0
    assert log.write(claim, "a", cluster="kafka-2")
    assert claim.epoch == 0
