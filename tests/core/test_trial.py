"""Trial: which requests count in which arm, what the judge writes, and that a restart changes nothing."""

from collections.abc import Iterable
from importlib.resources import files
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_goodput import POLICY, T0, Fleet, event, finished
from tokenfleet.core.canary import Arm
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.arms import Arms, Settled
from tokenfleet.core.goodput.trial import PROMOTED_BY, ROLLED_BACK_BY, Judge
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.records import OutcomeEvent, PlacedOn
from tokenfleet.core.revisions import CanaryReport, PolicyRecord, PolicyRevision, renumbered

SHIPPED = (files("tokenfleet.core") / "default_policy.toml").read_text()
IN_FORCE = parse_policy(SHIPPED, source="shipped")


def canary(number: int = 2, *, text: str = SHIPPED, for_s: float = 600.0) -> PolicyRevision:
    text = text.replace("revision = 1", f"revision = {number}", 1)
    return PolicyRevision(revision=number, toml=text, sha256="c" * 64, canary_share=0.1, canary_for_s=for_s)


def arms_of(*events: OutcomeEvent, since_s: float = T0) -> dict[int, Arm]:
    arms = Arms(base=1, canary=2, since_s=since_s)
    fleet = Fleet()
    fleet.partition.count_into(arms)
    fleet.hear(*events)
    return arms.of


def requests(*, bad: int = 0, of: int = 150) -> list[OutcomeEvent]:
    """`of` requests of each arm; of the canary's the first `bad` come late."""
    return [
        finished(request=f"{revision}-{n}", policy_revision=revision, ttft_s=5.0 if revision == 2 and n < bad else 0.5)
        for n in range(of)
        for revision in (1, 2)
    ]


def judge(*heard: PolicyRecord) -> Judge:
    one = Judge(IN_FORCE, SHIPPED)
    for record in heard:
        one.hear(record, at_s=T0)
    return one


def due(one: Judge, events: Iterable[OutcomeEvent], *, after_s: float) -> tuple[CanaryReport, PolicyRevision | None]:
    fleet = Fleet()
    fleet.partition.count_into(one.arms)
    fleet.hear(*events)
    standing = one.due(complete_s=T0 + after_s, at_wall_s=T0)
    assert standing is not None
    return standing


def test_a_request_counts_in_the_arm_that_decided_it() -> None:
    of = arms_of(
        finished(request="a", policy_revision=1),
        finished(request="b", policy_revision=2, ttft_s=5.0),
        event("rejected", request="c", policy_revision=2),
        event("failed", request="d", policy_revision=2, elapsed_s=1.0),
        event("cancelled", request="e", policy_revision=2, elapsed_s=0.1),
        finished(request="unknown"),
        finished(request="another", policy_revision=7),
    )
    assert (of[1].requests, of[1].met, of[1].offered) == (1, {"chat": 1}, {"chat": 1})
    assert (of[2].requests, of[2].failed, of[2].met, of[2].offered) == (4, 1, {"chat": 0}, {"chat": 3})


def test_a_request_that_arrived_before_the_trial_does_not_count() -> None:
    early, late = finished(at_s=1.0, elapsed_s=1.5, request="a", policy_revision=1), finished(policy_revision=1)
    assert arms_of(early, late)[1].requests == 1


def test_a_retry_that_succeeds_takes_the_failure_back() -> None:
    first = event("failed", policy_revision=2)
    assert arms_of(first)[2].failed == 1
    again = arms_of(first, finished(at_s=2.0, attempt=1, elapsed_s=2.0, policy_revision=2))[2]
    assert (again.requests, again.failed, again.met) == (1, 0, {"chat": 1})
    open_again = arms_of(first, event("started", at_s=2.0, attempt=1, policy_revision=2, elapsed_s=2.0))[2]
    assert (open_again.requests, open_again.failed) == (0, 0)


def test_requests_in_memory_count_when_a_trial_is_heard_of_after_them() -> None:
    arms, fleet = Arms(base=1, canary=2, since_s=T0), Fleet()
    fleet.hear(*requests(of=5))
    fleet.partition.count_into(arms)
    assert {revision: arm.requests for revision, arm in arms.of.items()} == {1: 5, 2: 5}


@given(st.randoms(use_true_random=False))
def test_any_order_and_any_repeats_give_the_same_counts(rng: Random) -> None:
    events = requests(bad=3, of=6)
    events += [event("failed", request=f"2-{n}", at_s=0.5, elapsed_s=0.5, policy_revision=2) for n in range(3)]
    shuffled = [*events, *rng.choices(events, k=8)]
    rng.shuffle(shuffled)
    assert arms_of(*shuffled) == arms_of(*events)


def test_a_worse_canary_is_rolled_back_to_the_file_before_it_under_the_next_number() -> None:
    one = judge(canary())
    report, end = due(one, requests(bad=120), after_s=60.0)
    assert end is not None
    assert (report.verdict, end.by, end.revision, end.is_canary) == ("rolled_back", ROLLED_BACK_BY, 3, False)
    assert end.toml == SHIPPED.replace("revision = 1", "revision = 3", 1)
    assert end.reason == f"canary revision 2 rolled back: {report.reason}"
    assert "chat within service level 20.0% of 150, 100.0% of 150" in end.reason
    assert (report.canary.requests, report.canary.classes["chat"].met) == (150, 30)
    one.hear(end, at_s=T0 + 61.0)
    assert (one.policy.revision, one.arms, one.due(complete_s=T0 + 62.0, at_wall_s=T0)) == (3, None, None)


def test_one_no_worse_is_promoted_when_its_time_is_over() -> None:
    one = judge(canary())
    assert due(one, requests(), after_s=599.0)[1] is None
    report, end = due(one, requests(), after_s=600.0)
    assert end is not None
    assert (report.verdict, end.by, end.revision, end.is_canary) == ("promoted", PROMOTED_BY, 2, False)
    one.hear(end, at_s=T0 + 601.0)
    assert one.policy.revision == 2


def test_a_verdict_stands_until_it_is_in_the_log() -> None:
    one = judge(canary())
    first = due(one, requests(bad=120), after_s=60.0)
    assert due(one, requests(), after_s=600.0) == first


def test_another_life_of_the_judge_goes_on_where_the_log_is() -> None:
    before = due(judge(canary()), requests(bad=10), after_s=300.0)
    assert due(judge(canary()), requests(bad=10), after_s=300.0) == before
    up = due(judge(canary()), requests(), after_s=600.0)[1]
    assert up is not None
    for log in ([canary(), up], [up, canary()], [canary(), up, canary(), up]):
        after = judge(*log)
        assert (after.policy.revision, after.arms) == (2, None)


def test_a_canary_that_no_replica_takes_is_ended_with_the_reason() -> None:
    lacks = SHIPPED.replace("[tenants.globex]", "[tenants.initech]")
    report, end = due(judge(canary(text=lacks)), [], after_s=0.0)
    assert end is not None
    assert "tenants lack 'globex'" in report.reason
    assert "nonsense" in due(judge(canary(text=SHIPPED + "[nonsense]\n")), [], after_s=0.0)[0].reason


def test_a_revision_that_can_not_be_used_changes_nothing() -> None:
    one = judge(canary())
    with pytest.raises(PolicyError, match="nonsense"):
        one.hear(PolicyRevision(revision=3, toml="nonsense = 1", sha256=""), at_s=T0)
    assert one.policy is IN_FORCE
    assert one.arms is not None


def test_another_revision_in_force_is_the_other_arm_from_then_on() -> None:
    one = judge(canary(5))
    arms = one.arms
    one.hear(canary(5), at_s=T0 + 1.0)
    assert one.arms is arms, "heard again it goes on"
    four = renumbered(SHIPPED + "\n[tokenpilot]\nmargin_weight = 0.25\n", 4)
    one.hear(PolicyRevision(revision=4, toml=four, sha256=""), at_s=T0)
    assert one.arms is not None
    assert set(one.arms.of) == {4, 5}
    bad = [
        finished(request=f"{revision}-{n}", policy_revision=revision, ttft_s=0.5 if revision == 4 else 5.0)
        for n in range(150)
        for revision in (4, 5)
    ]
    end = due(one, bad, after_s=60.0)[1]
    assert end is not None
    assert end.toml == renumbered(four, 6), "back to the file in force, not to the first"


def test_a_settled_request_that_opens_again_leaves_its_arm_as_it_was() -> None:
    arms = Arms(base=1, canary=2, since_s=T0)
    settled = Settled(2, T0, "chat", "finished", "met", 0.5)
    for word in (settled, settled, None, None):
        arms.hear(("acme", "r"), word)
    assert arms.of[2].requests == 0
    assert not any(arms.of[2].ttft.values())
    assert POLICY.revision == 1


def arms_after(seconds: float, *events: OutcomeEvent, late: bool = False) -> dict[int, Arm]:
    """The arms when the log is complete up to `seconds` after the trial's beginning; `late`: heard of after that."""
    arms, fleet = Arms(base=1, canary=2, since_s=T0), Fleet()
    if not late:
        fleet.partition.count_into(arms)
    clock = [event("progress", request="clock", at_s=seconds + 5.0, elapsed_s=0.0, decision="", policy_revision=9)]
    for source in ("b", "c"):
        fleet.hear(*(events if source == "b" else ()), *clock, source=source)
    fleet.publish()
    if late:
        fleet.partition.count_into(arms)
    return arms.of


def started(**facts: Any) -> OutcomeEvent:
    """One that arrived at 1 s and has gone to its instance at once."""
    known: dict[str, Any] = {"elapsed_s": 0.0, "policy_revision": 2}
    return event("started", **(known | facts))


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_hangs_counts_as_missed_once_its_level_can_not_be_met(late: bool) -> None:
    assert arms_after(2.0, started(), late=late)[2].offered == {}
    hung = arms_after(10.0, started(), late=late)[2]
    assert (hung.requests, hung.open, hung.failed, hung.offered, hung.met) == (1, 1, 0, {"chat": 1}, {"chat": 0})


def test_what_is_still_within_its_level_or_has_none_does_not_count_while_it_is_open() -> None:
    first_token = event("first_token", at_s=1.5, elapsed_s=0.5, policy_revision=2)
    assert arms_after(60.0, started(), first_token)[2].requests == 0  # how long its tokens take shows at its end
    assert arms_after(60.0, started(request_class="free"))[2].requests == 0
    assert arms_after(60.0, started(request_class="batch"))[2].requests == 0
    assert arms_after(110.0, started(request_class="batch"))[2].open == 1
    known = PlacedOn(uncached_tokens=30_000)
    assert arms_after(20.0, started(request_class="long", placed=known))[2].open == 0  # 36 s for its prompt
    assert arms_after(40.0, started(request_class="long", placed=known))[2].open == 1


def test_a_hung_request_that_ends_after_all_counts_once() -> None:
    end = finished(at_s=30.0, elapsed_s=29.0, ttft_s=28.0, policy_revision=2)
    arm = arms_after(60.0, started(), end)[2]
    assert (arm.requests, arm.open, arm.offered, arm.met) == (1, 0, {"chat": 1}, {"chat": 0})


def test_a_canary_under_which_requests_hang_is_rolled_back() -> None:
    one = judge(canary())
    fleet = Fleet()
    fleet.partition.count_into(one.arms)
    good = [finished(request=f"1-{n}", policy_revision=1) for n in range(150)]
    good += [finished(request=f"2-{n}", policy_revision=2) for n in range(150)]
    hung = [started(request=f"2-hung-{n}") for n in range(60)]
    for source in ("b", "c"):
        clock = event("progress", request="clock", at_s=60.0, elapsed_s=0.0, decision="", policy_revision=9)
        fleet.hear(*((*good, *hung) if source == "b" else ()), clock, source=source)
    fleet.publish()
    standing = one.due(complete_s=T0 + 50.0, at_wall_s=T0)
    assert standing is not None
    report, end = standing
    assert (report.verdict, report.canary.open, report.base.open) == ("rolled_back", 60, 0)
    assert end is not None
    assert "chat within service level 71.4% of 210" in report.reason
