"""Tickets: whose turn it is, what a grant may be used for, and how a ticket ends."""

from msgspec.structs import replace

from tests.core.shards import BOOK, SECRET, Replica, World
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.records import Grant, GrantUnused, Holder, TicketEnded, TokenShown
from tokenfleet.core.shard.token import TokenRefused, sign, verify


def owned(names: str = "ab", *, limit_units: int = 4) -> World:
    """A world where `a` owns the book and nobody asks for leases."""
    world = World(names, limit_units=limit_units)
    world["a"].assigned()
    world.run(0.3, asks=False)
    return world


def owner_of(world: World, name: str = "a") -> Owner:
    return world[name].owner


def granted(replica: Replica) -> list[str]:
    return replica.waiting.granted(replica.now_s)


def grants(world: World) -> list[Grant]:
    return [record for record in world.log if isinstance(record, Grant)]


def run(world: World, seconds: float) -> None:
    world.run(seconds, asks=False)


def test_tickets_go_in_order_while_they_fit() -> None:
    world = owned()
    b = world["b"]
    for number in range(6):
        b.queue(f"q{number}#0")
    run(world, 0.3)
    assert granted(b) == ["q0#0", "q1#0", "q2#0", "q3#0"]
    works = [b.use(ticket) for ticket in granted(b)]
    run(world, 1.0)
    assert granted(b) == []
    assert owner_of(world).total_units() == 4
    assert works[0] is not None
    b.end(works[0])
    run(world, 0.3)
    assert granted(b) == ["q4#0"]


def test_the_first_that_does_not_fit_is_waited_for_and_leases_wait_with_it() -> None:
    world = owned(limit_units=4)
    b = world["b"]
    work = b.queue("small#0", 2)
    run(world, 0.2)
    work = b.use("small#0")
    b.queue("large#0", 3)
    b.queue("small#1", 1)
    run(world, 0.3)
    assert granted(b) == []
    world.run(3.0)
    assert b.leases.rest(b.now_s) == 0
    assert work is not None
    b.end(work)
    run(world, 0.3)
    assert granted(b) == ["large#0", "small#1"]


def test_what_can_never_fit_ends_and_holds_nobody_up() -> None:
    world = owned(limit_units=4)
    b = world["b"]
    b.queue("huge#0", 5)
    b.queue("q#0", 1)
    run(world, 0.3)
    assert granted(b) == ["q#0"]
    assert b.waiting.ended() == [("huge#0", "too_large")]


def test_a_grant_is_good_for_less_than_2_s_from_the_message_that_it_cites() -> None:
    world = owned()
    b = world["b"]
    b.queue("q#0")
    sent_s = b.now_s
    world["a"].paused = True
    run(world, 0.2)
    world.now_s += 0.5
    world["a"].paused = False
    for _ in range(2):
        for each in (b, world["a"]):
            each.land()
            each.read()
            each.turn()
    world["a"].land()
    b.read()
    assert granted(b) == ["q#0"]
    world.now_s += 1.74 - (b.now_s - sent_s)
    assert granted(b) == ["q#0"]
    world.now_s += 0.011
    assert granted(b) == []
    assert b.waiting.use("q#0", b.now_s) is None


def test_a_late_grant_goes_back_by_word_and_its_ticket_is_the_first_to_get_another() -> None:
    world = owned(limit_units=1)
    b = world["b"]
    for number in range(3):
        b.queue(f"q{number}#0")
    run(world, 0.3)
    assert granted(b) == ["q0#0"]
    [first] = grants(world)
    run(world, 2.0)
    assert granted(b) == ["q0#0"]
    assert [grant.ticket for grant in grants(world)] == ["q0#0", "q0#0"]
    assert grants(world)[1].grant != first.grant
    assert owner_of(world).total_units() == 1
    # and a late copy of the grant that was declined, or of the word, is nothing
    [word] = [record for record in world.log if isinstance(record, GrantUnused)]
    world.append(word)
    world.append(first)
    world.append(word)
    run(world, 0.3)
    assert len(grants(world)) == 3  # the copy
    assert granted(b) == ["q0#0"]
    assert owner_of(world).total_units() == 1


def test_a_word_that_was_lost_is_said_again() -> None:
    world = owned(limit_units=1)
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    grant = b.waiting.use("q#0", b.now_s)
    assert grant is not None
    assert b.waiting.unused(grant, b.now_s) is not None  # and it never lands
    run(world, 0.5)
    assert granted(b) == []
    run(world, 1.0)
    assert granted(b) == ["q#0"]


def test_a_grant_that_was_lost_is_written_again_and_is_the_same() -> None:
    world = owned(limit_units=1)
    a, b = world["a"], world["b"]
    b.queue("q0#0")
    b.queue("q1#0")
    run(world, 0.3)
    work = b.use("q0#0")
    assert work is not None
    b.end(work)
    b.send()
    a.read_placements()
    a.read()
    a.turn()
    [lost] = [record for record in a.outbox if isinstance(record, Grant)]
    assert lost.ticket == "q1#0"
    a.outbox.clear()
    run(world, 0.8)
    assert granted(b) == []
    run(world, 0.5)
    assert granted(b) == ["q1#0"]
    assert grants(world)[-1].grant == lost.grant
    assert owner_of(world).total_units() == 1


def test_an_end_that_stands_is_remembered_by_an_owner_that_was_deposed() -> None:
    world = owned("abc", limit_units=1)
    a, b, c = (world[name] for name in "abc")
    b.queue("running#0")
    b.queue("q#0")
    run(world, 0.3)
    b.use("running#0")
    token = b.waiting.token("q#0")
    word = b.waiting.withdraw("q#0", b.now_s)
    assert word is not None
    b.outbox.append(word)
    run(world, 0.3)
    for owns, gave_up in ((c, a), (a, c)):
        gave_up.owns = False
        owns.assigned()
        run(world, 0.3)
    b.outbox.append(b.waiting.show("q#0", token, left_s=9.0, now_s=b.now_s))
    run(world, 0.3)
    assert b.waiting.ended() == [("q#0", "withdrawn")]


def test_a_grant_that_its_deposed_owner_never_saw_in_the_log_was_none() -> None:
    world = owned("abc", limit_units=1)
    a, b, c = (world[name] for name in "abc")
    b.queue("q0#0")
    b.queue("q1#0")
    run(world, 0.3)
    work = b.use("q0#0")
    assert work is not None
    b.end(work)
    b.send()
    a.read_placements()
    a.read()
    a.turn()
    assert [record.ticket for record in a.outbox if isinstance(record, Grant)] == ["q1#0"]
    a.outbox.clear()
    a.owns = False
    c.assigned()
    c.land()
    a.read()
    assert not a.owner.line.places["q1#0"].granted
    assert a.owner.total_units() == 0


def test_nobody_but_its_gateway_gives_a_grant_back() -> None:
    world = owned("abc", limit_units=1)
    b, c = world["b"], world["c"]
    b.queue("q#0")
    run(world, 0.3)
    [grant] = grants(world)
    world.append(GrantUnused(book=BOOK, holder=c.me, n=99, ticket="q#0", grant=grant.grant))
    c.queue("other#0")
    run(world, 0.3)
    assert granted(b) == ["q#0"]
    assert granted(c) == []


def test_a_grant_does_not_come_back_by_silence() -> None:
    world = owned(limit_units=1)
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    b.paused = True
    world["a"].queue("next#0")
    run(world, 31.0)
    assert granted(world["a"]) == []
    assert owner_of(world).total_units() == 1
    run(world, 2.5)
    assert granted(world["a"]) == ["next#0"]


def test_a_grant_is_used_once_whatever_copies_come() -> None:
    world = owned(limit_units=4)
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    work = b.use("q#0")
    assert work is not None
    for grant in grants(world):
        world.append(grant)
    run(world, 0.3)
    assert granted(b) == []
    assert b.waiting.use("q#0", b.now_s) is None
    assert not [record for record in world.log if isinstance(record, GrantUnused)]
    b.end(work)
    run(world, 0.3)
    assert owner_of(world).total_units() == 0


def test_after_use_what_found_no_instance_goes_back_to_the_head() -> None:
    world = owned(limit_units=1)
    b = world["b"]
    b.queue("q0#0")
    b.queue("q1#0")
    run(world, 0.3)
    grant = b.waiting.use("q0#0", b.now_s)
    assert grant is not None
    word = b.waiting.unused(grant, b.now_s)
    assert word is not None
    b.outbox.append(word)
    run(world, 0.3)
    assert granted(b) == ["q0#0"]


def test_grants_go_only_to_tickets_heard_within_2_s_and_the_others_keep_their_place() -> None:
    world = owned("abc", limit_units=1)
    b, c = world["b"], world["c"]
    c.queue("running#0")
    run(world, 0.2)
    work = c.use("running#0")
    b.queue("first#0")
    run(world, 0.1)
    c.queue("second#0")
    run(world, 0.1)
    b.paused = True
    run(world, 2.5)
    assert work is not None
    c.end(work)
    run(world, 0.3)
    assert granted(c) == ["second#0"]
    work = c.use("second#0")
    c.queue("third#0")
    b.paused = False
    run(world, 1.5)
    assert work is not None
    c.end(work)
    run(world, 0.3)
    assert granted(b) == ["first#0"]


def test_a_ticket_unheard_for_10_s_ends_and_not_before() -> None:
    world = owned("ab", limit_units=1)
    a, b = world["a"], world["b"]
    a.queue("running#0")
    run(world, 0.2)
    a.use("running#0")
    b.queue("q#0")
    run(world, 0.3)
    b.paused = True
    run(world, 9.0)
    assert "q#0" in owner_of(world).line.places
    run(world, 3.0)
    assert "q#0" not in owner_of(world).line.places
    b.paused = False
    run(world, 0.5)
    assert b.waiting.ended() == [("q#0", "unheard")]


def test_a_caller_that_leaves_ends_its_ticket_and_frees_its_grant() -> None:
    world = owned("ab", limit_units=1)
    b = world["b"]
    b.queue("q#0")
    b.queue("next#0")
    run(world, 0.3)
    assert granted(b) == ["q#0"]
    word = b.waiting.withdraw("q#0", b.now_s)
    assert word is not None
    b.outbox.append(word)
    run(world, 0.3)
    assert granted(b) == ["next#0"]
    for grant in grants(world)[:1]:
        world.append(grant)  # a late copy
    run(world, 0.3)
    assert granted(b) == ["next#0"]
    assert owner_of(world).total_units() == 1


# tokens and takeover


def test_a_token_shown_for_a_granted_ticket_gets_the_same_grant() -> None:
    world = owned("ab", limit_units=1)
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    token = b.waiting.token("q#0")
    b.outbox.append(b.waiting.show("q#0", token, left_s=30.0, now_s=b.now_s))
    run(world, 0.3)
    first, again = grants(world)
    assert again.grant == first.grant
    assert again.cites > first.cites
    assert owner_of(world).total_units() == 1
    assert b.use("q#0") is not None
    run(world, 0.3)
    assert granted(b) == []


def test_a_token_shown_through_another_replica_moves_a_waiting_ticket_but_no_grant() -> None:
    world = owned("abc", limit_units=1)
    b, c = world["b"], world["c"]
    b.queue("q0#0")
    b.queue("q1#0")
    run(world, 0.3)
    for ticket in ("q0#0", "q1#0"):
        c.outbox.append(c.waiting.show(ticket, b.waiting.token(ticket), left_s=30.0, now_s=c.now_s))
    run(world, 0.3)
    assert {grant.grant for grant in grants(world)} == {grants(world)[0].grant}
    assert granted(c) == []
    assert granted(b) == ["q0#0"]
    work = b.use("q0#0")
    assert work is not None
    run(world, 0.3)
    assert c.waiting.ended() == [("q0#0", "used")]
    b.end(work)
    run(world, 0.3)
    assert granted(c) == ["q1#0"]
    assert granted(b) == []


def test_a_new_owner_knows_tickets_and_grants_from_the_log() -> None:
    world = owned("abc", limit_units=1)
    b = world["b"]
    for number in range(3):
        b.queue(f"q{number}#0")
    run(world, 0.3)
    world.kill("a")
    world["c"].assigned()
    run(world, 0.3)
    new = owner_of(world, "c")
    assert new.active
    assert set(new.line.places) == {"q0#0", "q1#0", "q2#0"}
    assert granted(b) == ["q0#0"]
    assert new.total_units() == 1
    work = b.use("q0#0")
    assert work is not None
    run(world, 0.3)
    b.end(work)
    run(world, 0.3)
    assert granted(b) == ["q1#0"]
    assert world.used == {"q0#0": 1}


def test_tokens_rebuild_the_line_in_its_order_when_the_log_is_lost() -> None:
    world = owned("ab", limit_units=1)
    b = world["b"]
    for number in range(4):
        b.queue(f"q{number}#0")
    run(world, 0.3)
    b.use("q0#0")
    run(world, 0.3)
    world.log.clear()
    world.cluster = "kafka-2"
    world.kill("a")
    b.at = 0
    world["a"].assigned()
    run(world, 0.3)
    owner = owner_of(world)
    assert [place.ticket.ticket for place in owner.line.first(9)] == ["q1#0", "q2#0", "q3#0"]
    b.queue("later#0")
    run(world, 0.3)
    assert [place.ticket.ticket for place in owner.line.first(9)][-1] == "later#0"


def test_a_token_of_a_later_epoch_or_a_forged_one_is_not_taken() -> None:
    world = owned("ab")
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    owner = owner_of(world)
    epoch = owner._writer.epoch
    assert epoch is not None
    token = verify(b.waiting.token("q#0"), SECRET, epoch=epoch, now_s=0.0)
    assert not isinstance(token, TokenRefused)
    strangers = (
        sign(replace(token, ticket="later#0", claim=epoch.claim + 1), SECRET),
        sign(replace(token, ticket="forged#0"), b"guess"),
        sign(replace(token, ticket="other#0", book="other@b"), SECRET),
        sign(replace(token, ticket="old#0", deadline_s=0.0), SECRET),
    )
    for n, text in enumerate(strangers):
        world.append(TokenShown(book=BOOK, holder=Holder(replica="x", start="1"), n=n + 1, token=text, left_s=9.0))
    run(world, 0.3)
    assert set(owner.line.places) == {"q#0"}
    assert owner.refused_tokens == 4


def test_a_ticket_that_was_used_is_not_rebuilt_from_its_token() -> None:
    world = owned("ab")
    b = world["b"]
    b.queue("q#0")
    run(world, 0.3)
    token = b.waiting.token("q#0")
    assert b.use("q#0") is not None
    run(world, 0.3)
    b.outbox.append(b.waiting.show("q#0", token, left_s=30.0, now_s=b.now_s))
    run(world, 0.3)
    assert b.waiting.ended() == [("q#0", "used")]
    assert [record.why for record in world.log if isinstance(record, TicketEnded)] == ["used", "used"]
