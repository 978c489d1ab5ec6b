"""Site: facts in, one joined view out."""

from collections import Counter

from tests.core.fleets import Town, asked


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
    burst = Counter(b.place(asked(f"r{n}", tenant="globex")).target for n in range(200))
    assert max(burst.values()) <= 75


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


def test_a_pool_whose_agent_is_silent_still_answers_marked_stale() -> None:
    b = Town("b", small=1)
    b.now_s += 30.0
    decision = b.decide(asked("r1")).decision
    assert (decision.verdict, decision.target, decision.mode) == ("admit", "b-small-0", "stale")
    assert decision.age_s is not None
    assert 30.0 <= decision.age_s <= 30.2


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
