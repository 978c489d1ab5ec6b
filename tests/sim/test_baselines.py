"""The rules that TokenPilot is compared with: what each places where, by hand-made facts."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.setups import BLOCK, asks, event, scrape, setup, stored, with_kv
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import OutcomeKind
from tokenfleet.sim.baselines.accounts import Accounts, least
from tokenfleet.sim.baselines.blind import LeastRequests, LeastStale, PowerOfTwo, RandomChoice, RoundRobin
from tokenfleet.sim.baselines.dynamo import Dynamo, DynamoSettings
from tokenfleet.sim.baselines.llmd import INDEX_TOKENS, Llmd, LlmdSettings
from tokenfleet.sim.baselines.sglang import Sglang, SglangSettings
from tokenfleet.sim.policies import policy_named
from tokenfleet.sim.router import MakeRouter, Router

ALL: list[MakeRouter] = [RoundRobin, RandomChoice, PowerOfTwo, LeastRequests, LeastStale, Sglang, Dynamo, Llmd]
TIES_BY_LOT: list[MakeRouter] = [RandomChoice, PowerOfTwo, LeastRequests, LeastStale, Sglang, Dynamo, Llmd]
FLEET = ("a", "b", "c", "d")


def placed(router: Router, name: str, *ids: int, tokens: int = 0) -> str:
    return router.route(asks(name, *ids, tokens=tokens or BLOCK), 0.0).instance


@pytest.mark.parametrize("make", ALL)
def test_every_rule_answers_at_once_and_holds_nothing(make: MakeRouter) -> None:
    router = make(setup(*FLEET))
    answer = router.route(asks("r", 1, 2, 3), 0.0)
    assert answer.instance in FLEET
    assert (answer.request, answer.refused, router.holding, list(router.released(1.0))) == ("r", "", 0, [])


@pytest.mark.parametrize("make", ALL)
def test_the_same_seed_places_the_same_requests_alike(make: MakeRouter) -> None:
    one, other = make(setup(*FLEET, seed=5)), make(setup(*FLEET, seed=5))
    assert [placed(one, f"r{n}", n) for n in range(50)] == [placed(other, f"r{n}", n) for n in range(50)]


@pytest.mark.parametrize("make", TIES_BY_LOT)
def test_an_idle_fleet_has_no_favourite(make: MakeRouter) -> None:
    first = Counter(placed(make(setup(*FLEET, seed=seed)), "r", 1, 2) for seed in range(400))
    assert set(first) == set(FLEET)
    assert max(first.values()) < 150  # 100 each on average; ties to one place would give it 400


@pytest.mark.parametrize("make", ALL)
@given(steps=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["first_token", "progress", "finished", "failed"]))))
def test_accounts_are_those_of_the_requests_that_have_not_ended(
    make: MakeRouter, steps: Sequence[tuple[int, OutcomeKind]]
) -> None:
    router = make(setup(*FLEET))
    assert isinstance(router, Accounts)
    where = {f"r{n}": placed(router, f"r{n}", n, n + 1) for n in range(10)}
    for n, kind in steps:  # also events told twice, and after the end
        router.settled(event(f"r{n}", kind), 1.0)
        if kind in ("finished", "failed"):
            where.pop(f"r{n}", None)
    assert router.in_flight == {name: Counter(where.values())[name] for name in FLEET}


def test_round_robin_takes_turns_from_a_place_drawn_by_lot() -> None:
    router = RoundRobin(setup(*FLEET))
    turns = [placed(router, f"r{n}") for n in range(9)]
    assert all(FLEET[(FLEET.index(one) + 1) % 4] == following for one, following in pairwise(turns))
    assert {placed(RoundRobin(setup(*FLEET, seed=seed)), "r") for seed in range(50)} == set(FLEET)


def test_power_of_two_never_takes_the_worst_of_many_and_not_always_the_best() -> None:
    router = PowerOfTwo(setup(*FLEET))
    router.in_flight |= {"a": 30, "b": 10}
    taken: Counter[str] = Counter()
    for n in range(300):
        taken[placed(router, f"r{n}")] += 1
        router.settled(event(f"r{n}"), 0.0)
    assert taken["a"] == 0
    assert taken["b"] > 0


def test_least_requests_counts_until_the_end_not_the_first_token() -> None:
    router = LeastRequests(setup("a", "b"))
    first = placed(router, "long")
    second = placed(router, "short")
    assert second != first
    router.settled(event("long", "first_token"), 1.0)
    router.settled(event("short", "finished"), 1.0)
    assert placed(router, "next") == second


def test_least_stale_herds_between_two_scrapes() -> None:
    router = LeastStale(setup("a", "b", "c"))
    router.heard(scrape(1, waiting={"a": 3, "b": 1, "c": 2}), 0.0)
    assert {placed(router, f"r{n}") for n in range(20)} == {"b"}
    router.heard(scrape(2, waiting={"a": 3, "b": 21, "c": 2}), 0.25)
    assert placed(router, "later") == "c"
    router.heard(scrape(1, waiting={"a": 3, "b": 1, "c": 2}), 0.3)  # repeated late: changes nothing
    assert placed(router, "last") == "c"


def test_sglang_follows_a_match_over_its_threshold_whatever_the_load() -> None:
    router = Sglang(setup("a", "b"))
    home = placed(router, "first", 1, 2, 3, tokens=3 * BLOCK)
    router.in_flight[home] += 63  # 64 requests apart is no imbalance yet
    assert placed(router, "turn", 1, 2, 3, 4, tokens=4 * BLOCK) == home
    assert placed(router, "beyond", 1, 2, 3, 4, tokens=4 * BLOCK) != home


def test_sglang_takes_the_least_loaded_when_the_match_is_a_small_part() -> None:
    router = Sglang(setup("a", "b"))
    home = placed(router, "first", 1, 2, 3, tokens=3 * BLOCK)
    assert placed(router, "above", 1, 2, 3, tokens=10 * BLOCK - 1) == home
    assert placed(router, "at-the-threshold", 1, 2, 3, tokens=10 * BLOCK) != home  # 0.3 is not more than 0.3


def test_sglang_balances_beyond_both_thresholds() -> None:
    router = Sglang(setup("a", "b"), SglangSettings(balance_abs=4, balance_rel=1.5))
    home = placed(router, "first", 1, 2)
    for n in range(4):
        assert placed(router, f"turn-{n}", 1, 2) == home
    assert placed(router, "balanced", 1, 2) != home  # 5 against 0
    assert router.in_flight[home] == 5


def test_sglang_takes_the_least_loaded_of_those_with_the_same_match() -> None:
    router = Sglang(setup("a", "b", "c"), SglangSettings(match_min=0.9))
    homes = {placed(router, f"system-prompt-{n}", 1, 100 + n, tokens=2 * BLOCK) for n in range(2)}
    assert len(homes) == 2  # each matched half a prompt at most
    router.in_flight |= {min(homes): 6, max(homes): 5}
    assert placed(router, "short", 1, tokens=BLOCK) == max(homes)  # not the third, which is idle


def test_sglang_does_not_see_that_a_prefix_is_gone() -> None:
    router = Sglang(setup("a", "b"))
    home = placed(router, "first", 1, 2)
    router.settled(event("first"), 0.0)
    router.heard(stored(home, removed=(1, 2)), 0.0)
    assert {placed(router, f"r{n}", 1, 2) for n in range(10)} == {home}


def test_dynamo_weighs_cached_blocks_against_prefill_and_held_blocks() -> None:
    router = Dynamo(setup("a", "b"))
    router.heard(stored("a", 1, 2, 3), 0.0)
    assert placed(router, "hit", 1, 2, 3, 4, tokens=4 * BLOCK) == "a"  # 1 + 4 blocks against 4 + 4
    # a: 1 block to prefill and 4 held; b: nothing. A prompt of 3 cached blocks: 1 + 0 + 4 + 0 against 3 + 3
    assert placed(router, "again", 1, 2, 3, tokens=3 * BLOCK) == "a"
    # another prompt of 2 blocks, cached nowhere: a has 1 block to prefill and 4 held
    assert placed(router, "new", 8, 9, tokens=2 * BLOCK) == "b"


def test_dynamo_counts_prefill_until_the_first_token_and_blocks_until_the_end() -> None:
    router = Dynamo(setup("a", "b"))
    router.heard(stored("a", 1, 2), 0.0)
    for name in ("r1", "r2"):  # the second is as cheap: its blocks are held there already
        assert placed(router, name, 1, 2, 3, 4, tokens=4 * BLOCK) == "a"
    # 5 blocks anew: a has 2 · 2 to prefill and 4 held, b nothing
    assert placed(router, "x", 11, 12, 13, 14, 15, tokens=5 * BLOCK) == "b"
    # y: a 4 + 1 + 4 + 1, b 5 + 1 + 5 + 1; after the first tokens on b: 0 + 1 + 5 + 1
    router.settled(event("x", "first_token"), 1.0)
    assert placed(router, "y", 20) == "b"
    router.settled(event("x", "finished"), 2.0)
    router.settled(event("r1", "first_token"), 2.0)
    router.settled(event("r2", "first_token"), 2.0)
    router.settled(event("y"), 2.0)


def test_dynamo_holds_a_block_that_two_share_once_and_until_both_have_ended() -> None:
    router = Dynamo(setup("a", "b"))
    router.heard(stored("a", 1, 2, 3, 4), 0.0)
    for name in ("r1", "r2"):
        assert placed(router, name, 1, 2, 3, 4, tokens=4 * BLOCK) == "a"
        router.settled(event(name, "first_token"), 0.0)
    assert placed(router, "b-3", 21, 22, 23, tokens=3 * BLOCK) == "b"
    router.settled(event("b-3", "first_token"), 0.0)
    assert placed(router, "4-held-against-3", 31) == "b"
    router.settled(event("4-held-against-3"), 0.0)
    router.settled(event("r1"), 1.0)
    assert placed(router, "still", 32) == "b"
    router.settled(event("still"), 1.0)
    router.settled(event("r2"), 1.0)
    assert placed(router, "none-held", 33) == "a"


@pytest.mark.parametrize(("weight", "chosen"), [(1.0, "b"), (4.0, "a")])
def test_dynamo_s_weight_is_the_price_of_prefill(weight: float, chosen: str) -> None:
    router = Dynamo(setup("a", "b"), DynamoSettings(overlap_weight=weight))
    router.heard(stored("a", 1, 2, 3, 5), 0.0)
    assert placed(router, "held", 1, 2, 3, tokens=3 * BLOCK) == "a"
    router.settled(event("held", "first_token"), 0.0)
    assert placed(router, "hit", 5) == chosen  # a: 3 held + 1; b: the weight + 1


def test_dynamo_holds_blocks_of_prompts_that_no_key_names_too() -> None:
    router = Dynamo(setup("a", "b"))
    home = placed(router, "long", tokens=20 * BLOCK)
    router.settled(event("long", "first_token"), 0.0)
    other = placed(router, "short", tokens=2 * BLOCK)
    assert other != home
    router.settled(event("short"), 0.0)
    assert placed(router, "meanwhile", tokens=BLOCK) == other
    router.settled(event("long"), 0.0)
    assert placed(router, "after", tokens=BLOCK) == home  # 0 + 0 against 1 + 1


def test_dynamo_forgets_what_events_remove() -> None:
    router = Dynamo(setup("a", "b"))
    router.heard(stored("b", 1, 2, 3, 4), 0.0)
    assert placed(router, "r1", 1, 2, 3, 4, tokens=4 * BLOCK) == "b"
    router.settled(event("r1"), 0.0)
    router.heard(stored("b", n=2, removed=(1, 2, 3, 4)), 0.0)
    router.heard(stored("a", 1), 0.0)
    assert placed(router, "r2", 1, 2, 3, 4, tokens=4 * BLOCK) == "a"


def test_llmd_prefers_the_prefix_it_sent_until_the_queue_says_otherwise() -> None:
    router = Llmd(setup("a", "b"))
    home = placed(router, "first", 1, 2, 3, 4)
    other = "ab".replace(home, "")
    router.heard(scrape(1, waiting={home: 5, other: 0}), 0.25)
    assert placed(router, "whole", 1, 2, 3, 4) == home  # 3 + 0 + 2 against 0 + 2 + 2
    assert placed(router, "half", 1, 2, 8, 9) == other  # 1.5 + 0 + 2 against 0 + 2 + 2


def test_llmd_reads_kv_use_and_sees_nothing_of_what_it_sent_since() -> None:
    router = Llmd(setup("a", "b"))
    router.heard(with_kv(scrape(1, waiting={"a": 0, "b": 0}), a=6_000, b=5_000), 0.0)
    assert {placed(router, f"r{n}", 100 + n) for n in range(20)} == {"b"}


def test_llmd_s_queue_score_is_relative_one_waiting_request_is_as_bad_as_a_hundred() -> None:
    def choice(waiting: float) -> str:
        router = Llmd(setup("a", "b"), LlmdSettings(prefix=1.9))
        home = placed(router, "first", 1)
        router.heard(scrape(1, waiting={home: waiting, "ab".replace(home, ""): 0}), 0.0)
        return "home" if placed(router, "again", 1) == home else "away"

    assert (choice(1), choice(100)) == ("away", "away")


def test_llmd_s_index_forgets_the_oldest_and_the_front_of_a_prompt_first() -> None:
    router = Llmd(setup("a"))
    room = INDEX_TOKENS // BLOCK
    placed(router, "old", *range(room), tokens=room * BLOCK)
    assert router.place(asks("again", *range(room)), 0.0).hit_tokens == room * BLOCK
    placed(router, "one-more", 10**6)
    assert router.place(asks("front-is-gone", *range(room)), 0.0).hit_tokens == 0
    assert router.place(asks("behind-it", *range(1, room)), 0.0).hit_tokens == (room - 1) * BLOCK


def test_llmd_s_index_keeps_what_is_sent_again() -> None:
    router = Llmd(setup("a"))
    room = INDEX_TOKENS // BLOCK
    placed(router, "first", 1, tokens=BLOCK)
    placed(router, "much", *range(2, room + 1), tokens=(room - 1) * BLOCK)
    placed(router, "again", 1, tokens=BLOCK)
    placed(router, "one-more", 10**6)
    assert router.place(asks("r", 1), 0.0).hit_tokens == BLOCK
    assert router.place(asks("r", 2), 0.0).hit_tokens == 0


@pytest.mark.parametrize("make", [Sglang, Dynamo, Llmd])
def test_outcomes_carry_what_was_believed_to_be_cached(make: MakeRouter) -> None:
    router = make(setup("a"))
    router.heard(stored("a", 1, 2), 0.0)
    placed(router, "first", 1, 2, tokens=2 * BLOCK)
    placed(router, "second", 1, 2, 3, tokens=3 * BLOCK + 7)
    told = router.settled(event("second", "first_token"), 1.0).placed
    assert told is not None
    assert (told.hit_tokens, told.uncached_tokens) == (2 * BLOCK, BLOCK + 7)
    assert told.kv_state == ("exact" if make is Dynamo else "approx")


def test_another_gateway_s_requests_are_unknown() -> None:
    router = LeastRequests(setup("a", "b"))
    home = placed(router, "own")
    told = router.settled(event("somebody-else's"), 0.0)
    assert told.placed is None
    assert router.in_flight[home] == 1


def test_least_is_least() -> None:
    assert least({"a": 2.0, "b": 1.0, "c": 3.0}, Random(1)) == "b"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sglang:balance_abs=8,match_min=0.1", SglangSettings(balance_abs=8, match_min=0.1)),
        ("dynamo:overlap_weight=2", DynamoSettings(overlap_weight=2.0)),
        ("llmd:queue=6", LlmdSettings(queue=6.0)),
    ],
)
def test_a_variant_is_named_by_its_settings(name: str, settings: object) -> None:
    router = policy_named(name)(setup(*FLEET))
    assert isinstance(router, Sglang | Dynamo | Llmd)
    assert router.settings == settings


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody", "no policy 'nobody'; there is: dynamo, least_requests, least_stale, llmd, power_of_two, random"),
        ("sglang:abs=8", "no setting 'abs'; there is: balance_abs, balance_rel, match_min"),
        ("dynamo:overlap_weight=two", "overlap_weight"),
        ("random:x=1", "random has no settings; these have: dynamo, llmd, sglang"),
        ("llmd:queue", "queue"),
        ("dynamo:overlap_weight=nan", "overlap_weight is nan; it is a finite number"),
        ("sglang:match_min=inf", "match_min is inf"),
    ],
)
def test_a_policy_that_does_not_exist_is_refused_with_what_there_is(name: str, words: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(words)):
        policy_named(name)
