"""The feasibility gate in decisions: what teaches it, whom it refuses, whom it lets wait, and how it stops."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.builders import first_token, placements
from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ADMIT, ROUTE
from tokenfleet.core.decision import Decision
from tokenfleet.core.schedule import released
from tokenfleet.core.site import Heard
from tokenfleet.core.slomax.feasible import Ahead
from tokenfleet.core.slomax.terms import GatePolicy

LATE: dict[str, Any] = {"elapsed_s": 1.9}  # of the 2 s that chat has until its first token


def gated(*, small: int = 1, **terms: Any) -> Town:
    """A site whose policy asks the gate."""
    town = Town("b", small=small)
    known: dict[str, Any] = {"enabled": True, "probe_share": 0.0}
    gate = GatePolicy(**(known | terms))
    town.site.adopt(replace(town.site.policy, slomax=replace(town.site.policy.slomax, gate=gate)))
    return town


def taught(town: Town, *ratios: float) -> Town:
    """Its gate saw first tokens take these times their prediction, by its own gateways' reports."""
    for n, ratio in enumerate(ratios):
        decision = town.place(asked(f"past-{n}"), steps=ROUTE)
        assert decision.predicted_ttft_s is not None
        lasted_s = ratio * decision.predicted_ttft_s
        town.hears_outcome(decision, "first_token", attempt_s=lasted_s)
        town.hears_outcome(decision, "finished", attempt_s=lasted_s, ttft_s=lasted_s, output_tokens=1)
    return town


def said(decision: Decision) -> str:
    assert decision.admission is not None
    return decision.admission.gate


def test_a_policy_that_does_not_ask_the_gate_refuses_nobody_for_it() -> None:
    b = gated(enabled=False)
    taught(b, *[5.0] * 40)
    decision = b.decide(asked("r", **LATE)).decision
    assert (decision.verdict, said(decision)) == ("admit", "")


def test_who_would_most_likely_be_late_is_refused_with_chance_and_words() -> None:
    b = taught(gated(), *[5.0] * 40)
    refused = b.decide(asked("r", **LATE))
    assert (refused.decision.verdict, refused.decision.reason) == ("reject", "infeasible")
    assert refused.decision.admission is not None
    assert refused.decision.admission.chance == pytest.approx(1 / 41)
    assert refused.decision.admission.gate_why in refused.decision.sentence
    assert refused.outcome is not None
    assert said(b.decide(asked("r")).decision) == "pass"  # with all of its time left


def test_the_same_prediction_passes_where_outcomes_were_quick() -> None:
    decision = taught(gated(), *[0.5] * 40).decide(asked("r", **LATE)).decision
    assert (decision.verdict, said(decision)) == ("admit", "pass")


def test_between_it_waits_where_its_gateway_can_and_runs_where_not() -> None:
    b = taught(gated(), *[0.5] * 14, *[5.0] * 26)  # in time with a chance of a third
    at_once = b.decide(asked("r", **LATE)).decision
    assert (at_once.verdict, said(at_once)) == ("admit", "queue")
    assert b.decide(asked("s", wait_max_s=5.0)).decision.verdict == "admit"
    held = b.decide(asked("r", wait_max_s=5.0, **LATE)).decision
    assert (held.verdict, said(held)) == ("queue", "queue")


def test_it_waits_in_the_queue_of_its_class_too_and_is_not_judged_again_in_its_turn() -> None:
    b = taught(gated(), *[0.5] * 14, *[5.0] * 26)
    slomax = b.site.policy.slomax
    b.site.adopt(replace(b.site.policy, slomax=replace(slomax, pacing=replace(slomax.pacing, enabled=True))))
    assert b.decide(asked("r", wait_max_s=5.0, **LATE)).decision.verdict == "queue"
    taught(b, *[5.0] * 200)  # by now it would be refused
    [(_, answer)] = released(b.site, "small-chat", b.now_s, b.ids)
    assert not isinstance(answer, Exception)
    assert (answer.decision.verdict, said(answer.decision)) == ("admit", "")


def test_first_tokens_that_other_replicas_tell_of_teach_it_too() -> None:
    b = gated()
    events = [first_token(f"x{n}", "b-small-0", predicted_ttft_s=0.1, age_s=5.0, model="small-chat") for n in range(40)]
    b.site.heard(placements(*events, replica="1"), Heard(now_s=b.now_s))
    assert b.decide(asked("r", **LATE)).decision.reason == "infeasible"


def test_its_own_placements_read_back_and_a_report_sent_twice_teach_nothing_more() -> None:
    b = gated()
    decision = b.place(asked("r0"))
    for _ in range(40):
        b.hears_outcome(decision, "first_token", attempt_s=50.0)
    events = [first_token(f"x{n}", "b-small-0", predicted_ttft_s=0.1, age_s=5.0) for n in range(40)]
    b.site.heard(placements(*events, replica="0"), Heard(now_s=b.now_s))
    assert b.decide(asked("r", **LATE)).decision.reason == ""


def test_a_deadline_that_a_prediction_misses_refuses_nobody_before_outcomes_say_so_but_one_that_is_over_does() -> None:
    tight = asked("r", deadline_s=0.15, max_tokens=10)
    assert gated(enabled=False).decide(tight, steps=ADMIT).decision.reason == "infeasible"
    b = gated()
    early = b.decide(tight, steps=ADMIT).decision
    assert (early.verdict, said(early)) == ("admit", "queue")
    over = b.decide(replace(tight, elapsed_s=0.16), steps=ADMIT).decision
    assert (over.reason, said(over)) == ("infeasible", "")
    taught(b, *[1.0] * 40)
    assert said(b.decide(tight, steps=ADMIT).decision) == "reject"


def test_what_is_held_and_as_urgent_lies_ahead() -> None:
    b = taught(gated(enabled=False), *[1.0] * 40)
    slomax = b.site.policy.slomax
    b.site.adopt(replace(b.site.policy, slomax=replace(slomax, pacing=replace(slomax.pacing, enabled=True))))
    b.place(asked("running", prompt_tokens=30_000), steps=ROUTE)
    for n in range(8):
        b.decide(asked(f"held-{n}", prompt_tokens=4000, wait_max_s=60.0))
    assert len(b.site.held) == 8
    classes = b.site.policy.classes
    ahead_s = b.site.held.ahead_s("small-chat", "chat", classes)
    assert ahead_s > 1.0
    assert b.site.held.ahead_s("small-chat", "batch", classes) == ahead_s
    later = {**classes, "chat": replace(classes["chat"], rank=5)}
    assert b.site.held.ahead_s("small-chat", "batch", later) == 0.0
    gate = replace(slomax.gate, enabled=True)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, gate=gate)))
    assert b.decide(asked("r", wait_max_s=60.0)).decision.reason == "infeasible"
    assert b.decide(asked("r", task="batch", deadline_s=900.0, wait_max_s=60.0)).decision.verdict == "queue"


def test_probes_that_are_in_time_stop_it_and_that_shows_in_the_evidence_and_as_an_alarm() -> None:
    b = taught(gated(probe_share=1.0), *[5.0] * 40)
    for n in range(50):
        probe = b.place(asked(f"p{n}", **LATE))
        assert (probe.verdict, said(probe)) == ("admit", "probe")
        assert b.site.gates.refusing_nobody() == {}
        b.hears_outcome(probe, "finished", ttft_s=1.95, output_tokens=5)
    why = b.site.gates.refusing_nobody()["small-chat"]
    assert "100% of 50" in why
    decision = b.decide(asked("r", **LATE)).decision
    assert (decision.verdict, said(decision)) == ("admit", "queue")
    assert decision.admission is not None
    assert why in decision.admission.gate_why


def test_a_retry_of_what_was_let_in_and_failed_is_not_refused_for_being_late_but_who_was_refused_is() -> None:
    b = taught(gated(), *[5.0] * 40)
    b.hears_outcome(b.place(asked("r")), "failed")
    again = b.decide(asked("r", attempt=1, elapsed_s=3.0)).decision
    assert (again.verdict, said(again)) == ("admit", "")
    assert b.decide(asked("s", elapsed_s=3.0)).decision.reason == "infeasible"
    assert b.decide(asked("s", attempt=1, elapsed_s=3.0)).decision.reason == "infeasible"


def test_who_leaves_in_time_says_nothing_of_the_gate() -> None:
    b = taught(gated(probe_share=1.0, probes_min=1), *[5.0] * 40)
    b.hears_outcome(b.place(asked("p", **LATE)), "cancelled")
    assert b.site.gates.of("small-chat").false_reject_share is None


def test_a_pool_that_the_policy_no_longer_has_is_forgotten_and_new_terms_are_followed() -> None:
    b = taught(gated(), *[5.0] * 40)
    assert b.decide(asked("r", **LATE)).decision.reason == "infeasible"
    lenient = replace(b.site.policy.slomax.gate, reject_chance=0.0)
    b.site.adopt(replace(b.site.policy, slomax=replace(b.site.policy.slomax, gate=lenient)))
    assert said(b.decide(asked("r", **LATE)).decision) == "queue"
    models = {"large-chat": b.site.policy.models["large-chat"]}
    kept = b.site.policy
    b.site.adopt(replace(kept, models=models))
    b.site.adopt(kept)
    assert b.site.gates.of("small-chat").judge("r", Ahead(wait_s=0.0, prefill_s=1.0, ttft_max_s=2.0)).chance is None
