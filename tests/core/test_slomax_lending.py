"""Lending: what each class may hold of a pool that is shared out, and what it lends and gets back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.paced_towns import answers, ask, town
from tokenfleet.core.asked import Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.site import Heard
from tokenfleet.core.slomax.lending import WANTS_S, Holdings, Wanting, beyond_share
from tokenfleet.core.slomax.spending import Spending
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy

CLASSES = {
    "chat": ClassShare(share=0.5, floor=0.2, ceiling=0.9),
    "long": ClassShare(share=0.3, floor=0.1, ceiling=0.6),
    "batch": ClassShare(share=0.2, floor=0.0, ceiling=0.8),
}
TERMS = ControllerPolicy(classes=CLASSES, ceiling=0.95)
KV_TOKENS = 8000 * 32  # of an instance of these towns
HERE = Steps(admission=True, routing=True)


def may(name: str, need: float, *wanting: str, foreign: float = 0.0, **held: float) -> bool:
    """Whether the class may take so many hundredths of the pool's room."""
    by_class = {key: value / 100 for key, value in held.items()}
    holds = Holdings(
        of="hundredths", capacity=1.0 / 0.95, held=sum(by_class.values()) + foreign / 100, by_class=by_class
    )
    problem = beyond_share(name, need / 100 - 1e-9, holds=holds, setting=TERMS.static(), terms=TERMS, wanting=wanting)
    return not problem


def test_a_class_may_always_hold_its_share_and_borrows_what_others_leave_but_their_floors() -> None:
    assert may("batch", 10, batch=10)
    assert may("batch", 60, batch=10)  # idle classes lend all but their floors: .2 and .1
    assert not may("batch", 61, batch=10)
    assert may("batch", 30, chat=20, long=10, batch=40)  # who holds its floor keeps nothing free
    assert not may("batch", 31, chat=20, long=10, batch=40)


def test_a_class_that_was_turned_away_lends_nothing_until_it_has_its_share() -> None:
    assert may("batch", 10, chat=30, batch=20)
    assert not may("batch", 41, "chat", chat=30, batch=20), "chat's last 20 hundredths, and the floor of long"
    assert may("batch", 20, "chat", chat=30, batch=20)
    assert may("chat", 20, "chat", chat=30, batch=20)
    assert may("batch", 10, "chat", chat=50, batch=20)  # it has it


def test_what_is_lent_is_not_taken_back_but_given_to_nobody_else_when_it_ends() -> None:
    assert not may("chat", 10, "chat", chat=10, batch=80, long=10), "the pool is full"
    assert not may("batch", 10, "chat", chat=10, batch=60, long=10), "what ended goes to chat"
    assert may("chat", 20, "chat", chat=10, batch=60, long=10)


def test_no_class_goes_over_its_ceiling_and_no_pool_over_its_own() -> None:
    assert not may("long", 10, long=55)
    assert may("long", 5, long=55)
    assert not may("chat", 10, chat=20, foreign=75.0), "sequences that nobody placed hold it"


def test_the_first_request_of_a_class_goes_whatever_its_size_while_the_pool_has_room() -> None:
    assert may("long", 99)
    assert may("long", 70, "chat", chat=30)
    assert not may("long", 70, chat=31)


@given(
    requests=st.lists(
        st.tuples(st.sampled_from(sorted(CLASSES)), st.floats(0.1, 5.0), st.booleans(), st.booleans()), max_size=200
    )
)
def test_nobody_is_ever_let_in_beyond_ceilings_or_into_what_is_kept(
    requests: list[tuple[str, float, bool, bool]],
) -> None:
    """Whatever comes and ends: only a class's first request may touch what is kept for the others."""
    held: dict[str, list[float]] = {name: [] for name in CLASSES}
    for name, need, ends, wants in requests:
        sums = {key: sum(each) for key, each in held.items()}
        if may(name, need, *(["chat"] if wants else []), **sums):
            after = sums | {name: sums[name] + need}
            assert sum(after.values()) <= 100.0 + 1e-6
            if sums[name]:
                assert after[name] <= 100 * CLASSES[name].ceiling + 1e-6
            if sums[name] and after[name] > 100 * CLASSES[name].share:
                kept = {
                    key: 100 * (each.share if wants and key == "chat" else each.floor) for key, each in CLASSES.items()
                }
                free = 100.0 - sum(after.values())
                assert free >= sum(max(0.0, kept[key] - after[key]) for key in CLASSES if key != name) - 1e-6
            held[name].append(need)
        if ends and held[name]:
            held[name].pop(0)


def test_a_class_wants_room_for_a_while_after_it_was_turned_away() -> None:
    wanting = Wanting()
    wanting.turned_away("m", "chat", 100.0)
    assert wanting.of("m", 100.0 + WANTS_S) == {"chat"}
    assert wanting.of("m", 100.1 + WANTS_S) == wanting.of("other", 100.0) == set()


def shared(b: Town) -> Town:
    """Chat has half of the pool and lends .3 of it."""
    policy = b.site.policy
    b.site.adopt(replace(policy, slomax=replace(policy.slomax, controller=TERMS)))
    return b


def at_once(b: Town, name: str, request_class: str, prompt_tokens: int, *, spent: bool = False) -> Decision:
    """A request; unless `spent`, the GPU seconds of all before it are long past."""
    if not spent:
        b.site.spending = Spending()
    decision = b.place(asked(name, prompt_tokens=prompt_tokens, declared_class=request_class), steps=HERE)
    if decision.verdict == "admit":
        b.hears_outcome(decision, "first_token", ttft_s=0.1)
    return decision


def filled(b: Town, request_class: str, prompt_tokens: int) -> list[Decision]:
    """Admits requests of the class until one is refused."""
    running: list[Decision] = []
    while (decision := at_once(b, f"{request_class}-{len(running)}", request_class, prompt_tokens)).verdict == "admit":
        running.append(decision)
        assert len(running) < 100
    assert decision.reason == "all_busy", decision.sentence
    return running


def test_at_a_site_batch_borrows_and_chat_gets_back_what_ends() -> None:
    b = shared(Town("b", small=2))
    running = filled(b, "batch", KV_TOKENS // 20)
    refused = at_once(b, "more", "batch", KV_TOKENS // 20)
    assert "are kept for others" in refused.detail
    assert refused.admission is not None
    assert refused.admission.not_before_s is not None, "it has a deadline to wait for"
    assert at_once(b, "chat-first", "chat", KV_TOKENS // 20).verdict == "admit"
    chats = filled(b, "chat", KV_TOKENS // 20)
    assert chats, "its floor was kept free"
    b.hears_outcome(running[0], "finished", ttft_s=0.1, output_tokens=10)
    assert at_once(b, "again", "batch", KV_TOKENS // 20).verdict == "defer"
    assert at_once(b, "chat-again", "chat", KV_TOKENS // 20).verdict == "admit"


def test_without_shares_and_with_slomax_off_no_class_is_bound() -> None:
    b = Town("b", small=2)
    detail = filled(b, "batch", KV_TOKENS // 20)[-1].detail
    assert "kept for others" not in detail
    off = shared(Town("b", small=2))
    off.site.adopt(replace(off.site.policy, products=replace(off.site.policy.products, slomax=False)))
    decision = at_once(off, "r", "batch", KV_TOKENS // 20)
    assert decision.detail == ""


def test_where_classes_queue_who_is_beyond_its_share_keeps_its_place() -> None:
    b = shared(town(small=1))
    first = ask(b, "a", "batch", KV_TOKENS // 2)
    assert first.verdict == "admit"
    b.hears_outcome(first, "first_token", ttft_s=0.1)
    second = ask(b, "b", "batch", KV_TOKENS // 5)
    assert second.verdict == "queue"
    assert answers(b) == []
    b.hears_outcome(first, "finished", ttft_s=0.1, output_tokens=10)
    b.now_s += 60.0  # the GPU seconds of the first are long past
    assert answers(b) == [("b", "admit")]


def test_gpu_seconds_are_shared_out_as_they_pass_and_a_class_within_its_share_may_always_go() -> None:
    """Prompts of half a second on two instances: batch may have all but .3 of 20 × .95 s."""
    b = shared(Town("b", small=2))
    decisions = [at_once(b, f"batch-{i}", "batch", 10_000, spent=True) for i in range(40)]
    assert "GPU seconds in 10" in decisions[-1].detail
    admitted = sum(each.verdict == "admit" for each in decisions)
    assert b.site.spending.of("small-chat", b.now_s)["batch"] == pytest.approx(0.7 * 19.0, abs=0.6)
    assert at_once(b, "chat", "chat", 10_000, spent=True).verdict == "admit"
    b.now_s += 1.5
    assert at_once(b, "later", "batch", 10_000, spent=True).verdict == "admit", "a tenth of them is past"
    assert 15 < admitted < 35


def test_what_other_replicas_place_counts_too() -> None:
    b, other = shared(Town("b", small=2)), Town("b", small=2)
    decided = other.decide(asked("theirs", prompt_tokens=10_000, declared_class="batch"), steps=HERE)
    assert decided.placement is not None
    envelope = PlacementEnvelope(site="b", replica="1", start="1", n=1, events=(decided.placement,))
    b.site.heard(envelope, Heard(now_s=b.now_s))
    b.site.heard(envelope, Heard(now_s=b.now_s + 1.0))
    assert b.site.spending.of("small-chat", b.now_s)["batch"] > 0.3


@pytest.mark.parametrize("enabled", [True, False])
def test_the_setting_of_a_pool_is_the_controller_s_while_that_is_on(*, enabled: bool) -> None:
    moved = replace(TERMS.static(), shares={"chat": 0.6, "long": 0.2, "batch": 0.2})
    terms = replace(TERMS, enabled=enabled, pools={"small-chat@b": moved})
    assert terms.setting("small-chat@b") == (moved if enabled else TERMS.static())
    assert terms.setting("small-chat@c") == TERMS.static()
    other = replace(moved, shares={"chat": 1.0})
    assert replace(terms, pools={"small-chat@b": other}).setting("small-chat@b") == TERMS.static()
