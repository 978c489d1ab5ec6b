"""TokenPilot's choice: who wins, who shares ties, and what never happens."""

import math
from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool, request, route, weights
from tokenfleet.core.decision import Candidate
from tokenfleet.core.errors import UnknownModelError
from tokenfleet.core.policy import Products
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.view import InstanceView

MARGINS = {"margin_idle": 0.3, "margin_queued": 0.6}
ODD = [None, math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, 0.1, 5.0]


def odd_floats() -> st.SearchStrategy[float | None]:
    return st.sampled_from(ODD) | st.floats(allow_nan=True, allow_infinity=True)


def sane_instances() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "backlog_s": st.floats(0.0, 8.0),
            "queued": st.integers(0, 20),
            "decoding": st.integers(0, 60),
            "context_tokens": st.floats(0.0, 5e5),
            "kv_held_tokens": st.floats(0.0, 9e5),
            "hit_tokens": st.integers(0, 6000),
            "p_hit": st.floats(0.0, 1.0),
            "age_s": st.floats(0.0, 9.0),
            "weight": st.floats(0.1, 10.0),
        }
    )


def odd_instances() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: odd_floats()
            for name in (
                "backlog_s",
                "context_tokens",
                "kv_held_tokens",
                "kv_total_tokens",
                "p_hit",
                "age_s",
                "foreign",
                "weight",
            )
        }
    )


def named(facts: list[dict[str, Any]]) -> list[InstanceView]:
    return [instance(f"b-{n}", **each) for n, each in enumerate(facts)]


def added_up(candidate: Candidate) -> float:
    return (
        candidate.wait_s
        + candidate.work_s
        + candidate.bias_s
        + candidate.margin_s
        + candidate.reuse_s
        + candidate.kv_s
        + candidate.decode_s
        + candidate.weight_s
    )


# --- properties ---------------------------------------------------------------------------------------------------


@given(facts=st.lists(odd_instances(), min_size=1, max_size=6), seed=st.integers(0, 9))
def test_numbers_that_mean_nothing_never_break_the_order(facts: list[dict[str, Any]], seed: int) -> None:
    """Every cost is finite, so any two candidates compare; the evidence behind the target is in that order."""
    routing = route(pool(*named(facts)), seed=seed)
    assert bool(routing.target) != bool(routing.reason)
    assert all(math.isfinite(candidate.cost_s) for candidate in routing.candidates)
    costs = [candidate.cost_s for candidate in routing.candidates[1:]]
    assert costs == sorted(costs)


@given(
    odd=odd_floats().filter(lambda x: x is None or not 0.0 <= x < math.inf),
    name=st.sampled_from(["backlog_s", "age_s"]),
)
def test_an_unknown_load_or_age_never_beats_a_known_one(odd: float | None, name: str) -> None:
    routing = route(pool(instance("odd", **{name: odd}), instance("busy", backlog_s=5.0, queued=9)))
    assert routing.target == "busy"


@given(odd=odd_floats().filter(lambda x: x is None or not 0.0 <= x < math.inf))
def test_an_unknown_load_vetoes_nothing(odd: float | None) -> None:
    only = instance("odd", backlog_s=odd, kv_total_tokens=odd, kv_held_tokens=odd, age_s=odd, foreign=odd)
    assert route(pool(only)).target == "odd"


@given(
    facts=st.lists(sane_instances(), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    first_key=st.none() | st.integers(0, 2**64 - 1),
)
def test_equal_inputs_give_the_equal_routing(facts: list[dict[str, Any]], seed: int, first_key: int | None) -> None:
    asked, view = request(first_key=first_key), pool(*named(facts), **MARGINS)
    assert route(view, asked, seed=seed) == route(view, asked, seed=seed)


@given(
    facts=st.lists(sane_instances(), min_size=1, max_size=6),
    bias_s=st.floats(-1.0, 1.0),
    prompt=st.integers(0, 60_000),
)
def test_terms_add_up(facts: list[dict[str, Any]], bias_s: float, prompt: int) -> None:
    routing = route(pool(*named(facts), bias_s=bias_s), request(prompt))
    for candidate in routing.candidates:
        assert candidate.cost_s == pytest.approx(added_up(candidate))
        assert candidate.ttft_s == pytest.approx(candidate.wait_s + candidate.work_s + candidate.bias_s)
        assert candidate.ttft_s >= 0.0
        assert candidate.hit_tokens + candidate.uncached_tokens >= prompt
        assert candidate.cost_s >= 0.0


@given(
    facts=st.lists(sane_instances(), min_size=2, max_size=6),
    loser=st.integers(0, 5),
    more_s=st.floats(0.0, 20.0),
    idle=st.floats(0.0, 2.0),
    queued=st.floats(0.0, 2.0),
)
def test_more_backlog_never_makes_an_instance_win(
    facts: list[dict[str, Any]], loser: int, more_s: float, idle: float, queued: float
) -> None:
    """At one and the same price of reuse; that price rises with everybody's wait on purpose."""
    policy = weights(reuse_slope_per_s=0.0)
    instances = named(facts)
    name = f"b-{loser % len(instances)}"
    before = route(pool(*instances, margin_idle=idle, margin_queued=queued), policy=policy)
    if before.target == name or before.how != "least_cost":
        return
    heavier = [
        replace(each, backlog_s=each.backlog_s + more_s, queued=each.queued + 1) if each.instance == name else each
        for each in instances
    ]
    after = route(pool(*heavier, margin_idle=idle, margin_queued=queued), policy=policy)
    assert after.target != name


@given(facts=st.lists(sane_instances(), min_size=2, max_size=6))
def test_changing_the_named_term_changes_the_winner(facts: list[dict[str, Any]]) -> None:
    policy = weights(reuse_slope_per_s=0.0)
    routing = route(pool(*named(facts)), policy=policy)
    if routing.deciding != "wait_s" or routing.gap_s is None:
        return
    more_s = 10.0 * (routing.gap_s + 0.1)  # beyond the near-tie band, also of an instance of weight 10
    worse = [
        replace(each, backlog_s=each.backlog_s + more_s) if each.instance == routing.target else each
        for each in named(facts)
    ]
    assert route(pool(*worse), policy=policy).target != routing.target


# --- the named term -----------------------------------------------------------------------------------------------

WARM = {"hit_tokens": 3072, "p_hit": 1.0}


@pytest.mark.parametrize(
    ("deciding", "facts", "without"),
    [
        ("work_s", {"warm": {**WARM, "backlog_s": 0.05}, "cold": {}}, {"hit_tokens": 0}),
        ("wait_s", {"idle": {}, "busy": {"backlog_s": 0.3}}, {"backlog_s": 0.6}),
        ("kv_s", {"roomy": {"backlog_s": 0.01}, "full": {"kv_held_tokens": 930_000.0}}, {"kv_held_tokens": 960_000.0}),
        ("decode_s", {"few": {"decoding": 2}, "many": {"decoding": 60}}, {"decoding": 200}),
        ("margin_s", {"fresh": {"backlog_s": 0.5}, "aged": {"backlog_s": 0.5, "age_s": 4.0}}, {"age_s": 9.0}),
        ("weight_s", {"wanted": {"weight": 1.0}, "spared": {"weight": 0.3}}, {"weight": 0.1}),
    ],
)
def test_the_sentence_names_the_term_that_decides(
    deciding: str, facts: dict[str, dict[str, Any]], without: dict[str, Any]
) -> None:
    winner, other = facts
    routing = route(pool(*[instance(name, **each) for name, each in facts.items()]))
    assert (routing.target, routing.deciding, routing.runner_up) == (winner, deciding, other)
    facts = {winner: facts[winner] | without, other: facts[other]}
    assert route(pool(*[instance(name, **each) for name, each in facts.items()])).target == other


# --- ties and herds -----------------------------------------------------------------------------------------------


def picks(rounds: int, *instances: InstanceView, **options: Any) -> Counter[str]:
    view = pool(*instances)
    return Counter(route(view, seed=seed, **options).target for seed in range(rounds))


def test_ties_are_shared_evenly() -> None:
    counts = picks(10_000, *[instance(f"b-{n}") for n in range(8)])
    assert len(counts) == 8
    assert all(abs(count - 1250) <= 0.15 * 1250 for count in counts.values())


def test_who_was_scraped_last_does_not_draw_the_burst() -> None:
    counts = picks(4_000, *[instance(f"b-{n}", age_s=0.25 * n) for n in range(4)])
    assert all(abs(count - 1000) <= 150 for count in counts.values())


def test_ties_are_shared_evenly_when_there_are_several_groups() -> None:
    slow = [instance(f"slow-{n}", backlog_s=2.0) for n in range(4)]
    counts = picks(4_000, *slow, *[instance(f"b-{n}") for n in range(4)])
    assert set(counts) == {f"b-{n}" for n in range(4)}
    assert all(abs(count - 1000) <= 150 for count in counts.values())


def test_distinct_prefixes_spread_over_equal_instances() -> None:
    view = pool(*[instance(f"b-{n}") for n in range(4)])
    counts = Counter(route(view, request(first_key=Random(key).getrandbits(64))).target for key in range(4000))
    assert all(abs(count - 1000) <= 150 for count in counts.values())


def test_siblings_of_a_burst_meet_on_one_instance() -> None:
    view = pool(*[instance(f"b-{n}") for n in range(8)])
    assert len({route(view, request(first_key=7), seed=seed).target for seed in range(50)}) == 1


def test_a_burst_that_counts_its_placements_does_not_herd() -> None:
    """400 requests on a table that hears nothing but the placements themselves."""
    backlogs = dict.fromkeys(["b-0", "b-1", "b-2", "b-3"], 0.0)
    counts: Counter[str] = Counter()
    for n in range(400):
        view = pool(*[instance(name, backlog_s=s, queued=counts[name]) for name, s in backlogs.items()])
        routing = route(view, request(1024), seed=n)
        counts[routing.target] += 1
        backlogs[routing.target] += routing.candidates[0].work_s
    assert max(counts.values()) <= 110


def test_an_operators_weight_shares_ties_in_its_ratio() -> None:
    tie = weights(tie_min_s=10.0)
    counts = picks(4_000, instance("full", weight=1.0), instance("half", weight=0.5), policy=tie)
    assert counts["full"] / counts["half"] == pytest.approx(2.0, rel=0.15)


def test_suspects_are_drawn_two_by_two_by_what_the_ledger_counts() -> None:
    suspects = [instance(f"b-{n}", suspect=True, queued=n) for n in range(4)]
    view = pool(*suspects)
    routings = [route(view, seed=seed) for seed in range(2000)]
    counts = Counter(routing.target for routing in routings)
    assert all(routing.suspect_only and routing.how == "suspect" for routing in routings)
    assert counts["b-0"] == pytest.approx(1000, rel=0.15)  # in half of all pairs
    assert counts["b-3"] == 0


# --- sessions, switches, prompts ----------------------------------------------------------------------------------


def test_a_suspect_is_taken_when_no_other_has_room() -> None:
    full = instance("full", class_running={"chat": 64})
    routing = route(pool(full, instance("silent", suspect=True, age_s=12.0)))
    assert (routing.target, routing.suspect_only, routing.excluded) == ("silent", True, {"class_full": 1})


def test_tokenpilot_off_ignores_the_cache_but_not_the_filters() -> None:
    off = replace(POLICY, products=Products(tokenpilot=False))
    view = pool(instance("warm", **WARM, decoding=3), instance("cold"), instance("gone", availability="out"))
    assert {route(view, policy=off, seed=seed).target for seed in range(20)} == {"cold"}
    assert route(view).target == "warm"


@pytest.mark.parametrize("prompt", [0, 1, 255, 256, 257])
@pytest.mark.parametrize("hit", [0, 256])
def test_prompts_around_one_block_are_all_decided(prompt: int, hit: int) -> None:
    routing = route(pool(instance("a", hit_tokens=hit, p_hit=1.0), instance("b", backlog_s=9.0)), request(prompt))
    assert routing.target == "a"
    assert 1 <= routing.candidates[0].uncached_tokens <= max(prompt, 1)


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    routing = route(pool(instance("a", hit_tokens=4096, p_hit=1.0)), request(4096))
    assert routing.candidates[0].uncached_tokens == 16


def test_work_that_queues_raises_the_price_of_uncached_work() -> None:
    calm = pool(instance("warm", **WARM, backlog_s=0.6), instance("cold"))
    behind = {"behind_s": 4.0, "queued": 9}
    jammed = pool(instance("warm", **WARM, backlog_s=5.6, **behind), instance("cold", backlog_s=5.0, **behind))
    assert route(calm).target == "cold"
    assert route(jammed).target == "warm"


def test_a_long_prompt_behind_which_nobody_waits_is_no_congestion() -> None:
    busy = pool(instance("warm", **WARM, backlog_s=5.6, queued=1), instance("cold", backlog_s=5.0, queued=1))
    assert route(busy).target == "cold"


def test_the_network_counts_in_the_prediction_and_not_in_the_choice() -> None:
    view = pool(instance("a"), instance("b", backlog_s=1.0))
    near, far = route(view), route(view, network_s=0.08)
    assert near.target == far.target == "a"
    assert near.predicted_ttft_s is not None
    assert far.predicted_ttft_s == pytest.approx(near.predicted_ttft_s + 0.08)


def test_evidence_keeps_the_target_and_the_best_others() -> None:
    routing = route(pool(*[instance(f"b-{n:02}", backlog_s=n / 10) for n in range(30)]), last_instance="b-20")
    assert [candidate.instance for candidate in routing.candidates] == [f"b-{n:02}" for n in range(8)]
    assert routing.considered == 30


def test_what_was_believed_goes_with_the_request() -> None:
    routing = route(pool(instance("a", hit_tokens=1024, p_hit=1.0, queued=2, backlog_s=0.3, kv_state="exact")))
    placed = routing.placed
    assert placed is not None
    assert (placed.hit_tokens, placed.uncached_tokens, placed.queued, placed.kv_state) == (1024, 3072, 2, "exact")
    assert placed.wait_s + placed.work_s + placed.bias_s == routing.predicted_ttft_s


def test_a_budget_beyond_the_context_is_refused_and_an_absent_one_is_not() -> None:
    view = pool(instance("a", context_max_tokens=8192))
    assert route(view, request(8000)).target == "a"
    assert route(view, request(8000, max_tokens=192)).target == "a"
    assert route(view, request(8000, max_tokens=2**31 - 1)).reason == "context_too_long"


def test_a_model_outside_the_policy_is_an_error() -> None:
    with pytest.raises(UnknownModelError):
        route(pool(), request(model="nobody"))


def test_refusals_are_never_swapped() -> None:
    def reason(*instances: InstanceView, **facts: Any) -> Routing:
        return route(pool(*instances), request(**facts))

    assert reason().reason == "no_instances"
    assert reason(instance("a", class_running={"chat": 64})).reason == "all_busy"
    assert reason(instance("a", availability="quarantined")).reason == "filtered_by_policy"
    assert reason(instance("a"), prompt_tokens=200_000).reason == "context_too_long"
    # Waiting helps as soon as one is only full, whatever the others lack.
    mixed = (instance("a", class_running={"chat": 64}), instance("b", weight=0.0), instance("c", availability="out"))
    assert reason(*mixed).reason == "all_busy"


def test_kv_use_that_nobody_tells_counts_as_the_pools_upper_quartile() -> None:
    silent = instance("silent", kv_total_tokens=None)
    roomy, full = instance("roomy", kv_held_tokens=100_000.0), instance("full", kv_held_tokens=940_000.0)
    assert {route(pool(silent, roomy, full), seed=seed).target for seed in range(20)} == {"roomy"}
    assert {route(pool(silent, full), seed=seed).target for seed in range(20)} == {"silent", "full"}


def test_a_burst_leaves_a_filling_instance_before_its_kv_is_full() -> None:
    assert route(pool(instance("a", kv_held_tokens=998_000.0))).reason == "all_busy"
    pressed = route(pool(instance("a", kv_held_tokens=980_000.0), instance("b", backlog_s=1.0)))
    assert (pressed.target, pressed.excluded) == ("b", {"pressure": 1})


def test_only_draining_keeps_its_sessions() -> None:
    assert route(pool(instance("a", availability="draining")), last_instance="a").target == "a"
    assert route(pool(instance("a", availability="quarantined")), last_instance="a").reason == "filtered_by_policy"
    assert route(pool(instance("a", availability="draining")), last_instance="b").reason == "no_instances"


def test_an_engine_without_a_free_seat_is_busy() -> None:
    assert route(pool(instance("a", queued=6, decoding=200, foreign=50.0))).reason == "all_busy"
    assert route(pool(instance("a", queued=6, decoding=200, foreign=49.0))).target == "a"


def test_a_prompt_that_no_memory_holds_is_too_long_and_not_busy() -> None:
    assert route(pool(instance("a", kv_total_tokens=4000.0))).reason == "context_too_long"


def test_time_already_spent_counts_against_the_agreed_first_token() -> None:
    view = pool(instance("a", backlog_s=0.5))
    assert "slo" not in route(view).relaxed
    assert "slo" in route(view, request(elapsed_s=1.5)).relaxed
    assert "slo" in route(view, network_s=1.5).relaxed


def test_a_queue_never_makes_a_prediction_surer() -> None:
    view = pool(instance("idle"), instance("queued", backlog_s=0.01, queued=1), margin_idle=2.0, margin_queued=0.0)
    margins = {each.instance: each.margin_s for each in route(view).candidates}
    assert margins["queued"] > margins["idle"]


def test_the_tie_band_is_a_share_of_the_spread() -> None:
    view = pool(instance("a"), instance("b", backlog_s=0.03))
    assert {route(view, policy=weights(tie_max_s=1.0), seed=seed).target for seed in range(20)} == {"a"}
    wide = weights(tie_max_s=1.0, tie_margin_share=2.0)
    assert {route(view, policy=wide, seed=seed).target for seed in range(20)} == {"a", "b"}


def test_a_cheaper_instance_that_a_filter_removed_is_named_with_its_filter() -> None:
    full = instance("b-1", kv_held_tokens=95_000.0, kv_total_tokens=100_000.0)
    busy = instance("b-0", backlog_s=3.0, queued=1)
    routed = route(pool(full, busy))
    assert routed.target == "b-0"
    assert {c.instance: c.filtered for c in routed.candidates} == {"b-0": "", "b-1": "pressure"}
    assert "no other passed: b-1 (pressure)" in routed.sentence


def test_no_prompt_is_predicted_before_its_own_prefill() -> None:
    early = replace(pool(instance("b-0")), calibration=replace(pool().calibration, bias_s=-5.0))
    [candidate] = route(early).candidates
    assert candidate.ttft_s == pytest.approx(candidate.work_s)


def test_a_prediction_past_the_service_level_says_so() -> None:
    routed = route(pool(instance("b-0", backlog_s=30.0, queued=1)))
    assert "past the 2,000 ms that are left" in routed.sentence
    assert "which was lifted" in routed.sentence


def test_a_prefix_that_lives_among_the_near_ties_has_no_other_home() -> None:
    view = pool(*[instance(f"b-{n}", hit_tokens=16 if n == 2 else 0, p_hit=0.97) for n in range(4)])
    hows = {route(view, request(first_key=7), seed=seed).how for seed in range(8)}
    assert hows == {"near_tie"}
