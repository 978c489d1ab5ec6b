"""Class queues over one book: who has its turn spends credit, and without any keeps its place until some is lent."""

from typing import Any

from msgspec.structs import replace

from tests.core.sharing import POOL, Replica, Sharing
from tokenfleet.core.asked import ROUTE, Decided
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import TableNotReadyError
from tokenfleet.core.schedule import let_go, withdrawn

BIG = 8_000  # an eighth of the one instance's KV, with its output


def paced(*names: str) -> Sharing:
    """Replicas that an owner has answered, each with queues of its own."""
    site = Sharing(*names, small=1)
    for each in site.replicas:
        policy = each.site.policy
        pacing = replace(policy.slomax.pacing, enabled=True)
        roomy = {name: replace(terms, kv_share_max=1.0) for name, terms in policy.classes.items()}
        each.site.adopt(replace(policy, classes=roomy, slomax=replace(policy.slomax, pacing=pacing)))
    site.passes(2.0)
    return site


def asks(at: Replica, name: str, request_class: str = "chat", **facts: Any) -> Decision:
    return at.asks(name, prompt_tokens=BIG, wait_max_s=60.0, declared_class=request_class, **facts)


def begins(site: Sharing, at: Replica, decision: Decision) -> None:
    """Its first token comes, so that no work lies before the next."""
    at.town.hears_outcome(decision, "first_token", ttft_s=0.3)
    for each in site.replicas:
        if each is not at:
            each.town.hears_outcome(decision, "first_token", ttft_s=0.3)


def fill(site: Sharing, at: Replica) -> list[Decision]:
    """Large requests until the pool is lent out; those that run."""
    running: list[Decision] = []
    for number in range(20):
        asked = asks(at, f"{at.me.replica}-big-{number}")
        site.passes(1.5)
        decision = asked if asked.verdict == "admit" else next(iter(finals(at)), asked)
        if decision.verdict != "admit":
            withdrawn(at.site, (decision.request, 0), at.now_s)
            return running
        begins(site, at, decision)
        running.append(decision)
    raise AssertionError("the pool takes more than it holds")


def finals(at: Replica) -> list[Decision]:
    return [answer.decision for answer in at.releases() if isinstance(answer, Decided)]


def test_two_replicas_with_queues_of_their_own_stay_within_one_pool() -> None:
    site = paced("one", "two")
    one, two = site.replicas
    running = fill(site, one)
    assert len(running) >= 4
    assert [asks(each, f"{each.me.replica}-waits").verdict for each in (one, two)] == ["queue", "queue"]
    site.passes(3.0)
    assert (finals(one), finals(two)) == ([], [])
    assert site.running <= site.limit
    one.ends(running[0])
    site.passes(3.0)
    went = finals(one) + finals(two)
    assert len(went) == 1
    assert site.running <= site.limit


def test_who_waits_for_credit_has_no_ticket_and_keeps_its_place_before_a_smaller_one() -> None:
    site = paced("one")
    one = site.owner
    running = fill(site, one)
    assert asks(one, "first").verdict == "queue"
    small = one.asks("small", prompt_tokens=100, wait_max_s=60.0, declared_class="chat", elapsed_s=0.0)
    assert small.verdict == "queue"
    site.passes(2.0)
    assert finals(one) == []
    assert len(one.purse.line(POOL)) == 0
    assert len(site.owner.owners[POOL].line) == 0
    one.ends(running[0])
    site.passes(3.0)
    first, *_ = finals(one)
    assert first.request == "first"


def test_another_class_goes_on_beside_one_that_waits_for_credit() -> None:
    site = paced("one")
    one = site.owner
    fill(site, one)
    assert asks(one, "waits", "batch").verdict == "queue"
    small = one.asks("chat", prompt_tokens=100, wait_max_s=60.0, declared_class="chat")
    site.passes(2.0)
    went = [small, *finals(one)]
    assert ("chat", "admit") in [(decision.request, decision.verdict) for decision in went]


def test_a_request_that_waits_asks_for_its_credit_once_however_often_it_is_looked_at() -> None:
    site = paced("one")
    one = site.owner
    fill(site, one)
    assert asks(one, "waits").verdict == "queue"
    leases = one.purse.leases[POOL]
    leases.request(one.now_s, wants=0, envelopes=0)
    for _ in range(10):
        assert finals(one) == []
    assert BIG < leases.asked < 2 * BIG


def test_who_can_wait_no_longer_is_refused_where_nothing_is_lent() -> None:
    site = paced("one")
    one = site.owner
    fill(site, one)
    assert one.asks("r", prompt_tokens=BIG, wait_max_s=1.0).verdict == "queue"
    site.passes(1.5)
    [late] = finals(one)
    assert (late.verdict, late.reason) == ("reject", "all_busy")


def test_what_the_book_could_never_lend_is_refused_on_arrival_and_a_route_alone_goes_without() -> None:
    site = paced("one")
    one = site.owner
    fill(site, one)
    never = one.asks("never", prompt_tokens=49_000, wait_max_s=60.0)
    assert (never.verdict, never.reason) == ("reject", "infeasible")
    assert one.asks("route", ROUTE, prompt_tokens=100, wait_max_s=60.0).verdict == "admit"


def test_a_replica_that_ends_leaves_those_who_wait_to_the_next_who_is_asked() -> None:
    site = paced("one", "two")
    one, two = site.replicas
    fill(site, one)
    asks(two, "r")
    assert isinstance(let_go(two.site, ("r", 0), two._next_ids(), now_s=two.now_s), TableNotReadyError)
    assert asks(one, "r").verdict == "queue"


def test_without_an_owner_what_waits_spends_the_last_lease_marked_degraded() -> None:
    site = paced("one", "two")
    two = site.replicas[1]
    site.owned = False
    site.passes(6.0)
    said = two.asks("r", prompt_tokens=100, wait_max_s=60.0)
    assert (said.verdict, said.mode) == ("admit", "degraded")
