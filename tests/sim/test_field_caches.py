"""Caches as agents tell of them, in virtual time: credit follows what engines hold, whatever they do to it.

Names: A and B are instances; P is the one prompt, of which requests and engines take the first so many tokens.
"""

from collections import Counter

import msgpack
import pytest
from msgspec.structs import replace

from tests.sim.agents import Quarter, prompt
from tests.sim.setups import event
from tests.sim.worlds import TINY, fates, fleet, row
from tokenfleet.adapters.engines.kv_events import decode_batch
from tokenfleet.core.kvevents import AllBlocksCleared, BlockRemoved
from tokenfleet.core.records import OutcomeKind
from tokenfleet.sim.links import Links, LinkTerms
from tokenfleet.sim.pilot import Pilot

TOLD_S = 0.5  # within so long, what an engine did is known: two periods and the links


# --- an engine that comes back with blocks of another size --------------------------------------------------------


@pytest.mark.parametrize("gone_s", [0.0, 5.0], ids=["between two scrapes", "after a while"])
def test_an_engine_that_comes_back_with_blocks_of_another_size_begins_anew_and_matches_again(gone_s: float) -> None:
    quarter = Quarter({"A": 32, "B": 32})
    for agent in quarter.agents.values():
        agent.stores(2048)
    quarter.passes(TOLD_S)
    assert quarter.credit(2048) == {"A": 2048, "B": 2048}
    quarter.leaves("A")
    quarter.passes(gone_s)
    quarter.comes("A", block_size=64, boot="boot-2")
    quarter.passes(TOLD_S)
    assert quarter.credit(2048) == {"B": 2048}
    assert quarter.pilot.site.prefix.blocks("A") == 0
    quarter.agents["A"].stores(1024)
    quarter.passes(TOLD_S)
    assert quarter.credit(2048) == {"A": 1024, "B": 2048}
    assert quarter.pilot.site.prefix.state("A") == "exact"
    quarter.passes(10.0)  # its digests go on agreeing
    assert quarter.credit(2048) == {"A": 1024, "B": 2048}
    assert quarter.goes_to(quarter.asks(2048)) == "B"


def test_a_pool_of_engines_with_blocks_of_two_sizes_credits_both_for_one_prompt() -> None:
    quarter = Quarter({"A": 32, "B": 64, "C": 16})
    for name, tokens in (("A", 800), ("B", 1600)):
        quarter.agents[name].stores(tokens)
    quarter.passes(TOLD_S)
    assert quarter.credit(2048) == {"A": 768, "B": 1536}  # whole blocks of 256, whatever the engine's own are
    assert quarter.goes_to(quarter.asks(2048)) == "B"


# --- adapters, images, salts --------------------------------------------------------------------------------------


def test_each_of_an_adapter_an_image_a_salt_and_the_base_model_finds_its_own_blocks_only() -> None:
    """The same tokens under the same name in four roles, as an engine's bytes tell them apart."""
    whole = {
        "type": "BlockStored",
        "block_hashes": [1, 2],
        "token_ids": prompt(256).tolist(),
        "block_size": 128,
    }
    told = {
        "adapter": whole | {"lora_name": "a-116", "lora_id": 4, "extra_keys": [["a-116"], ["a-116"]]},
        "image": whole | {"extra_keys": [[["a-116", 0]], None]},
        "salt": whole | {"extra_keys": [["a-116"], None]},
        "base": whole,
    }
    quarter = Quarter(dict.fromkeys(told, 128))
    for name, announced in told.items():
        quarter.agents[name].hears(*decode_batch(msgpack.packb([1.5, [announced]])).events)
    quarter.passes(TOLD_S)
    assert quarter.credit(300, adapter="a-116") == {"adapter": 256}
    assert quarter.credit(300, media=["a-116"]) == {"image": 256}
    assert quarter.credit(300, cache_salt="a-116") == {"salt": 256}
    assert quarter.credit(300) == {"base": 256}
    assert quarter.credit(300, adapter="a-117") == {}


# --- an engine that empties its cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("heard", [(), ("first_token",), ("first_token", "finished")], ids=len)
@pytest.mark.parametrize("how", ["told", "the word is lost", "another life, and the word is lost"])
def test_a_cache_that_was_emptied_has_no_credit_also_when_the_word_of_it_is_lost(
    how: str, heard: tuple[OutcomeKind, ...]
) -> None:
    quarter = Quarter({"A": 32, "B": 32})
    agent = quarter.agents["A"]
    agent.stores(2048)
    quarter.passes(10.0)
    assert quarter.credit(2048) == {"A": 2048}
    if heard:  # a prompt that A computes, or has computed: its blocks were counted on before A told of them
        request = quarter.asks(2048)
        answer = quarter.pilot.route(request, quarter.now_s)
        assert answer.instance == "A"
        for kind in heard:
            outcome = replace(event(request.id, kind), decision=answer.decision, instance="A")
            quarter.pilot.settled(outcome, quarter.now_s)
    quarter.loses(kv=how != "told")
    if how.startswith("another life"):
        agent.boots("boot-2", block_tokens=quarter.block_tokens)
        agent.stores(256)  # so its heartbeats never tell of an empty cache
    else:
        agent.hears(AllBlocksCleared())
    quarter.passes(TOLD_S)
    assert agent.beat().digest.blocks < 2
    assert quarter.credit(2048) == {}
    quarter.passes(10.0)
    assert quarter.credit(2048) == {}


def test_a_cache_that_fills_again_after_a_lost_word_of_its_emptying_is_believed_from_the_next_snapshot_on() -> None:
    quarter = Quarter({"A": 32, "B": 32})
    agent = quarter.agents["A"]
    agent.stores(2048)
    quarter.passes(10.0)
    quarter.loses(kv=True)
    agent.hears(AllBlocksCleared())
    quarter.passes(TOLD_S)
    quarter.loses(kv=False)
    agent.stores(512)
    quarter.passes(10.0)
    assert quarter.credit(2048) == {}  # a number is missing
    agent.log.tell_whole()
    quarter.passes(TOLD_S)
    assert quarter.credit(2048) == {"A": 512}


# --- copies -------------------------------------------------------------------------------------------------------


def removed(tokens: int, *, since: int = 0) -> BlockRemoved:
    """One copy of each of P's blocks between two places, in blocks of 32 tokens."""
    return BlockRemoved(hashes=tuple(range(since // 32 + 1, tokens // 32 + 1)))


def test_a_block_with_two_copies_stays_when_the_first_goes() -> None:
    quarter = Quarter({"A": 32, "B": 32})
    agent = quarter.agents["A"]
    for _ in range(2):
        agent.stores(512)
        quarter.passes(TOLD_S)
    for left in ({"A": 512}, {}):
        agent.hears(removed(512))
        quarter.passes(TOLD_S)
        assert quarter.credit(512) == left


def test_a_batch_of_the_engine_that_is_delivered_twice_is_no_second_copy() -> None:
    quarter = Quarter({"A": 32, "B": 32})
    agent = quarter.agents["A"]
    number = agent.stores(512)
    agent.hears(agent.announcement(512), number=number)
    quarter.passes(TOLD_S)
    assert quarter.credit(512) == {"A": 512}
    agent.hears(removed(512))
    quarter.passes(TOLD_S)
    assert quarter.credit(512) == {}


def test_records_that_the_log_delivers_twice_and_late_are_no_second_copy_and_undo_nothing() -> None:
    twice = LinkTerms(delay_s=0.1, duplicate=1.0, late_s=2.0)
    quarter = Quarter({"A": 32, "B": 32}, links=Links(kv=twice))
    agent = quarter.agents["A"]
    agent.stores(512)
    quarter.passes(TOLD_S)
    assert quarter.credit(512) == {"A": 512}
    agent.hears(removed(512, since=256))
    for _ in range(8):
        quarter.passes(TOLD_S)
        assert quarter.credit(512) == {"A": 256}
    assert quarter.pilot.site.prefix.state("A") == "exact"


# --- prompts around one block -------------------------------------------------------------------------------------


HELD = ""  # where one goes that waits for its instance


@pytest.mark.parametrize("tokens", [0, 1, 255, 256, 257])
def test_a_prompt_around_one_block_is_decided_as_any_other(tokens: int) -> None:
    """Equals share it, and a busy instance is left alone, whether or not there is a block to have a key."""
    quarter = Quarter({"A": 32, "B": 32})
    busy = quarter.goes_to(quarter.asks(50_000))
    [idle] = {"A", "B"} - {busy}
    assert {quarter.goes_to(quarter.asks(tokens)) for _ in range(8)} - {HELD} == {idle}
    quarter = Quarter({"A": 32, "B": 32})
    chosen = Counter(quarter.goes_to(quarter.asks(tokens)) for _ in range(20))
    assert set(chosen) <= {"A", "B", HELD}
    if tokens < quarter.block_tokens:  # a block has a home, what has none is spread
        assert min(chosen["A"], chosen["B"]) >= max(chosen["A"], chosen["B"]) / 3 > 0


def test_prompts_around_one_block_are_served_to_their_ends() -> None:
    block = TINY.block_size
    lengths = [1, block - 1, block, block + 1] * 10
    rows = [row(0.05 * n, prompt=tokens, chain=1) for n, tokens in enumerate(lengths)]
    served = fleet(Pilot, instances=3).serve(rows)
    assert fates(served) == ["finished"] * len(rows)
    assert {each.instance for each in served if each.row.prompt_tokens < block} == {0, 1, 2}
