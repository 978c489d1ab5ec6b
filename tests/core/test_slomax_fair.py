"""Fair shares between tenants: against a fluid oracle, whatever was predicted, and within bounded memory."""

import heapq
from collections import deque
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenfleet.core.policy import Tenant
from tokenfleet.core.slomax.fair import Fair, Waiting, price
from tokenfleet.core.slomax.terms import FairPolicy

TENANTS = {name: Tenant() for name in "abcd"}


def fair(tenants: dict[str, Tenant] | None = None, **terms: float) -> Fair:
    return Fair(FairPolicy(**terms), TENANTS if tenants is None else tenants, default_tenant="d")


def names(scheduler: Fair, *waiting: Waiting) -> str:
    return "".join(waiting[place].tenant for place in scheduler.order(waiting))


def of(tenant: str, rank: float = 0.0, *, joined_ns: int = 0, seconds: float = 1.0) -> Waiting:
    return Waiting(tenant, joined_ns, rank, seconds)


def test_a_token_costs_its_prefill_and_its_part_of_an_iteration() -> None:
    prices = price(prefill_tokens_per_s=20_000.0, tpot_s=0.04, batch=20.0)
    assert prices.seconds(uncached_tokens=4_000, output_tokens=300) == pytest.approx(0.2 + 0.6)


def test_tenants_take_turns_however_many_each_brings() -> None:
    assert names(fair(), of("a", 1), of("a", 2), of("a", 3), of("b", 4), of("b", 5), of("c", 6)) == "abcaba"


def test_inside_a_tenant_the_class_s_own_order_holds() -> None:
    waiting = [of("a", 3), of("a", 1), of("b", 9), of("a", 2)]
    assert [(waiting[i].tenant, waiting[i].rank) for i in fair().order(waiting)] == [
        ("a", 1),
        ("b", 9),
        ("a", 2),
        ("a", 3),
    ]


def test_a_tenant_of_twice_the_weight_gets_twice_as_much() -> None:
    scheduler = fair({"a": Tenant(weight=2.0), "b": Tenant()})
    assert names(scheduler, *[of(name) for name in "aaaaaabbb"])[:6].count("a") == 4


def test_a_large_request_takes_as_many_turns_as_it_costs() -> None:
    scheduler = fair()
    scheduler.dispatched("a", 3.0, joined_ns=0, waiting=9)
    assert names(scheduler, *[of(name) for name in "abbbb"]) == "bbbab"


def test_a_charge_comes_with_the_dispatch_and_not_with_waiting() -> None:
    scheduler = fair()
    for _ in range(100):
        assert scheduler.start_of("a") == 0
    scheduler.dispatched("a", 1.0, waiting=1)
    assert scheduler.start_of("a") == 10**9


def test_waste_is_billed_and_what_was_not_used_is_given_back() -> None:
    scheduler = fair()
    scheduler.dispatched("a", 2.0, waiting=1)
    scheduler.dispatched("b", 2.0, waiting=1)
    scheduler.settled("a", predicted_s=2.0, actual_s=0.5)  # cancelled early
    scheduler.settled("b", predicted_s=2.0, actual_s=6.0)  # ran on and timed out
    assert (scheduler.start_of("a", 0), scheduler.start_of("b", 0)) == (500_000_000, 6_000_000_000)


def test_who_was_idle_joins_now_and_has_saved_nothing() -> None:
    scheduler = fair()
    scheduler.dispatched("b", 1.0, waiting=5)
    for _ in range(100):
        scheduler.dispatched("a", 1.0, waiting=5)
    assert scheduler.virtual_ns == 99 * 10**9
    assert scheduler.start_of("b") == scheduler.virtual_ns
    assert names(scheduler, *[of(name, joined_ns=scheduler.virtual_ns) for name in "aabb"]) == "baba"


def test_who_waits_keeps_its_start_while_others_are_served() -> None:
    scheduler = fair()
    joined_ns = scheduler.virtual_ns
    for _ in range(5):  # b's request fits nowhere yet
        scheduler.dispatched("a", 1.0, waiting=5)
    assert scheduler.start_of("b", joined_ns) == 0


def test_nobody_is_further_ahead_than_the_credit() -> None:
    scheduler = fair(credit_max_s=3.0)
    joined_ns = scheduler.virtual_ns
    for _ in range(100):
        scheduler.dispatched("a", 1.0, waiting=5)
    scheduler.settled("a", predicted_s=100.0, actual_s=0.0)
    assert scheduler.start_of("b", joined_ns) == scheduler.start_of("a", joined_ns) == 96 * 10**9


def test_when_nothing_waits_all_begin_anew() -> None:
    scheduler = fair()
    scheduler.dispatched("a", 1000.0, waiting=0)
    assert scheduler.start_of("a") == scheduler.start_of("b")


def test_charges_and_corrections_leave_nothing_behind() -> None:
    scheduler, rng = fair(credit_max_s=0.0), Random(1)
    exact = fair(credit_max_s=0.0)
    for _ in range(20_000):
        predicted_s, actual_s = rng.random(), rng.random()
        scheduler.dispatched("a", predicted_s, joined_ns=0, waiting=1)
        scheduler.settled("a", predicted_s=predicted_s, actual_s=actual_s)
        scheduler.settled("a", predicted_s=actual_s, actual_s=1 / 3)
        exact.dispatched("a", 1 / 3, joined_ns=0, waiting=1)
    assert scheduler.start_of("a", 0) == exact.start_of("a", 0)


def test_any_number_of_names_share_one_account_and_leave_the_policy_s_tenants_alone() -> None:
    scheduler = fair()
    scheduler.dispatched("a", 5.0, waiting=1)
    for number in range(300_000):
        scheduler.dispatched(f"stranger-{number}", 0.003, joined_ns=0, waiting=1)
    assert len(scheduler) == 2
    assert scheduler.start_of("a", 0) == scheduler.virtual_ns - 10 * 10**9  # still known, and 10 s ahead by now
    assert scheduler.start_of("somebody") == scheduler.start_of("d")


def test_a_tenant_that_left_the_policy_is_forgotten_and_the_others_are_not() -> None:
    scheduler = fair()
    scheduler.dispatched("a", 5.0, joined_ns=0, waiting=1)
    scheduler.dispatched("b", 5.0, joined_ns=0, waiting=1)
    scheduler.follow(FairPolicy(), {"b": Tenant(), "d": Tenant()}, default_tenant="d")
    assert len(scheduler) == 1
    assert scheduler.start_of("b", 0) == 5 * 10**9


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf"), 2.0**63])
def test_no_prediction_breaks_the_tags(seconds: float) -> None:
    scheduler = fair()
    scheduler.dispatched("a", seconds, waiting=1)
    scheduler.settled("a", predicted_s=seconds, actual_s=1.0)
    assert scheduler.start_of("a") == 10**9


def test_order_is_the_same_for_the_same_facts() -> None:
    rng = Random(2)
    waiting = [of(rng.choice("abcd"), rng.randrange(5), seconds=rng.random()) for _ in range(500)]
    places = list(fair().order(waiting))
    assert places == list(fair().order(waiting))
    assert sorted(places) == list(range(500))


Jobs = dict[str, list[tuple[float, float, float]]]  # by tenant: arrives, predicted GPU seconds, takes


def served(scheduler: Fair, jobs: Jobs, *, engines: int, until_s: float) -> dict[str, float]:
    """GPU seconds of each tenant at `engines` that serve one request each at a time."""
    arriving = {name: sorted(each, reverse=True) for name, each in jobs.items()}
    lines: dict[str, deque[tuple[Waiting, float]]] = {name: deque() for name in jobs}
    running: list[tuple[float, str, float, float]] = []
    got_s, now_s, number = dict.fromkeys(jobs, 0.0), 0.0, 0
    while now_s < until_s:
        for name, coming in arriving.items():
            while coming and coming[-1][0] <= now_s:
                _, predicted_s, takes_s = coming.pop()
                number += 1
                lines[name].append((Waiting(name, scheduler.virtual_ns, number, predicted_s), takes_s))
        while len(running) < engines and any(lines.values()):
            firsts = [line[0][0] for line in lines.values() if line]
            tenant = firsts[next(scheduler.order(firsts))].tenant
            chosen, takes_s = lines[tenant].popleft()
            left = sum(map(len, lines.values()))
            scheduler.dispatched(tenant, chosen.seconds, joined_ns=chosen.joined_ns, waiting=left)
            heapq.heappush(running, (now_s + takes_s, tenant, chosen.seconds, takes_s))
        now_s = min([running[0][0]] if running else [], default=until_s)
        now_s = min([now_s, *[coming[-1][0] for coming in arriving.values() if coming]])
        while running and running[0][0] <= now_s:
            _, tenant, predicted_s, takes_s = heapq.heappop(running)
            scheduler.settled(tenant, predicted_s=predicted_s, actual_s=takes_s)
            got_s[tenant] += takes_s
    return got_s


def fluid(jobs: Jobs, weights: dict[str, float], *, engines: int, until_s: float) -> dict[str, float]:
    """The same when the pool is a fluid, shared by weight among those with something waiting."""
    step_s = 0.05
    backlog_s, got_s = dict.fromkeys(weights, 0.0), dict.fromkeys(weights, 0.0)
    arriving = {name: sorted(each, reverse=True) for name, each in jobs.items()}
    for tick in range(int(until_s / step_s)):
        for name, coming in arriving.items():
            while coming and coming[-1][0] <= tick * step_s:
                backlog_s[name] += coming.pop()[2]
        left_s, hungry = engines * step_s, {name for name in weights if backlog_s[name] > 0.0}
        while left_s > 1e-12 and hungry:
            unit_s = left_s / sum(weights[name] for name in hungry)
            full = {name for name in hungry if backlog_s[name] <= unit_s * weights[name]}
            for name in full or hungry:
                given_s = min(backlog_s[name], unit_s * weights[name])
                backlog_s[name] -= given_s
                got_s[name] += given_s
                left_s -= given_s
            hungry = hungry - full if full else set[str]()
    return got_s


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6), engines=st.sampled_from([1, 2, 4]), off=st.tuples(*[st.sampled_from([0.5, 2.0])] * 4)
)
def test_a_tenant_at_a_hundred_times_leaves_the_others_their_fair_share(
    seed: int, engines: int, off: tuple[float, ...]
) -> None:
    """Whatever the mean error of each tenant's predictions, and though some of the flood is cancelled."""
    rng, until_s, mean_s = Random(seed), 300.0, 0.2
    weights = {name: rng.choice([0.5, 1.0, 2.0]) for name in "abcd"}
    jobs: Jobs = {"a": [(0.0, off[0] * mean_s, rng.choice([0.01, mean_s])) for _ in range(int(4 * until_s * engines))]}
    jobs["a"] += [(0.0, off[0], 1.0) for _ in range(int(until_s * engines))]  # 100 times its part would never be served
    for name, factor in zip("bcd", off[1:], strict=True):
        part = engines * weights[name] / sum(weights.values())
        at_s, jobs[name] = 0.0, []
        while (at_s := at_s + rng.expovariate(rng.choice([0.5, 0.95, 2.0]) * part / mean_s)) < until_s:
            takes_s = rng.uniform(0.0, 2 * mean_s)
            jobs[name].append((at_s, takes_s * factor, takes_s))
    tenants = {name: Tenant(weight=weight) for name, weight in weights.items()}
    got_s = served(fair(tenants), jobs, engines=engines, until_s=until_s)
    ideal_s = fluid(jobs, weights, engines=engines, until_s=until_s)
    assert sum(got_s.values()) >= 0.95 * engines * until_s
    for name in "bcd":
        assert got_s[name] >= 0.95 * ideal_s[name] - 1.0, name
