"""Site: facts in, one joined view out."""

import itertools
import math
from collections import Counter
from importlib.resources import files

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import Histogram
from tokenfleet.core.revisions import PolicyRevision
from tokenfleet.core.site import Heard

SHIPPED = (files("tokenfleet.core") / "default_policy.toml").read_text()


def loads(town: Town) -> dict[str, int]:
    pool = town.site.pool("small-chat", town.now_s)
    return {view.instance: view.queued + view.decoding for view in pool.instances}


def test_a_placement_counts_until_its_end_whoever_ends_it_how_often() -> None:
    b = Town("b", small=1)
    decisions = [b.place(asked(f"r{n}")) for n in range(3)]
    assert loads(b) == {"b-small-0": 3}
    b.hears_outcome(decisions[0], "timed_out")
    b.hears_outcome(decisions[1], "cancelled")
    for _ in range(3):
        b.hears_outcome(decisions[2], "finished", output_tokens=5)
    assert loads(b) == {"b-small-0": 0}


def test_health_and_telemetry_never_zero_running_work() -> None:
    b = Town("b", small=1)
    for n in range(50):
        b.place(asked(f"r{n}"))
    b.now_s += 5.0
    for _ in range(20):
        b.hears_telemetry(running=50.0)
    b.hears_telemetry(scrape_failed_for_s=1.0, running=None, waiting=None)
    b.hears_telemetry(running=50.0)
    assert loads(b) == {"b-small-0": 50}


def test_a_burst_on_one_snapshot_does_not_herd() -> None:
    b = Town("b", small=4)
    chat = replace(b.site.policy.classes["chat"], running_max_per_instance=200, backlog_max_s=60.0)
    b.site.adopt(replace(b.site.policy, classes={**b.site.policy.classes, "chat": chat}))
    burst: Counter[str] = Counter()
    for n in range(400):
        b.now_s += 0.05 / 400
        burst[b.place(asked(f"r{n}", tenant="globex")).target] += 1
    assert sum(burst.values()) == 400
    assert max(burst.values()) <= 150


def test_sequential_requests_spread_over_idle_instances() -> None:
    b = Town("b", small=3)
    chosen: Counter[str] = Counter()
    for n in range(300):
        decision = b.place(asked(f"r{n}"))
        chosen[decision.target] += 1
        b.hears_outcome(decision, "finished", output_tokens=1)
    assert all(80 <= count <= 120 for count in chosen.values()), chosen


def test_a_draining_instance_gets_no_new_work_and_can_come_back() -> None:
    b = Town("b", small=2)
    b.hears_control("b-small-0", "draining")
    assert {b.place(asked(f"r{n}")).target for n in range(20)} == {"b-small-1"}
    b.hears_control("b-small-0", "ready")
    assert {b.place(asked(f"s{n}")).target for n in range(40)} == {"b-small-0", "b-small-1"}


def test_a_pool_of_one_that_nobody_reports_on_for_30_s_is_served_from_all_along_and_says_how_old_it_is() -> None:
    b = Town("b", small=1)
    for second in range(1, 31):
        b.now_s += 1.0
        decision = b.place(asked(f"r{second}"))
        fresh = second + 0.1 <= b.site.policy.liveness.fresh_max_s
        assert (decision.verdict, decision.target) == ("admit", "b-small-0")
        assert decision.mode == ("fresh" if fresh else "stale")
        assert decision.age_s == pytest.approx(second + 0.1)
        b.hears_outcome(decision, "finished", output_tokens=1)
    b.hears_telemetry()
    assert b.decide(asked("back")).decision.mode == "fresh"


def test_when_all_instances_are_suspect_all_are_candidates() -> None:
    b = Town("b", small=2)
    b.hears_telemetry(agent_silent_s=11.0)
    decisions = [b.decide(asked(f"r{n}")).decision for n in range(30)]
    assert {decision.mode for decision in decisions} == {"stale"}
    assert {decision.target for decision in decisions} == {"b-small-0", "b-small-1"}


def test_an_instance_that_refuses_connections_is_out() -> None:
    b = Town("b", small=1)
    b.hears_telemetry(refused=True)
    decision = b.decide(asked("r1", cross_site=False)).decision
    assert (decision.verdict, decision.reason) == ("reject", "no_instances")


def test_an_instance_whose_requests_fail_is_held_back() -> None:
    b = Town("b", small=2)
    for n in range(40):
        decision = b.place(asked(f"r{n}"))
        b.hears_outcome(decision, "failed" if decision.target == "b-small-0" else "finished", output_tokens=1)
    assert {b.place(asked(f"s{n}")).target for n in range(20)} == {"b-small-1"}


def test_an_outcome_carries_what_the_decision_believed() -> None:
    b = Town("b", small=1)
    decision = b.place(asked("r1"))
    event = b.hears_outcome(decision, "first_token", ttft_s=0.2)
    assert event.placed is not None
    assert event.predicted_ttft_s == decision.predicted_ttft_s


def test_a_session_stays_on_its_instance_without_a_reason_to_leave() -> None:
    b = Town("b", small=3)
    targets: set[str] = set()
    for n in range(20):
        decision = b.place(asked(f"r{n}", session="talk"))
        b.hears_outcome(decision, "finished", output_tokens=1)
        targets.add(decision.target)
    assert len(targets) == 1


def test_a_session_belongs_to_its_tenant() -> None:
    b = Town("b", small=1)
    b.place(asked("r1", session="talk"))
    assert b.site.sessions.last("acme", "talk") == "b-small-0"
    assert b.site.sessions.last("globex", "talk") == ""


def test_an_idle_site_whose_averages_are_zero_by_zero_is_seen_as_idle() -> None:
    b = Town("b", small=2)
    for _ in range(10):
        b.now_s += 1.0
        b.hears_telemetry(running=0.0, in_flight_tokens=math.nan, ttft=Histogram(sum_s=math.nan, count=0.0))
    (view, *_), summary = b.site.pool("small-chat", b.now_s).instances, b.summary().pools[0]
    assert (view.availability, view.suspect, view.queued, view.decoding) == ("ready", False, 0, 0)
    assert (summary.ready, summary.seats.used, summary.kv.used, summary.waits_s) == (2, 0.0, 0.0, (0.0, 0.0))
    beat = b.site.capacity.rows()[0].beat
    assert (beat.running, beat.in_flight_tokens, beat.ttft) == (0.0, None, None)
    assert b.decide(asked("r1")).decision.verdict == "admit"


def test_an_instance_that_tells_no_kv_use_is_unknown_and_not_empty() -> None:
    """Beside two that say how full they are it is not the one that all requests go to."""
    b = Town("b", small=3)
    for name in ("b-small-0", "b-small-1"):
        b.changes(name, kv_used_blocks=7400.0)
    b.changes("b-small-2", kv_used_blocks=None, kv_total_blocks=None)
    b.hears_telemetry()
    costs = {c.instance: c.kv_s for c in b.decide(asked("r1")).decision.candidates}
    assert costs["b-small-2"] == pytest.approx(costs["b-small-0"])
    assert costs["b-small-2"] > 0.1


def test_a_rolling_update_always_has_its_ready_instance_chosen_in_any_order_of_events() -> None:
    before = {"b-small-0": "ready", "b-small-1": "starting"}
    after = {"b-small-0": "draining", "b-small-1": "ready"}
    for told in itertools.permutations((before, after, after, before), 3):
        b = Town("b", small=2)
        for states in told:
            for name, state in states.items():
                b.changes(name, state=state)
            b.hears_telemetry()
            chosen = {b.decide(asked(f"r{n}")).decision.target for n in range(20)}
            assert chosen == {name for name, state in states.items() if state == "ready"}


@pytest.mark.parametrize("off_s", [-150.0, 150.0, -1.6e9, 1.6e9])
def test_an_agent_whose_clock_is_wrong_changes_no_decision_and_its_silence_is_heard(off_s: float) -> None:
    """Its wall clock only labels; what a silent agent stamped, past or future, keeps nobody alive."""
    b, right = Town("b", small=2), Town("b", small=2)
    for _ in range(30):
        for town, wall_s in ((b, 1.8e9 + off_s), (right, 1.8e9)):
            town.now_s += 1.0
            town.hears_telemetry(scraped_wall_s=wall_s + town.now_s)
        assert b.decide(asked("r1")).decision == right.decide(asked("r1")).decision
    limit_s = b.site.policy.liveness.agent_silent_max_s
    for silent_s, suspect in ((limit_s - 0.5, False), (limit_s + 0.5, True)):
        b.hears_telemetry(scraped_wall_s=1.8e9 + off_s + 150.0, agent_silent_s=silent_s)
        assert {view.suspect for view in b.site.pool("small-chat", b.now_s).instances} == {suspect}


def test_a_failure_reported_again_and_again_is_one_failure() -> None:
    b = Town("b", small=2)
    decision = b.place(asked("r1"))
    for _ in range(50):
        b.hears_outcome(decision, "failed")
    assert {b.decide(asked(f"s{n}")).decision.target for n in range(30)} == {"b-small-0", "b-small-1"}


def test_failures_of_an_instance_that_nobody_lists_take_no_memory() -> None:
    b = Town("b", small=1)
    decision = b.place(asked("r1"))
    for n in range(100):
        b.hears_outcome(replace(decision, id=f"d{n}", target=f"made-up-{n}"), "failed")
    assert len(b.site.failures) == 0


def test_another_life_of_an_instance_starts_without_the_failures_of_the_last() -> None:
    b = Town("b", small=2)
    for n in range(40):
        decision = b.place(asked(f"r{n}"))
        b.hears_outcome(decision, "failed" if decision.target == "b-small-0" else "finished")
    assert {b.decide(asked(f"s{n}")).decision.target for n in range(20)} == {"b-small-1"}
    b.changes("b-small-0", boot="boot-2")
    b.hears_telemetry()
    assert {b.decide(asked(f"t{n}")).decision.target for n in range(40)} == {"b-small-0", "b-small-1"}


def revision(b: Town, number: int, *, sites: tuple[str, ...] = ("a", "b", "c", "d"), **changed: str) -> PolicyRevision:
    """The shipped policy under another number, with keys of [liveness], [ledger] and [fleetmind] changed."""
    tables = "".join(f"[{table}]\n{line}\n" for table, line in changed.items())
    dropped = {s for s in b.site.policy.sites if s not in sites}
    text = SHIPPED.replace("revision = 1", f"revision = {number}")
    for site in dropped:
        text = text.replace(f"[sites.{site}]", f"[sites.x{site}]").replace(f" {site} = ", f" x{site} = ")
    return PolicyRevision(revision=number, toml=text + "\n" + tables, sha256="f" * 64)


def test_a_new_policy_is_followed_by_every_table_at_once() -> None:
    b = Town("b", small=2)
    b.site.heard(
        revision(
            b,
            2,
            liveness="failures_in_a_row = 1\nout_first_s = 3.0",
            ledger="silent_max_s = 5.0\ncorrection_beats = 1",
            fleetmind="sends_kept_s = 1.0",
        ),
        Heard(now_s=b.now_s),
    )
    assert b.site.policy.revision == 2
    decision = b.place(asked("r1"))
    b.hears_outcome(decision, "failed")
    held = {view.instance for view in b.site.pool("small-chat", b.now_s).instances if view.availability == "out"}
    assert held == {decision.target}
    b.place(asked("r2"))
    for _ in range(7):
        b.site.advance(0, b.now_s, live=True)
        b.now_s += 1.0
    b.site.advance(0, b.now_s, live=True)
    assert len(b.site.ledger) == 0
    assert b.site.corrections.policy == b.site.policy.ledger
    assert b.site.sends.kept_s == 1.0


def test_a_policy_without_this_site_is_refused_and_the_one_in_force_stays() -> None:
    b = Town("b", small=1)
    with pytest.raises(PolicyError, match="no site 'b'"):
        b.site.heard(revision(b, 2, sites=("a", "c", "d")), Heard(now_s=b.now_s))
    assert b.site.policy.revision == 1
    assert b.decide(asked("r1")).decision.verdict == "admit"


def test_a_site_that_a_new_policy_drops_is_forgotten() -> None:
    b, c = Town("b"), Town("c", small=1)
    b.hears_summary_of(c)
    assert b.site.peers.summary("c") is not None
    b.site.heard(revision(b, 2, sites=("a", "b", "d")), Heard(now_s=b.now_s))
    assert b.site.peers.summary("c") is None
