"""Class queues: who waits for a shared pool, who goes when, and what a prefill may cost those who decode."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tests.core.paced_towns import answers, ask, decodes, release, ticks, town
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.columns import Labels
from tokenfleet.core.policy import PacingPolicy
from tokenfleet.core.schedule import withdrawn
from tokenfleet.core.slomax.iterations import Iterations
from tokenfleet.core.slomax.line import Line
from tokenfleet.core.slomax.quota import Charge
from tokenfleet.core.tokenpilot.held import Waiting
from tokenfleet.sim.mixed.service_levels import QUEUES


def test_an_idle_pool_takes_any_class_at_once() -> None:
    for request_class in QUEUES:
        assert ask(town(small=1), "r", request_class).verdict == "admit"


def test_a_request_waits_until_the_backlog_is_within_its_classs_bound() -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=20_000)  # about 1.6 s of work
    assert [ask(b, name, name).verdict for name in ("chat", "long", "batch")] == ["queue"] * 3
    assert answers(b) == []
    b.now_s += 1.1
    assert answers(b) == [("chat", "admit")]
    b.hears_outcome(first, "first_token", ttft_s=1.2)
    assert ("long", "admit") in answers(b)


def test_an_idle_instance_that_serves_no_more_is_open_to_nobody() -> None:
    b = town(small=2)
    b.changes("b-small-1", state="draining")
    b.hears_telemetry()
    first = ask(b, "first", prompt_tokens=20_000)
    assert first.target == "b-small-0"
    assert ask(b, "second").verdict == "queue"
    assert answers(b) == []
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    assert answers(b) == [("second", "admit")]


def test_a_request_that_comes_while_its_class_is_full_where_it_is_open_waits_in_line() -> None:
    b = town(small=1)
    policy = b.site.policy
    classes = policy.classes | {"chat": replace(policy.classes["chat"], running_max_per_instance=1)}
    b.site.adopt(replace(policy, classes=classes))
    first = decodes(b, "first")
    assert ask(b, "second").verdict == "queue"
    assert answers(b) == []
    b.hears_outcome(first, "finished", output_tokens=10)
    assert answers(b) == [("second", "admit")]


def test_classes_go_by_rank_whoever_came_first() -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=20_000)
    ask(b, "batch", "batch", 100)
    ask(b, "chat", "chat", 100)
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    assert [name for name, _ in answers(b)] == ["chat", "batch"]


def test_filling_work_waits_while_it_would_slow_the_guarded_beyond_their_gate() -> None:
    """60 ms are agreed: at 50 ms an iteration a prefill of 85 ms passes 55 ms, at 20 ms it does not."""
    for step_s, verdict in ((0.050, "queue"), (0.020, "admit")):
        b = town(small=1)
        decodes(b, "chat")
        ticks(b, round(1.0 / step_s), over_s=1.0)
        assert ask(b, "batch", "batch", 8_000).verdict == verdict, step_s


def test_nobody_is_guarded_where_no_guarded_request_runs() -> None:
    b = town(small=1)
    decodes(b, "batch", "batch")
    ticks(b, 20, over_s=1.0)
    assert ask(b, "more", "batch", 8_000).verdict == "admit"


def test_guarded_requests_are_steered_to_where_tokens_come_fast_but_never_gated() -> None:
    b = town(small=2)
    names = {decodes(b, f"chat-{n}").target for n in range(2)}
    assert names == {"b-small-0", "b-small-1"}
    b.hears_telemetry(iterations_total=0)
    b.now_s += 1.0
    b.changes("b-small-0", iterations_total=14)  # 71 ms a token
    b.changes("b-small-1", iterations_total=50)
    b.hears_telemetry()
    assert {ask(b, f"r{n}", prompt_tokens=50).target for n in range(3)} == {"b-small-1"}
    b.changes("b-small-1", iterations_total=14)
    b.hears_telemetry()
    assert ask(b, "slow everywhere", prompt_tokens=50).verdict == "admit"


def test_one_large_prefill_an_instance_at_a_time() -> None:
    b = town(small=1)
    first = ask(b, "long-1", "long", 3_000)
    assert ask(b, "long-2", "long", 3_000).verdict == "queue"
    b.now_s += 0.2
    assert answers(b) == []  # the backlog is within the bound, the first has no token yet
    b.hears_outcome(first, "first_token", ttft_s=0.3)
    assert answers(b) == [("long-2", "admit")]


def test_while_a_reserving_request_waits_filling_work_keeps_off_the_instance_that_will_be_free_first() -> None:
    b = town(small=2)
    busy = [ask(b, f"long-{n}", "long", 20_000) for n in range(2)]
    assert {decision.target for decision in busy} == {"b-small-0", "b-small-1"}
    assert ask(b, "long-3", "long", 20_000).verdict == "queue"
    assert ask(b, "batch", "batch", 100).verdict == "queue"
    b.hears_outcome(busy[0], "first_token", ttft_s=1.0)
    assert [name for name, _ in answers(b)] == ["long-3"]
    b.hears_outcome(busy[1], "first_token", ttft_s=1.0)
    assert [name for name, _ in answers(b)] == ["batch"]


def test_a_late_reserving_request_is_refused_and_a_late_guarded_one_goes_behind_the_others() -> None:
    b = town(small=1)
    ask(b, "first", prompt_tokens=100_000)
    ask(b, "late", "long", 20_000)
    ask(b, "late chat", "chat", 100)
    b.now_s += 5.0
    ask(b, "chat", "chat", 200)
    b.now_s += 20.0
    assert ("late", "reject") in answers(b)
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=100_000)
    ask(b, "late chat", "chat", 100)
    b.now_s += 3.0
    ask(b, "chat", "chat", 200)
    b.hears_outcome(first, "first_token", ttft_s=3.0)
    assert [name for name, _ in answers(b)] == ["chat", "late chat"]


def test_what_has_waited_as_long_as_its_gateway_can_goes_out() -> None:
    b = town(small=1)
    ask(b, "first", prompt_tokens=100_000)
    assert ask(b, "r", "batch", wait_max_s=2.0).verdict == "queue"
    b.now_s += 1.9
    assert answers(b) == []
    b.now_s += 0.2
    assert answers(b) == [("r", "admit")]


def test_a_request_that_its_gateway_cant_hold_is_answered_at_once() -> None:
    b = town(small=1)
    ask(b, "first", prompt_tokens=100_000)
    assert ask(b, "r", "batch", wait_max_s=0.0).verdict == "admit"


def test_a_caller_that_leaves_waits_no_longer() -> None:
    b = town(small=1)
    ask(b, "first", prompt_tokens=100_000)
    ask(b, "r")
    assert len(b.site.held) == 1
    withdrawn(b.site, ("r", 0), b.now_s)
    b.now_s += 60.0
    assert (len(b.site.held), answers(b)) == (0, [])


def test_only_with_pacing_on_do_classes_wait_apart() -> None:
    b = Town("b", small=1)
    ask(b, "first", prompt_tokens=100_000)
    assert ask(b, "batch", "batch").verdict == "queue"
    assert (len(b.site.queues("small-chat")), len(b.site.held)) == (0, 1)


# -- a line -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.booleans(), st.sampled_from("ab")), max_size=20),
    st.floats(-10, 10),
    st.integers(1, 25),
)
@settings(deadline=None)
def test_a_line_gives_each_tenants_of_a_rank_first_then_the_others_each_once(
    entries: list[tuple[float, bool, str]], rank: float, most: int
) -> None:
    line = Line()
    left: list[tuple[bool, float, int, str]] = []
    for number, (own, leaves, tenant) in enumerate(entries):
        waiting = replace(_waiting(str(number)), since_s=float(number))
        line.put(waiting, own, tenant)
        if leaves:
            assert line.take(waiting.call) is waiting
            assert line.take(waiting.call) is None
        else:
            left.append((own < rank, own, number, tenant))
    wanted = {
        name: [str(number) for _, _, number, tenant in sorted(left) if tenant == name][:most]
        for name in {tenant for *_, tenant in left}
    }
    assert {name: [w.request.id for w in its] for name, its in line.by_tenant(most, rank=rank)} == wanted
    in_all = [str(number) for _, number in sorted((own, number) for _, own, number, _ in left)]
    assert [waiting.request.id for waiting in line.first(most)] == in_all[:most]
    assert len(line) == len(left)
    assert (oldest.request.id if (oldest := line.oldest()) else None) == (str(left[0][2]) if left else None)


def _waiting(name: str) -> Waiting:
    return Waiting(
        request=asked(name),
        steps=ROUTE,
        request_class="chat",
        charge=Charge(tenant="acme"),
        since_s=0.0,
        work_s=0.1,
        hits=np.zeros(1),
        labels=Labels(["a"], [""], [""], [""], [""]),
        looked_s=0.0,
    )


# -- iterations ----------------------------------------------------------------------------------------------------


def test_iterations_are_counted_over_the_window_and_not_over_a_restart() -> None:
    labels = Labels(["a", "b"], ["", ""], ["", ""], ["", ""], ["", ""])
    counted = Iterations()
    for n in range(10):
        counted.heard("a", boot="1", count=100.0 + 10 * n, at_s=0.25 * n)
    spent_s, steps = counted.recent(labels, 1.0)
    assert (spent_s[0], steps[0]) == (1.0, 40.0)
    assert np.isnan(spent_s[1])
    counted.heard("a", boot="1", count=500.0, at_s=0.1)  # an old record, late
    assert counted.recent(labels, 1.0)[1][0] == 40.0
    counted.heard("a", boot="2", count=3.0, at_s=3.0)
    assert np.isnan(counted.recent(labels, 1.0)[0][0])
    counted.heard("a", boot="2", count=None, at_s=4.0)
    counted.heard("a", boot="2", count=9.0, at_s=None)
    counted.heard("a", boot="2", count=13.0, at_s=5.0)
    assert counted.recent(labels, 1.0)[1][0] == 10.0


def test_what_was_queued_when_pacing_is_turned_off_goes_as_before() -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=20_000)
    ask(b, "r", "batch")
    policy = b.site.policy
    b.site.adopt(replace(policy, slomax=replace(policy.slomax, pacing=PacingPolicy(enabled=False))))
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    assert [name for name, _ in answers(b)] == ["r"]


def test_what_was_held_when_pacing_is_turned_on_stands_in_line_by_class() -> None:
    b = town(small=1)
    policy = b.site.policy
    b.site.adopt(replace(policy, slomax=replace(policy.slomax, pacing=PacingPolicy(enabled=False))))
    first = ask(b, "first", prompt_tokens=20_000)
    ask(b, "batch", "batch", 100)
    ask(b, "chat", "chat", 200)
    b.site.adopt(policy)
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    assert [name for name, _ in answers(b)] == ["chat", "batch"]


# -- tenants and classes that would be passed over ------------------------------------------------------------------


def test_tenants_of_a_class_go_by_what_they_have_had_not_by_who_came_first() -> None:
    b = town(small=1)
    first = ask(b, "first", prompt_tokens=20_000)
    for n in range(6):
        ask(b, f"acme-{n}", "batch", 4_000, tenant="acme")
    for n in range(2):
        ask(b, f"globex-{n}", "batch", 4_000, tenant="globex")
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    went: list[str] = []
    for _ in range(8):
        (decision,) = release(b)
        went.append(decision.request)
        b.hears_outcome(decision, "first_token", ttft_s=0.4)
        b.hears_outcome(decision, "finished", ttft_s=0.4, output_tokens=10, prompt_tokens=4_000, cached_tokens=0)
    assert sorted(name[0] for name in went[:4]) == ["a", "a", "g", "g"]
    assert len(went) == 8


def test_a_tenant_pays_for_what_was_computed_not_for_what_was_predicted() -> None:
    """Two jobs of equal prediction: one ends after 10 tokens, the other after 10,000; its tenant then waits."""
    b = town(small=1)
    for name, tokens in (("acme", 10), ("globex", 10_000)):
        decision = ask(b, name, "batch", 1_000, tenant=name)
        b.hears_outcome(decision, "first_token", ttft_s=0.1)
        b.hears_outcome(decision, "finished", ttft_s=0.1, output_tokens=tokens, prompt_tokens=1_000, cached_tokens=0)
    first = ask(b, "first", "chat", 20_000)
    for n in range(3):
        ask(b, f"globex-{n}", "batch", 4_000, tenant="globex")
        ask(b, f"acme-{n}", "batch", 4_000, tenant="acme")
    b.hears_outcome(first, "first_token", ttft_s=1.6)
    went: list[str] = []
    for _ in range(3):
        (decision,) = release(b)
        went.append(decision.request)
        b.hears_outcome(decision, "first_token", ttft_s=0.4)
    assert went == ["acme-0", "acme-1", "acme-2"]


def test_a_class_that_waits_while_better_ones_never_end_has_its_turn_within_half_a_minute() -> None:
    b = town(small=1)
    decodes(b, "decoding")
    b.hears_telemetry(iterations_total=0)
    assert ask(b, "batch", "batch", 8_000).verdict == "admit"  # nothing is known of the pace yet
    waited_s = 0.0
    ask(b, "passed over", "batch", 8_000)
    gone: list[str] = []
    for second in range(40):
        b.now_s += 1.0
        waited_s += 1.0
        b.hears_telemetry(iterations_total=14.0 * (second + 1))  # 71 ms a token: the gate is closed
        chat = ask(b, f"chat-{second}", "chat", 1_000)
        gone += [decision.request for decision in release(b)]
        if chat.verdict == "admit":
            b.hears_outcome(chat, "first_token", ttft_s=0.1)
        if "passed over" in gone:
            break
    assert "passed over" in gone
    assert waited_s <= 30.0


def test_a_class_that_is_owed_its_turn_gets_what_it_is_owed_and_not_the_whole_pool() -> None:
    """Prompts that have waited long would else go to all instances at once, and chat to none."""
    b = town(small=2)
    assert len({decodes(b, f"chat-{n}").target for n in range(2)}) == 2
    b.hears_telemetry(iterations_total=0, running=1.0)
    b.now_s += 1.0
    b.hears_telemetry(iterations_total=14, running=1.0)
    assert [ask(b, f"batch-{n}", "batch", 8_000).verdict for n in range(2)] == ["queue"] * 2
    gone: list[str] = []
    for second in range(2, 40):
        b.now_s += 1.0
        b.hears_telemetry(iterations_total=14.0 * second, running=2.0)  # 71 ms a token: the gate is closed
        chat = ask(b, f"more-{second}", "chat", 1_000)
        if chat.verdict == "admit":
            b.hears_outcome(chat, "first_token", ttft_s=0.1)
        if gone := [decision.request for decision in release(b)]:
            break
    assert [name for name in gone if name.startswith("batch")] == ["batch-0"]
