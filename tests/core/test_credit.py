"""Credit: replicas of a site spend one pool between them, and what finds none waits in one line."""

from msgspec.structs import replace

from tests.core.sharing import POOL, Replica, Sharing
from tokenfleet.core.asked import ADMIT, ROUTE, Decided
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import TableNotReadyError
from tokenfleet.core.schedule import let_go, withdrawn

BIG = 8_000  # an eighth of the one instance's KV, with its output


def answered(*names: str) -> Sharing:
    """Replicas that an owner has answered."""
    site = Sharing(*names, small=1)
    site.passes(2.0)
    return site


def fill(site: Sharing, at: Replica) -> list[Decision]:
    """Large requests that gateways can hold, until one is held; those that run."""
    running: list[Decision] = []
    while len(running) < 20:
        decision = at.asks(f"{at.me.replica}-big-{len(running)}", prompt_tokens=BIG, wait_max_s=60.0)
        if decision.verdict != "admit":
            assert decision.verdict == "queue"
            return running
        running.append(decision)
        site.passes(1.5)
    raise AssertionError("the pool takes more than it holds")


def finals(at: Replica) -> list[Decision]:
    return [answer.decision for answer in at.releases() if isinstance(answer, Decided)]


def test_before_an_owner_has_answered_a_replica_goes_on_as_without_a_shard() -> None:
    site = Sharing("one", small=1)
    assert site.owner.asks("r").verdict == "admit"
    assert site.owner.purse.leases == {}


def test_what_two_replicas_place_stays_within_one_pool_and_is_lent_on_when_it_ends() -> None:
    site = answered("one", "two")
    one, two = site.replicas
    running = fill(site, one)
    assert len(running) >= 4
    assert two.asks("two-big", prompt_tokens=BIG, wait_max_s=60.0).verdict == "queue"
    site.passes(5.0)
    assert site.running <= site.limit
    assert (finals(one), finals(two)) == ([], [])
    for decision in running[:2]:
        one.ends(decision)
    site.passes(4.0)
    went = finals(one) + finals(two)
    assert [(each.verdict, each.reason) for each in went] == [("admit", ""), ("admit", "")]
    assert site.running <= site.limit


def test_a_gateway_that_can_t_wait_is_refused_with_a_time_and_what_never_fits_as_infeasible() -> None:
    site = answered("one")
    fill(site, site.owner)
    refused = site.owner.asks("now", prompt_tokens=BIG)
    assert (refused.verdict, refused.reason) == ("reject", "all_busy")
    assert refused.admission is not None
    assert refused.admission.retry_after_s is not None
    never = site.owner.asks("never", ADMIT, prompt_tokens=50_000)
    assert (never.verdict, never.reason) == ("reject", "infeasible"), never.sentence


def test_admit_looks_and_route_spends() -> None:
    site = answered("one")
    one = site.owner
    before = one.purse.rest(POOL, one.now_s)
    assert one.asks("a", ADMIT).verdict == "admit"
    assert one.purse.rest(POOL, one.now_s) == before
    assert one.asks("a", ROUTE).verdict == "admit"
    assert one.purse.rest(POOL, one.now_s) < before
    fill(site, one)
    assert one.asks("b", ADMIT, prompt_tokens=BIG).reason == "all_busy"
    assert one.asks("b", ROUTE, prompt_tokens=BIG).verdict == "admit"  # nobody asked whether it may


def test_a_dry_run_spends_and_asks_nothing() -> None:
    site = answered("one")
    one = site.owner
    before = one.purse.rest(POOL, one.now_s)
    assert one.asks("a", dry_run=True).verdict == "admit"
    assert one.purse.rest(POOL, one.now_s) == before
    fill(site, one)
    waiting = len(one.site.held)
    assert one.asks("b", prompt_tokens=BIG, wait_max_s=60.0, dry_run=True).verdict == "queue"
    assert len(one.site.held) == waiting == 1


def test_without_an_owner_a_replica_spends_its_last_lease_marked_degraded_and_queues_nothing() -> None:
    site = answered("one", "two")
    two = site.replicas[1]
    site.owned = False
    site.passes(6.0)
    first = two.asks("r")
    assert (first.verdict, first.mode) == ("admit", "degraded")
    while (last := two.asks(f"r-{two.town.decisions}", wait_max_s=60.0)).verdict == "admit":
        assert last.mode == "degraded"
    assert (last.verdict, last.reason) == ("reject", "all_busy")
    two.ends(first)
    site.passes(0.1)
    assert two.asks("again").mode == "degraded"


def test_who_leaves_gives_the_ticket_back_and_who_waited_for_too_long_is_refused() -> None:
    site = answered("one", "two")
    one, two = site.replicas
    running = fill(site, one)
    two.asks("leaves", prompt_tokens=BIG, wait_max_s=60.0)
    two.asks("waits", prompt_tokens=BIG, wait_max_s=2.0)
    withdrawn(two.site, ("leaves", 0), two.now_s)
    site.passes(3.0)
    [late] = finals(two)
    assert (late.request, late.verdict, late.reason) == ("waits", "reject", "all_busy")
    withdrawn(one.site, (f"one-big-{len(running)}", 0), one.now_s)
    site.passes(1.0)
    assert len(site.owner.owners[POOL].line) == 0


def test_a_replica_that_ends_leaves_its_tickets_to_the_next_who_is_asked() -> None:
    site = answered("one", "two")
    one, two = site.replicas
    running = fill(site, one)
    two.asks("r", prompt_tokens=BIG, wait_max_s=60.0)
    site.passes(0.5)
    assert isinstance(let_go(two.site, ("r", 0), two._next_ids(), now_s=two.now_s), TableNotReadyError)
    assert one.asks("r", prompt_tokens=BIG, wait_max_s=60.0).verdict == "queue"
    one.asks("behind", prompt_tokens=BIG, wait_max_s=60.0)
    withdrawn(one.site, (f"one-big-{len(running)}", 0), one.now_s)
    for decision in running[:1]:
        one.ends(decision)
    site.passes(4.0)
    assert next(each.request for each in finals(one)) == "r"


def test_while_engines_are_full_of_what_nobody_placed_a_granted_request_waits_on() -> None:
    site = answered("one")
    one = site.owner
    one.town.beats = [replace(beat, kv_used_blocks=1600.0, running=40.0) for beat in one.town.beats]
    site.passes(6.0)
    assert one.asks("now").reason == "all_busy"
    assert one.asks("r", wait_max_s=60.0).verdict == "queue"
    site.passes(1.0)
    records = len(site.log)
    for _ in range(20):
        assert finals(one) == []
        site.passes(0.05)
    assert len(site.log) < records + 12  # it keeps its grant and does not ask for another each time
    one.town.beats = [replace(beat, kv_used_blocks=0.0, running=0.0) for beat in one.town.beats]
    site.passes(6.0)
    assert [(each.request, each.verdict) for each in finals(one)] == [("r", "admit")]


def test_a_pool_whose_size_nobody_knows_has_no_book() -> None:
    site = answered("one")
    one = site.owner
    one.town.beats = [replace(beat, kv_total_blocks=None) for beat in one.town.beats]
    site.passes(3.0)
    assert one.purse.rest(POOL, one.now_s) == 0
    assert one.asks("r").verdict == "admit"


def test_a_tenant_s_quota_is_one_for_all_replicas() -> None:
    site = Sharing("one", "two", small=2)
    for each in site.replicas:
        tenants = {**each.site.policy.tenants}
        tenants["acme"] = replace(tenants["acme"], requests_per_minute_max=30)
        each.site.adopt(replace(each.site.policy, tenants=tenants))
    site.passes(2.0)
    said: list[str] = []
    for number in range(400):
        decision = site.replicas[number % 2].asks(f"q-{number}", prompt_tokens=10, max_tokens=1)
        said.append(decision.reason)
        site.passes(0.1)
    assert set(said) == {"", "quota"}
    assert 30 <= said.count("") <= 30 + 2  # each may be one ahead of the owner
