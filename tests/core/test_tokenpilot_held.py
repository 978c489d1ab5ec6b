"""Late binding: what waits at its gateway, in which order it goes, and when nothing waits."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import keys
from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE, SCHEDULE, Decided, Ids, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.errors import UnknownTenantError
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.core.schedule import let_go, released, withdrawn
from tokenfleet.core.site import Heard

NUMBERS = count(1_000)


def ask(b: Town, name: str, prompt_tokens: int = 30_000, *, steps: Steps = ROUTE, **facts: Any) -> Decision:
    """A request that its gateway can hold for a minute."""
    known: dict[str, Any] = {"wait_max_s": 60.0}
    return b.place(asked(name, prompt_tokens=prompt_tokens, **(known | facts)), steps=steps)


def release(b: Town) -> Iterator[Decision]:
    """What goes out now, each counted before the next."""
    ids = (Ids(decision=f"b-{number}", now_wall_s=1.8e9) for number in NUMBERS)
    for waiting, decided in released(b.site, "small-chat", b.now_s, lambda: next(ids)):
        assert isinstance(decided, Decided)
        if decided.placement is not None:
            b.site.placed(
                decided.placement,
                partition=0,
                session="",
                now_s=b.now_s,
                block_keys=waiting.request.block_keys,
            )
        yield decided.decision


def names(decisions: Iterator[Decision]) -> list[str]:
    return [decision.request for decision in decisions]


def test_a_request_waits_for_its_instance_to_be_nearly_idle_and_then_goes() -> None:
    b = Town("b", small=1)
    first, second = ask(b, "r1"), ask(b, "r2")
    assert (first.verdict, second.verdict, second.target) == ("admit", "queue", "")
    assert second.sentence.startswith("held: b-small-0 is the cheapest and has 2,750 ms")
    b.now_s += 0.5
    assert names(release(b)) == []
    b.hears_outcome(first, "first_token")
    assert [(d.request, d.verdict, d.target) for d in release(b)] == [("r2", "admit", "b-small-0")]
    assert len(b.site.held) == 0


def test_the_shortest_work_goes_first_and_age_outweighs_it_in_the_end() -> None:
    b = Town("b", small=1)
    running = ask(b, "running")
    assert ask(b, "long").verdict == "queue"
    assert ask(b, "short", 1000).verdict == "queue"
    b.hears_outcome(running, "first_token")
    assert names(release(b)) == ["short"]
    b = Town("b", small=1)
    running = ask(b, "running")
    ask(b, "long")
    b.now_s += 58.0
    b.hears_telemetry()
    assert ask(b, "short", 1000).verdict == "queue"
    b.hears_outcome(running, "first_token")
    assert names(release(b)) == ["long"]


def test_who_is_nearly_due_goes_before_less_work_and_who_is_late_makes_way() -> None:
    def first_after(waited_s: float) -> str:
        b = Town("b", small=1)
        for _ in range(100):
            b.site.held.heard_first_token("small-chat", ttft_s=3.5, lag_s=0.0)
        running = ask(b, "running")
        ask(b, "long")  # 2.75 s of work
        b.now_s += waited_s
        ask(b, "short", 3000)
        b.hears_outcome(running, "first_token")
        return names(release(b))[0]

    assert [first_after(waited_s) for waited_s in (0.0, 0.6, 1.5)] == ["short", "long", "short"]


def test_the_later_first_tokens_are_reported_the_earlier_an_instance_is_open() -> None:
    b = Town("b", small=1)
    terms = b.site.policy.tokenpilot.late
    assert b.site.held.open_s(terms) == terms.backlog_min_s
    for _ in range(1000):
        b.site.held.heard_first_token("small-chat", ttft_s=1.0, lag_s=0.04)
    assert 0.11 < b.site.held.open_s(terms) < 0.12 < terms.backlog_max_s


def test_who_is_first_in_order_need_not_wait_for_those_behind() -> None:
    b = Town("b", small=2)
    for name in ("r1", "r2"):
        ask(b, name)
    assert ask(b, "r3").verdict == "queue"
    b.now_s += 2.71
    assert ask(b, "small", 500).verdict == "admit"
    assert names(release(b)) == ["r3"]


def test_a_prompt_that_is_cached_here_waits_here_rather_than_being_computed_elsewhere() -> None:
    b = Town("b", small=2)
    blocks = keys(*range(1, 101))
    warm = ask(b, "warm", 25_600, block_keys=blocks, block_tokens=256)
    ask(b, "other", 25_600)
    follower = ask(b, "follower", 25_700, block_keys=blocks, block_tokens=256)
    assert follower.verdict == "queue"
    b.hears_outcome(warm, "first_token")
    assert [(d.request, d.target) for d in release(b)] == [("follower", warm.target)]


def test_after_its_longest_wait_it_goes_whatever_the_backlog() -> None:
    b = Town("b", small=1)
    ask(b, "r1", 120_000)
    ask(b, "r2", wait_max_s=0.4)
    b.now_s += 0.3
    assert names(release(b)) == []
    b.now_s += 0.2
    assert names(release(b)) == ["r2"]


def test_a_dry_run_and_a_gateway_that_cannot_hold_leave_nothing_behind() -> None:
    b = Town("b", small=1)
    ask(b, "r1")
    assert ask(b, "r2", wait_max_s=0.0).verdict == "admit"
    assert (
        b.decide(asked("r3", prompt_tokens=9000, wait_max_s=9.0, dry_run=True), steps=ROUTE).decision.verdict == "queue"
    )
    assert len(b.site.held) == 0


def test_silent_telemetry_holds_nothing_back() -> None:
    b = Town("b", small=1)
    running = ask(b, "running")
    ask(b, "r1")
    b.now_s += 30.0
    b.hears_outcome(running, "first_token")
    assert [(d.request, d.mode) for d in release(b)] == [("r1", "stale")]


def test_who_leaves_is_forgotten() -> None:
    b = Town("b", small=1)
    running = ask(b, "running")
    ask(b, "r1")
    withdrawn(b.site, ("r1", 0), b.now_s)
    withdrawn(b.site, ("r1", 0), b.now_s)
    assert len(b.site.held) == 0
    b.hears_outcome(running, "first_token")
    assert names(release(b)) == []


def test_nothing_waits_while_another_replica_places_too() -> None:
    b = Town("b", small=1)
    ask(b, "r1")
    envelope = PlacementEnvelope(site="b", replica="other", start="1", n=1, events=())
    b.site.heard(envelope, Heard(now_s=b.now_s))
    assert ask(b, "r2").verdict == "admit"
    b.now_s += 61.0
    assert ask(b, "r3").verdict == "queue"


def test_nothing_waits_where_first_tokens_are_not_reported_or_too_late() -> None:
    b = Town("b", small=1)
    for n in range(20):
        b.hears_outcome(b.place(asked(f"silent{n}", prompt_tokens=16), steps=ROUTE), "finished")
    assert "report their first token" in b.site.held.off(b.site.policy.tokenpilot, b.now_s)
    ask(b, "r1")
    assert ask(b, "r2").verdict == "admit"

    b = Town("b", small=1)
    for n in range(40):
        decision = b.place(asked(f"late{n}", prompt_tokens=16), steps=ROUTE)
        b.now_s += 1.0
        b.hears_outcome(decision, "first_token", attempt_s=0.1)
        b.hears_outcome(decision, "finished")
    assert "late" in b.site.held.off(b.site.policy.tokenpilot, b.now_s)


def test_switched_off_or_full_it_holds_nothing() -> None:
    b = Town("b", small=1)
    terms = replace(b.site.policy.tokenpilot, late=replace(b.site.policy.tokenpilot.late, held_max=1))
    b.site.adopt(replace(b.site.policy, tokenpilot=terms))
    assert [ask(b, f"r{n}").verdict for n in range(3)] == ["admit", "queue", "admit"]
    terms = replace(terms, late=replace(terms.late, enabled=False))
    b.site.adopt(replace(b.site.policy, tokenpilot=terms))
    assert ask(b, "r3").verdict == "admit"


@settings(max_examples=60, deadline=None)
@given(
    acts=st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from([16, 500, 4000, 30_000])),
            st.tuples(st.just("first_token"), st.integers(0, 9)),
            st.tuples(st.just("wait"), st.sampled_from([0.05, 1.0, 20.0])),
            st.tuples(st.just("leave"), st.integers(0, 3)),
        ),
        max_size=30,
    )
)
def test_every_request_goes_out_once_or_is_still_held(acts: list[tuple[str, Any]]) -> None:
    b = Town("b", small=3)
    out: list[Decision] = []
    held: set[str] = set()
    for number, (act, how) in enumerate(acts):
        if act == "ask":
            decision = ask(b, f"r{number}", how)
            held |= {decision.request} if decision.verdict == "queue" else set()
            out += [decision] if decision.verdict == "admit" else []
        elif act == "wait":
            b.now_s += how
        elif act == "leave":
            b.beats = [beat for beat in b.beats if beat.instance != f"b-small-{how}"] or b.beats
            b.hears_telemetry()
        elif out:
            b.hears_outcome(out[how % len(out)], "first_token")
        for decision in release(b):
            held.remove(decision.request)
            out += [decision]
        assert len(b.site.held) == len(held)
    assert len({decision.request for decision in out}) == len(out)
    b.now_s += 61.0
    assert {decision.request for decision in release(b)} == held
    assert len(b.site.held) == 0


def test_from_an_empty_pool_those_go_who_have_waited_long_enough_and_are_told_why() -> None:
    b = Town("b", small=1)
    ask(b, "running")
    ask(b, "r1", wait_max_s=0.5)
    ask(b, "r2")
    b.beats = []
    b.hears_telemetry()
    assert names(release(b)) == []
    b.now_s += 0.6
    assert [(d.request, d.verdict, d.reason) for d in release(b)] == [("r1", "reject", "no_instances")]
    assert len(b.site.held) == 1


def test_what_was_cached_on_an_instance_is_not_taken_for_anothers_when_one_takes_its_place() -> None:
    b = Town("b", small=2)
    blocks = keys(*range(1, 101))
    warm = ask(b, "warm", 25_600, block_keys=blocks, block_tokens=256)
    assert ask(b, "cold", 25_600).target == "b-small-1" != warm.target
    ask(b, "follower", 25_700, block_keys=blocks, block_tokens=256)
    b.beats = [replace(b.beats[0], instance="b-small-2"), b.beats[1]]  # now the busy cold one is the first of two
    b.hears_telemetry()
    assert [(d.request, d.target) for d in release(b)] == [("follower", "b-small-2")]


def test_who_is_held_keeps_its_share_of_the_quota_until_it_goes_or_leaves() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 3})
    verdicts = [ask(b, f"r{n}", steps=SCHEDULE).verdict for n in range(6)]
    assert verdicts == ["admit", "queue", "queue", "reject", "reject", "reject"]
    withdrawn(b.site, ("r1", 0), b.now_s)
    assert ask(b, "r6", steps=SCHEDULE).verdict == "queue"
    assert b.site.quotas.used("acme", now_s=b.now_s) == 3
    b.now_s += 60.0
    assert [d.verdict for d in release(b)] == ["admit", "admit"]
    assert b.site.quotas.used("acme", now_s=b.now_s) == 3
    assert ask(b, "r2", attempt=1, steps=SCHEDULE).verdict == "queue"  # its retry is free
    assert b.site.quotas.used("acme", now_s=b.now_s) == 3


def test_a_held_request_that_is_refused_in_the_end_gives_back_what_it_took() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 2})
    ask(b, "running", steps=SCHEDULE)
    assert ask(b, "r1", steps=SCHEDULE).verdict == "queue"
    b.hears_control("b-small-0", "draining")
    final = let_go(b.site, ("r1", 0), Ids(decision="last", now_wall_s=1.8e9), now_s=b.now_s)
    assert isinstance(final, Decided)
    assert final.decision.verdict == "reject"
    assert b.site.quotas.used("acme", now_s=b.now_s) == 1


def test_a_dry_run_that_would_be_held_takes_nothing_from_the_quota() -> None:
    b = Town("b", small=1, tenant_limits={"acme": 2})
    ask(b, "running", steps=SCHEDULE)
    assert ask(b, "r1", steps=SCHEDULE, dry_run=True).verdict == "queue"
    assert b.site.quotas.used("acme", now_s=b.now_s) == 1


def test_held_requests_have_their_places_among_the_tenants_and_the_class_s_running() -> None:
    b = Town("b", small=1)
    three = replace(b.site.policy.tenant("acme"), running_max=3)
    b.site.adopt(replace(b.site.policy, tenants=b.site.policy.tenants | {"acme": three}))
    verdicts = [ask(b, f"r{n}", steps=SCHEDULE).verdict for n in range(5)]
    assert verdicts == ["admit", "queue", "queue", "reject", "reject"]
    b.now_s += 60.0
    assert [d.verdict for d in release(b)] == ["admit", "admit"]

    b = Town("b", small=1)
    chat = replace(b.site.policy.classes["chat"], running_max_per_instance=3)
    b.site.adopt(replace(b.site.policy, classes=b.site.policy.classes | {"chat": chat}))
    told = [ask(b, f"r{n}", 10_000, declared_class="chat", steps=SCHEDULE) for n in range(4)]
    assert [d.verdict for d in told] == ["admit", "queue", "queue", "reject"]
    assert told[-1].admission is not None
    assert (told[-1].reason, told[-1].admission.running) == ("all_busy", 3)
    b.now_s += 60.0
    assert [d.verdict for d in release(b)] == ["admit", "admit"]


def test_a_held_request_whose_tenant_is_gone_gets_its_error_and_the_others_their_turn() -> None:
    b = Town("b", small=1)
    running = ask(b, "running")
    for name, tenant in (("r1", "archive"), ("r2", "acme")):
        assert ask(b, name, 500, tenant=tenant).verdict == "queue"
    b.site.adopt(replace(b.site.policy, tenants={"acme": b.site.policy.tenant("acme")}))
    b.hears_outcome(running, "first_token")
    ids = (Ids(decision=f"n-{number}", now_wall_s=1.8e9) for number in NUMBERS)
    told = {w.request.id: answer for w, answer in released(b.site, "small-chat", b.now_s, lambda: next(ids))}
    assert isinstance(told["r1"], UnknownTenantError)
    assert isinstance(told["r2"], Decided)
    assert len(b.site.held) == 0
