"""Dispatch: where requests go, when they stay, and which reason a refusal has."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, request
from tests.core.sites import peer, pool_summary, send_to_site
from tokenfleet.core.fleetmind.constraints import LOAD, RIGHTS
from tokenfleet.core.fleetmind.sends import SENDS_PER_POOL_MAX, Replay, Send, Sends, site_wait_s
from tokenfleet.core.policy import Policy, Tenant
from tokenfleet.core.records import Vector
from tokenfleet.core.view import PeerView


def waiting(site: str, wait_s: float, *, ready: int = 2, hit: int = 0, age_s: float = 0.2, **facts: Any) -> PeerView:
    pool = pool_summary(site, ready=ready, waits_s=(wait_s,) * ready, **facts)
    return peer(site, pool, age_s=age_s, hit_tokens=hit)


def tenant(**terms: Any) -> Policy:
    return replace(POLICY, tenants={**POLICY.tenants, "acme": Tenant(**terms)})


def refused_at(site: str, sites: list[PeerView], **options: Any) -> str:
    found = send_to_site(sites, **options)
    return next(option.refused for option in found.options if option.site == site)


HOME, FAR = waiting("b", 0.0), waiting("c", 0.0)


# --- constraints, in their order ---


def test_the_constraints_keep_their_order() -> None:
    order = [check.__name__ for check in (*RIGHTS, *LOAD)]
    assert order == [
        "crossing",
        "entitlement",
        "residency",
        "match",
        "ready",
        "age",
        "link",
        "ceiling",
        "service_level",
    ]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"cross_site": False}, "crossing: the request stays"),
        ({"hop": 1}, "crossing: it was sent here"),
        ({"sites_tried": ("c",)}, "tried"),
        ({"adapter": "a-116"}, "adapter"),
        ({"prompt_tokens": 140_000}, "context"),
    ],
)
def test_what_the_request_says_can_close_a_site(facts: dict[str, Any], words: str) -> None:
    asked = request(**{"prompt_tokens": 4096, **facts})
    assert refused_at("c", [HOME, FAR], asked=asked).startswith(words)


def test_what_the_tenant_may_not_closes_sites() -> None:
    assert refused_at("c", [HOME, FAR], policy=tenant(cross_site=False)).startswith("crossing: the tenant")
    found = send_to_site([HOME, FAR], policy=tenant(models=("small-chat",)))
    assert (found.site, found.reason) == ("", "not_permitted")


@pytest.mark.parametrize(
    ("site", "words"),
    [
        (peer("c"), "endpoints: no engines"),
        (peer("c", age_s=None), "age: no summary"),
        (waiting("c", 0.0, model="other"), "endpoints: no engine of large-chat"),
        (waiting("c", 0.0, model_digest="large-chat@2020"), "revision"),
        (waiting("c", 0.0, context_max_tokens=4096), "context"),
        (peer("c", pool_summary("c", ready=0, endpoints=3, warming=3)), "ready: 0 of 3"),
        (peer("c", pool_summary("c", ready=0, endpoints=3, suspect=3)), "ready: 0 of 3"),
        (waiting("c", 0.0, age_s=10.1), "age"),
        (waiting("c", 0.0, age_s=float("nan")), "age"),
        (waiting("c", 0.0, age_s=-1.0), "age"),
        (replace(FAR, link_up=False), "link: the link is down"),
        (replace(FAR, loss=0.02), "link: 2.0% lost"),
        (waiting("c", 0.0, kv_used=0.86), "ceiling: kv"),
        (waiting("c", 0.0, seats=Vector(capacity=512.0, used=400.0, queued=60.0)), "ceiling: seats"),
        (waiting("c", 0.0, prefill=Vector(capacity=46_000.0, used=0.0, queued=240_000.0)), "ceiling: prefill"),
        (waiting("c", 2.5), "wait: first token"),
        (replace(FAR, rtt_s=2.1), "infeasible: first token"),
    ],
)
def test_each_constraint_names_itself(site: PeerView, words: str) -> None:
    assert refused_at("c", [HOME, site]).startswith(words)


def test_the_ceiling_is_lower_for_requests_from_elsewhere() -> None:
    at_home, away = waiting("b", 0.0, kv_used=0.87), waiting("c", 0.0, kv_used=0.87)
    assert send_to_site([at_home]).site == "b"
    assert refused_at("c", [at_home, away]).startswith("ceiling")


def test_batch_must_meet_its_deadline_and_leave_room() -> None:
    asked = request(4096, deadline_s=20.0)
    assert refused_at("c", [waiting("c", 25.0)], asked=asked, request_class="batch").startswith("wait: end")
    assert send_to_site([waiting("c", 1.0)], request(4096, deadline_s=120.0), request_class="batch").site == "c"
    assert refused_at("b", [waiting("b", 0.0, kv_used=0.75)], request_class="batch").startswith("ceiling")


def test_silence_never_empties_one_s_own_pool() -> None:
    silent = peer("b", pool_summary("b", ready=0, endpoints=1, suspect=1, waits_s=(0.1,)))
    assert send_to_site([silent]).site == "b"


# --- the reason of the whole ---


@pytest.mark.parametrize(
    ("sites", "reason"),
    [
        ([peer("b"), peer("c")], "no_instances"),
        ([peer("b")], "no_instances"),
        ([waiting("b", 0.0, kv_used=0.99), peer("c")], "all_busy"),
        ([peer("b"), waiting("c", 3.0), waiting("d", 2.5)], "all_busy"),
        ([peer("b"), replace(FAR, rtt_s=2.1)], "infeasible"),
        ([peer("b"), waiting("d", 0.0, age_s=60.0), replace(FAR, link_up=False)], "no_site"),
        ([peer("b"), replace(FAR, link_up=False)], "no_site"),
        ([peer("b"), waiting("c", 0.0, model_digest="large-chat@2020")], "filtered_by_policy"),
        ([], "no_site"),
    ],
)
def test_a_refusal_has_the_reason_of_the_sites_that_were_open(sites: list[PeerView], reason: str) -> None:
    found = send_to_site(sites)
    assert (found.site, found.reason) == ("", reason)
    assert (found.retry_after_s is not None) == (reason == "all_busy")


def test_other_reasons_for_nowhere() -> None:
    assert send_to_site([peer("b"), FAR], request(cross_site=False)).reason == "no_instances"
    assert send_to_site([HOME, FAR], request(140_000), request_class="long").reason == "context_too_long"
    assert send_to_site([HOME, FAR], request(sites_tried=("b", "c"))).reason == "no_site"
    assert send_to_site([waiting("d", 0.0)], request(tenant="eu-bank"), home="a").reason == "not_permitted"


def test_all_busy_tells_the_least_wait() -> None:
    sites = [peer("b"), waiting("c", 7.2), waiting("d", 9.0)]
    hints_s = [send_to_site(sites, seed=seed).retry_after_s or 0.0 for seed in range(200)]
    assert sum(hints_s) / 200 == pytest.approx(7.0, abs=0.3)  # 7.2 s, 0.2 s ago, ± 20 %
    assert 5.6 <= min(hints_s) < 6.0 < 8.0 < max(hints_s) <= 8.4


# --- money ---


def test_home_keeps_a_request_for_small_gains() -> None:
    found = send_to_site([waiting("b", 0.3), FAR])
    assert found.site == "b"
    assert "below the" in found.sentence
    assert send_to_site([waiting("b", 1.2), FAR]).site == "c"


def test_a_small_site_at_the_same_waits_does_not_attract() -> None:
    assert send_to_site([waiting("b", 0.4, ready=200), waiting("c", 0.4, ready=2)]).site == "b"


def test_home_that_would_be_late_lets_go_and_keeps_what_nobody_can_do_in_time() -> None:
    assert send_to_site([waiting("b", 3.0), waiting("c", 1.5, price_per_hour=900.0)]).site == "c"
    assert send_to_site([waiting("b", 3.0), waiting("c", 3.5)]).site == "b"


def test_a_cached_prefix_is_worth_its_work() -> None:
    prompt = request(40_000)
    warm = [peer("b"), waiting("c", 0.2), waiting("d", 0.2, hit=38_000)]
    assert send_to_site(warm, prompt, request_class="long").site == "d"
    hot = [peer("b"), waiting("c", 0.2), waiting("d", 9.0, hit=38_000)]
    assert send_to_site(hot, prompt, request_class="long").site == "c"


def test_price_and_egress_decide_between_equals() -> None:
    dear = [peer("b"), waiting("c", 0.2, price_per_hour=40.0), replace(waiting("d", 0.2), rtt_s=0.02)]
    assert send_to_site(dear).site == "d"
    taxed = replace(POLICY, sites={**POLICY.sites, "d": replace(POLICY.sites["d"], egress_per_gib=100_000.0)})
    assert send_to_site(dear, policy=taxed).site == "c"


def test_terms_add_up_and_are_all_told() -> None:
    found = send_to_site([waiting("b", 0.3), waiting("c", 0.1, decoding=60.0, context_tokens=400_000.0)])
    value = POLICY.classes["chat"].value_per_s
    factor = POLICY.fleetmind.work_factor
    for option in found.options:
        assert option.cost is not None
        assert option.latency_cost is not None
        assert option.gpu_cost is not None
        assert option.egress_cost is not None
        assert option.cost == pytest.approx(option.latency_cost + option.gpu_cost + option.egress_cost)
        seconds = [option.network_s, option.wait_s, option.crowding_s, option.tpot_excess_s]
        assert all(each is not None for each in (*seconds, option.work_s))
        total_s = sum(each or 0.0 for each in seconds) + factor * (option.work_s or 0.0)
        assert option.latency_cost == pytest.approx(value * total_s)
    crowded = found.options[1]
    assert (crowded.crowding_s or 0.0) > 0.0
    assert (crowded.network_s or 0.0) > 0.02


def test_a_slow_site_s_told_rate_lengthens_its_work() -> None:
    found = send_to_site([HOME, waiting("c", 0.0, prefill=Vector(capacity=23_000.0, used=0.0))])
    home, far = found.options
    assert (far.work_s or 0.0) == pytest.approx(2 * (home.work_s or 0.0), rel=0.05)


def test_numbers_that_can_t_be_are_unknown_and_never_best() -> None:
    nan = float("nan")
    odd = waiting(
        "c",
        nan,
        prefill=Vector(capacity=nan, used=nan, queued=nan),
        kv=Vector(capacity=nan, used=nan),
        decoding=nan,
        context_tokens=-1.0,
        price_per_hour=nan,
    )
    found = send_to_site([waiting("b", 0.1), odd])
    assert found.site == "b"
    assert all(option.cost is None or option.cost == option.cost for option in found.options)


# --- ties, herding, staleness ---


def test_one_tenant_s_prefix_meets_one_site_and_prefixes_spread_by_headroom() -> None:
    sites = [peer("a"), waiting("b", 0.0, ready=6), waiting("c", 0.0, ready=2)]
    near = replace(POLICY, sites={**POLICY.sites, "c": POLICY.sites["b"]})
    chosen = [send_to_site(sites, request(first_key=key), policy=near, home="a", seed=key).site for key in range(1000)]
    assert 700 < Counter(chosen)["b"] < 800  # 6 of 8 instances
    again = [send_to_site(sites, request(first_key=key), policy=near, home="a", seed=-key).site for key in range(1000)]
    assert chosen == again
    other = [
        send_to_site(sites, request(first_key=7, tenant="globex"), policy=near, home="a", seed=s).site for s in (1, 2)
    ]
    assert len(set(other)) == 1


def test_the_site_with_the_longest_match_keeps_it_when_home_can_t() -> None:
    sites = [peer("a"), waiting("b", 0.0), waiting("c", 0.01, hit=512)]
    keep = [send_to_site(sites, request(1024, first_key=key), home="a").site for key in range(50)]
    assert set(keep) == {"c"}


def test_a_stale_summary_is_used_only_when_nothing_fresher_passes_and_marked() -> None:
    old = waiting("d", 0.0, age_s=5.0)
    fresh = send_to_site([peer("b"), waiting("c", 1.5), old])
    assert (fresh.site, fresh.stale) == ("c", False)
    alone = send_to_site([peer("b"), old])
    assert (alone.site, alone.stale) == ("d", True)
    assert "5.0 s old" in alone.sentence


# --- sends ---


def send(name: str, at_s: float, *, work_s: float = 1.0, site: str = "c") -> Send:
    return Send(request=name, site=site, model="large-chat", at_s=at_s, work_s=work_s, uncached_tokens=4096)


def replayed(waits_s: tuple[float, ...], *sent: Send, stamp_s: float, now_s: float, instances: int) -> list[float]:
    replay = Replay(waits_s, stamp_s=stamp_s, instances=instances)
    for each in sent:
        replay.add(each)
    return sorted(replay.waits_s(now_s=now_s))


def test_replay_drains_and_fills_the_least_loaded() -> None:
    waits_s = replayed((0.0, 3.0), send("x", 11.0), send("y", 11.5, work_s=2.0), stamp_s=10.0, now_s=12.0, instances=2)
    assert waits_s == pytest.approx([1.0, 2.0])  # y waits behind x until 14; the other is free at 13
    assert replayed((5.0,), stamp_s=0.0, now_s=9.0, instances=1) == [0.0]
    assert replayed((), send("x", 1.0), stamp_s=0.0, now_s=2.0, instances=0) == []
    assert replayed((1.0,), send("x", 9.9), stamp_s=10.0, now_s=10.0, instances=1) == [1.0]  # the summary has it


def test_a_thinned_summary_takes_a_send_as_its_share() -> None:
    assert replayed((0.0,), send("x", 1.0), stamp_s=0.0, now_s=1.0, instances=10) == pytest.approx([0.1])


def test_site_wait_mixes_least_and_mean() -> None:
    assert site_wait_s((1.0, 3.0), min_share=0.75) == pytest.approx(0.75 * 1.0 + 0.25 * 2.0)
    assert site_wait_s((), min_share=0.75) == 0.0


def since(sends: Sends, *, stamp_s: float, n: int = 1) -> Replay:
    return sends.since("c", "large-chat", ("k", 0, n, ""), (0.0,), stamp_s=stamp_s, instances=1)


def test_sends_are_heard_once_forgotten_in_time_and_bounded() -> None:
    sends = Sends(kept_s=15.0)
    sends.sent(send("x", 10.0))
    sends.sent(send("x", 10.2))
    assert since(sends, stamp_s=9.0).sends == 1
    sends.sent(send("y", 10.5))
    assert since(sends, stamp_s=9.0).sends == 2  # added to the replay that was made
    assert since(sends, stamp_s=10.0, n=2).sends == 1  # x is in the new summary
    sends.withdrawn("y", 0, site="c", model="large-chat")
    assert since(sends, stamp_s=10.0, n=2).sends == 0
    for i in range(SENDS_PER_POOL_MAX + 10):
        sends.sent(send(f"z-{i}", 20.0))
    assert since(sends, stamp_s=0.0, n=3).sends == SENDS_PER_POOL_MAX
    sends.sent(send("last", 40.0))
    assert since(sends, stamp_s=0.0, n=4).sends == 1


def test_sends_added_one_by_one_give_the_waits_of_a_replay_from_the_start() -> None:
    rng, kept = Random(9), Sends(kept_s=60.0)
    waits_s = tuple(rng.random() for _ in range(8))
    now_s, key = 100.0, ("k", 0, 1, "")
    step = kept.since("c", "large-chat", key, waits_s, stamp_s=100.1, instances=8)
    for i in range(500):
        kept.sent(send(f"x-{i}", now_s, work_s=rng.random() * 0.2))
        now_s += rng.random() * 0.02
    assert kept.since("c", "large-chat", key, waits_s, stamp_s=100.1, instances=8) is step
    fresh = Replay(waits_s, stamp_s=100.1, instances=8)
    for each in kept._sends["c", "large-chat"].values():
        fresh.add(each)
    assert sorted(step.waits_s(now_s=now_s)) == pytest.approx(sorted(fresh.waits_s(now_s=now_s)))
    assert max(step.waits_s(now_s=now_s)) > 0.0


def test_a_burst_on_one_old_summary_spreads_over_the_sites() -> None:
    sends, rng, sites = Sends(kept_s=15.0), Random(4), [peer("a"), *(waiting(s, 0.0, age_s=0.4) for s in "bcd")]
    found: Counter[str] = Counter()
    for i in range(300):
        answer = send_to_site(
            sites,
            request(4096, id=f"r-{i}", first_key=rng.randrange(10**6)),
            home="a",
            sends=sends,
            now_s=1000.0 + i * 0.01,
        )
        assert answer.send is not None
        sends.sent(answer.send)
        found[answer.site] += 1
    assert all(found[site] > 50 for site in "bcd")


def test_own_sends_use_up_a_site_s_capacity_before_it_says_so() -> None:
    sends = Sends(kept_s=15.0)
    far = [peer("b"), waiting("c", 0.0)]
    for i in range(500):
        sends.sent(replace(send(f"x-{i}", 999.95, work_s=0.0), uncached_tokens=0, kv_tokens=3_500))
    assert send_to_site(far, sends=sends).reason == "all_busy"
    assert send_to_site(far, sends=Sends(kept_s=15.0)).site == "c"


def test_a_home_that_hears_nobody_sends_by_the_old_summaries_and_says_so() -> None:
    found = send_to_site([peer("b"), waiting("c", 0.0, age_s=60.0)])
    assert (found.site, found.stale) == ("c", True)
    assert "60.0 s old" in found.sentence


def test_a_summary_of_unknown_age_is_told_as_such() -> None:
    """A replica that has just started reads summaries that may be of any age, and knows nobody else."""
    unknown = replace(waiting("c", 0.0), age_s=None)
    found = send_to_site([peer("b"), unknown])
    assert (found.site, found.stale) == ("c", True)
    assert "of unknown age" in found.sentence


def test_old_summaries_never_lift_a_right() -> None:
    silent = [peer("b"), waiting("d", 0.0, age_s=60.0)]
    assert send_to_site(silent, request(tenant="eu-bank")).site == ""
    assert send_to_site(silent).site == "d"
