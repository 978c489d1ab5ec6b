"""Expected: what a placement will bring about counts from its dispatch, and never longer than it can be true."""

from hypothesis import given
from hypothesis import strategies as st

from tests.builders import digest, keys, stored
from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.decision import Decision
from tokenfleet.core.expected import AFTER_FIRST_TOKEN_S, UNHEARD_MAX_S, Expected
from tokenfleet.core.records import KvDelta, Order
from tokenfleet.core.site import Heard

BLOCKS = keys(*range(1, 9))


def place(b: Town, name: str) -> Decision:
    return b.place(asked(name, prompt_tokens=2060, block_keys=BLOCKS, block_tokens=256), steps=ROUTE)


def credit(b: Town) -> dict[str, int]:
    request = asked("r", prompt_tokens=2060, block_keys=BLOCKS, block_tokens=256)
    return {view.instance: view.hit_tokens for view in b.site.pool("small-chat", b.now_s, request).instances}


def test_a_burst_of_siblings_follows_the_first_before_any_engine_has_told_of_the_blocks() -> None:
    b = Town("b", small=4)
    first = place(b, "r0")
    b.now_s += 0.2
    assert credit(b)[first.target] == 2048
    assert [place(b, f"r{n}").target for n in range(1, 4)] == [first.target] * 3


def test_the_expectation_ends_when_the_engine_can_have_told() -> None:
    b = Town("b", small=2)
    first = place(b, "r0")
    b.hears_outcome(first, "first_token")
    assert credit(b)[first.target] == 2048
    b.now_s += AFTER_FIRST_TOKEN_S
    assert credit(b)[first.target] == 0


def test_a_short_answer_ends_before_the_engine_has_told_and_takes_nothing_away() -> None:
    b = Town("b", small=2)
    first = place(b, "r0")
    b.hears_outcome(first, "first_token")
    b.hears_outcome(first, "finished")
    assert credit(b)[first.target] == 2048
    b.now_s += AFTER_FIRST_TOKEN_S
    assert credit(b)[first.target] == 0


def test_an_end_without_a_first_token_ends_it_at_once() -> None:
    b = Town("b", small=2)
    first = place(b, "r0")
    b.hears_outcome(first, "failed")
    assert credit(b) == {"b-small-0": 0, "b-small-1": 0}


def test_a_cleared_cache_and_a_gone_instance_expect_nothing() -> None:
    b = Town("b", small=2)
    first = place(b, "r0")
    tell = stored(first.target, [50], n=1, model="small-chat")
    b.site.heard(tell, Heard(now_s=b.now_s))
    b.changes(first.target, digest=digest([50], block_tokens=256))
    b.hears_telemetry()
    cleared = KvDelta(
        instance=first.target,
        boot="boot-1",
        order=Order(cluster=tell.order.cluster, claim=tell.order.claim, n=2),
        model="small-chat",
        block_tokens=256,
        cleared=True,
    )
    b.site.heard(cleared, Heard(now_s=b.now_s))
    assert credit(b)[first.target] == 0
    b.beats = [beat for beat in b.beats if beat.instance != place(b, "r1").target]
    b.hears_telemetry()
    assert set(credit(b).values()) == {0}


@given(
    acts=st.lists(
        st.tuples(st.sampled_from("pcdxw"), st.integers(0, 5), st.integers(0, 3), st.integers(1, 6)), max_size=40
    )
)
def test_it_is_what_a_naive_list_of_placements_says(acts: list[tuple[str, int, int, int]]) -> None:
    expected, naive, now_s = Expected(), dict[str, tuple[int, int, float]](), 0.0
    for act, number, slot, blocks in acts:
        name = f"d{number}"
        if act == "p":
            expected.add(name, slot, keys(*range(1, blocks + 1)), now_s=now_s)
            naive.setdefault(name, (slot, blocks, now_s + UNHEARD_MAX_S))
        elif act == "c":
            expected.came(name, now_s=now_s)
            if name in naive:
                slot, blocks, due_s = naive[name]
                naive[name] = slot, blocks, min(due_s, now_s + AFTER_FIRST_TOKEN_S)
        elif act == "d":
            expected.drop(name)
            naive.pop(name, None)
        elif act == "x":
            expected.clear(slot)
            naive = {n: each for n, each in naive.items() if each[0] != slot}
        else:
            now_s += blocks / 2
        expected.expire(now_s)
        naive = {n: each for n, each in naive.items() if each[2] > now_s}
        held: dict[int, int] = {}
        for slot, blocks, _ in naive.values():
            for key in range(1, blocks + 1):
                held[key] = held.get(key, 0) | 1 << slot
        assert expected.holders == held
        assert expected.slots == sum({1 << slot for slot, _, _ in naive.values()})
