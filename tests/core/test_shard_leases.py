"""Leases: what stands in the log, whose clock counts, and when credit is free again."""

from tests.builders import order
from tests.core.shards import BOOK, CLUSTER, World
from tokenfleet.core.shard.leases import Leases
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.records import At, Holder, Lease, LeaseRequest, ShardClaim


def owned(names: str = "ab", *, limit_units: int = 20) -> World:
    """A world where `a` owns the book and everybody has asked."""
    world = World(names, limit_units=limit_units)
    world["a"].assigned()
    world.run(2.0)
    return world


def owner_of(world: World, name: str = "a") -> Owner:
    return world[name].owner


def quiet(world: World, *names: str) -> None:
    for name in names:
        world[name].paused = True


# the log fence


def test_what_an_owner_wrote_is_nobody_s_before_it_is_read_in_the_log() -> None:
    world = World("ab")
    world["a"].assigned()
    world.run(0.2, asks=False)
    b = world["b"]
    b.ask()
    b.land()
    world["a"].read()
    world["a"].turn()
    world["a"].land()  # acknowledged
    assert b.leases.rest(b.now_s) == 0
    b.read()
    assert b.leases.rest(b.now_s) == 4


def test_what_a_deposed_owner_wrote_behind_the_next_claim_is_void_for_all() -> None:
    world = owned("abc")
    a, b, c = (world[name] for name in "abc")
    world.run(1.2, asks=False)
    c.ask()
    c.land()
    a.read()
    a.turn()  # the lease is on its way, and the owner is paused with it
    assert a.outbox
    b.assigned()
    b.land()
    a.land()
    known = c.leases.rest(c.now_s)
    c.read()
    assert c.leases.rest(c.now_s) == known
    counted = owner_of(world, "b")
    b.read()
    assert counted.active
    assert ("c", 3) not in {(holder.replica, n) for holder, n in counted._counts._leases}
    a.read()
    assert not owner_of(world, "a").active


def test_leases_written_before_a_claim_stay_good_and_count_as_just_issued() -> None:
    world = owned("abc")
    world.run(3.0, asks=False)
    rest = {name: replica.leases.rest(replica.now_s) for name, replica in world.replicas.items()}
    before = owner_of(world, "a").total_units()
    world["a"].owns = False
    world["b"].assigned()
    world.run(0.3, asks=False)
    assert {name: replica.leases.rest(replica.now_s) for name, replica in world.replicas.items()} == rest
    assert owner_of(world, "b").total_units() == before
    world.run(34.0, asks=False)  # 37 s after they were issued, 34 after the claim
    assert owner_of(world, "b").total_units() == before
    world.run(2.0, asks=False)
    assert owner_of(world, "b").total_units() == 0


def test_a_new_owner_counts_what_a_silent_holder_has_from_its_own_claim() -> None:
    world = owned("abc")
    quiet(world, "c")
    world.run(30.0)
    world["a"].owns = False
    world["b"].assigned()
    world.run(10.0)  # 40 s after c was heard, 10 s after the claim
    assert [row for row in owner_of(world, "b")._counts._leases.values() if row.holder.replica == "c"]


def test_every_assignment_is_another_epoch_also_of_one_that_keeps_the_partition() -> None:
    world = owned()
    before = owner_of(world)._writer.epoch
    world["a"].assigned()
    world.run(0.3)
    after = owner_of(world)._writer.epoch
    assert before is not None
    assert after is not None
    assert after.claim > before.claim


def test_a_deposed_owner_s_late_claim_does_not_leave_the_book_without_one() -> None:
    world = owned("ab")
    world["b"].assigned()
    world["b"].land()
    world.append(ShardClaim(owner=Holder(replica="a", start="1"), assignment=1))  # a copy, and nobody is behind it
    world["a"].owns = False
    world.run(7.0)
    assert not owner_of(world, "b").active
    world.run(2.0)
    assert owner_of(world, "b").active


def test_another_cluster_replaces_all() -> None:
    world = owned()
    a = world["a"]
    owner = owner_of(world)
    record, at = world.log[0], At(cluster="kafka-2", offset=0)
    owner.read(record, at, now_s=a.now_s, live=True)
    a.leases.read(record, at, now_s=a.now_s)
    assert owner._writer.epoch is None or owner._writer.epoch.cluster == "kafka-2"
    assert a.leases.state(a.now_s) == "closed"


# whose clock


def test_a_lease_runs_from_when_its_request_was_sent_and_ends_a_little_early() -> None:
    world = World("ab", limit_units=8)
    world["a"].assigned()
    world.run(0.2, asks=False)
    b = world["b"]
    b.ask()
    world.now_s += 4.0
    world.run(0.1, asks=False)
    sent_s = world.now_s - 4.1
    assert b.leases.state(b.now_s) == "live"
    world.now_s = sent_s + 4.74
    assert b.leases.state(b.now_s) == "live"
    world.now_s = sent_s + 4.75
    assert b.leases.state(b.now_s) == "degraded"


def test_an_answer_that_comes_after_its_time_is_none() -> None:
    world = World("ab")
    world["a"].assigned()
    world.run(0.2, asks=False)
    b = world["b"]
    b.ask()
    world.now_s += 4.8
    world.run(0.1, asks=False)
    assert b.leases.state(b.now_s) == "closed"


def test_only_the_last_request_can_be_answered() -> None:
    world = World("ab")
    world["a"].assigned()
    world.run(0.2, asks=False)
    b = world["b"]
    b.ask()
    b.land()
    world["a"].read()
    world["a"].turn()
    world["a"].land()
    b.ask()  # keeps nothing: what answers the first is not its any more
    b.read()
    assert b.leases.rest(b.now_s) == 0
    world.run(0.2, asks=False)
    assert b.leases.rest(b.now_s) == 4
    assert owner_of(world).total_units() == 4


# back by word


def test_a_lease_that_is_not_kept_is_free_once_the_named_envelope_is_read() -> None:
    world = owned("ab")
    a, b = world["a"], world["b"]
    a.paused = True
    for _ in range(3):
        assert b.spend()
    b.leases.request(b.now_s, wants=0, envelopes=b.envelopes)  # lost on the way
    request = b.leases.request(b.now_s, wants=0, envelopes=b.envelopes)
    a.paused = False
    before = owner_of(world).total_units()
    dropped = LeaseRequest(book=BOOK, holder=b.me, n=request.n, wants=0, keeps=0, envelopes=b.envelopes)
    world.append(dropped)
    a.read()
    a.turn()
    assert owner_of(world).total_units() == before  # nothing of it was read on placements yet
    b.send()
    a.read_placements()
    a.turn()
    assert owner_of(world).total_units() < before
    entries = a.entries.units(0.0)
    assert entries == 3
    assert owner_of(world).total_units() == entries + sum(
        row.units for row in owner_of(world)._counts._leases.values() if row.holder == a.me
    )


def test_a_told_rest_counts_once_the_spending_before_it_was_read() -> None:
    world = owned("ab", limit_units=100)
    a, b = world["a"], world["b"]
    while b.spend():
        pass
    b.ask()
    [kept] = b.leases._held
    row = owner_of(world)._counts._leases[b.me, kept.n]
    b.land()
    a.read()
    a.turn()
    assert row.units == 4
    b.send()
    a.read_placements()
    a.turn()
    assert row.units == kept.rest == 0


def test_what_a_silent_holder_has_is_counted_for_30_s_after_its_lease_ended() -> None:
    world = owned("ab")
    quiet(world, "b")
    [row] = [row for row in owner_of(world)._counts._leases.values() if row.holder.replica == "b" and row.units][-1:]
    world.run(34.0)
    assert row in owner_of(world)._counts._leases.values()
    world.run(3.0)
    assert not [row for row in owner_of(world)._counts._leases.values() if row.holder.replica == "b"]


def test_silence_does_not_count_while_the_owner_hears_nothing() -> None:
    world = owned("ab")
    quiet(world, "b")
    world["a"].cut = True
    world.run(60.0)
    world["a"].cut = False
    world.run(3.0)
    assert [row for row in owner_of(world)._counts._leases.values() if row.holder.replica == "b"]


def test_another_start_settles_nothing_of_the_one_before() -> None:
    world = owned("ab")
    before = {key for key in owner_of(world)._counts._leases if key[0].replica == "b"}
    world.kill("b")
    world.run(3.0)
    now = owner_of(world)._counts._leases
    assert before <= now.keys()
    assert any(key[0].start == "1" for key in now)
    world.run(40.0)
    assert all(key[0].start == "2" for key in owner_of(world)._counts._leases if key[0].replica == "b")


def test_late_copies_of_requests_and_leases_change_nothing() -> None:
    world = owned("abc")
    world.run(2.0)
    rest = {name: replica.leases.rest(replica.now_s) for name, replica in world.replicas.items()}
    total = owner_of(world).total_units()
    for record in list(world.log[1:]):
        world.append(record)
    world.run(0.3, asks=False)
    assert {name: replica.leases.rest(replica.now_s) for name, replica in world.replicas.items()} == rest
    assert owner_of(world).total_units() == total


def test_a_late_copy_of_a_request_gets_no_answer() -> None:
    world = owned("ab")
    world.run(1.0)
    request = next(record for record in world.log if isinstance(record, LeaseRequest))
    world.run(0.3, asks=False)
    before = len(world.log)
    world.append(request)
    world.run(0.3, asks=False)
    assert len(world.log) == before + 1


def test_a_lease_counts_from_when_it_is_written() -> None:
    world = World("abc", limit_units=10)
    world["a"].assigned()
    world.run(0.2, asks=False)
    a, b, c = (world[name] for name in "abc")
    for asking in (b, c):
        asking.ask(wants=10)
        asking.land()
        a.read()
        a.turn()  # and nothing of it lies in the log yet
    lent = [record.units for record in a.outbox if isinstance(record, Lease)]
    assert sum(lent) <= 10


def test_the_book_is_not_lent_beyond_its_limit_whatever_is_asked() -> None:
    world = World("abc", limit_units=10)
    world["a"].assigned()
    world.run(0.2, asks=False)
    for _ in range(5):
        for replica in world.replicas.values():
            replica.ask(wants=50)
        world.run(0.2, asks=False)
        assert owner_of(world).total_units() <= 10
        for replica in world.replicas.values():
            while replica.spend():
                pass
    world.run(0.2, asks=False)
    assert world.running_units() <= 10


def test_an_owner_that_has_nothing_says_so() -> None:
    world = World("ab", limit_units=0)
    world["a"].assigned()
    world.run(10.0)
    b = world["b"]
    assert b.leases.state(b.now_s) == "live"
    assert b.leases.rest(b.now_s) == 0


# no owner heard


def test_without_an_owner_a_replica_works_on_within_the_rest_of_its_last_lease() -> None:
    world = owned("ab")
    b = world["b"]
    first = b.spend()
    assert first is not None
    assert first.credit is not None
    assert not first.credit.degraded
    world.run(1.0)
    world["a"].paused = True
    world.run(6.0)
    assert b.leases.state(b.now_s) == "degraded"
    rest = b.leases.rest(b.now_s)
    works = [work for _ in range(10) if (work := b.spend()) is not None]
    assert len(works) == rest > 0
    assert all(work.credit is not None and work.credit.degraded for work in works)
    b.end(works[0])
    assert b.spend() is not None
    assert b.spend() is None
    world["a"].paused = False
    world.run(2.0)
    assert b.leases.state(b.now_s) == "live"
    assert world.running_units() <= world.limit_units


def test_who_was_degraded_keeps_its_rest_until_it_has_a_new_lease() -> None:
    """A request on its way may be read at any time: what it gives back must not be worked on."""
    world = owned("ab")
    b = world["b"]
    world["a"].paused = True
    world.run(6.0)
    request = b.leases.request(b.now_s, wants=4, envelopes=b.envelopes)
    assert request.keeps > 0
    assert request.rest == b.leases.rest(b.now_s) > 0


def test_a_remote_origin_is_closed_without_an_owner() -> None:
    near, far = Leases(BOOK, Holder(replica="c", start="1")), Leases(BOOK, Holder(replica="c", start="1"), remote=True)
    for leases in (near, far):
        leases.request(0.0, wants=4, envelopes=0)
        lease = Lease(book=BOOK, order=order(claim=0), holder=leases.me, n=1, units=4)
        leases.read(lease, At(cluster=CLUSTER, offset=1), now_s=0.1)
        assert leases.spend(1, now_s=1.0) is not None
    assert near.spend(1, now_s=6.0) is not None
    assert far.spend(1, now_s=6.0) is None


def test_a_refund_after_the_rest_was_told_does_not_raise_what_was_told() -> None:
    world = owned("ab")
    b = world["b"]
    before = b.leases.rest(b.now_s)
    credit = b.leases.spend(1, now_s=b.now_s)
    assert credit is not None
    b.leases.refund(credit, now_s=b.now_s)
    assert b.leases.rest(b.now_s) == before
    b.leases.request(b.now_s, wants=0, envelopes=b.envelopes)  # one lease is left, and is kept
    credit = b.leases.spend(1, now_s=b.now_s)
    assert credit is not None
    told = b.leases.request(b.now_s, wants=0, envelopes=b.envelopes).rest
    b.leases.refund(credit, now_s=b.now_s)
    assert b.leases.rest(b.now_s) == told
    assert b.leases.spent == 0


# takeover


def test_the_first_new_lease_comes_within_9_s_of_kill_9() -> None:
    """Session 6 s, heartbeats each 2 s, 0.5 s for the group to move: at any phase of the kill."""
    for phase in range(20):
        world = owned("abc", limit_units=60)
        world.run(0.05 * phase * 2)
        killed_s = world.now_s
        world.kill("a")
        world["a"].paused = True
        b = world["b"]
        last = b.leases._held[-1].n
        world.run(6.5)
        b.assigned()
        while not (b.leases._held[-1].n > last and b.leases._held[-1].rest):
            world.move()
            assert world.now_s - killed_s <= 9.0
        assert world.units_at_large() <= world.limit_units


def test_who_comes_later_gets_its_part_of_what_the_first_would_take_whole() -> None:
    world = World("ab", limit_units=20)
    world["a"].assigned()
    world["b"].paused = True
    for _ in range(71):  # it will ask between two requests of the first
        world.move(wants=20)
    assert world["a"].leases.rest(world["a"].now_s) == 20
    world["b"].paused = False
    for _ in range(160):
        world.move(wants=20)
    assert world["b"].leases.rest(world["b"].now_s) >= 5
