"""Bench: every measure runs, on a site that is what it claims to be, and stands beside its goal."""

import json

import pytest
from rich.console import Console

from tests.test_cli import complaint, tokenfleet
from tokenfleet.core.asked import ROUTE, Ids
from tokenfleet.core.schedule import decide
from tokenfleet.local.bench.command import bench_table
from tokenfleet.local.bench.run import PARTS, Figure, Report
from tokenfleet.local.bench.site import MODEL, PROMPTS, BenchSite, prompts_of

NOW_S = 1000.0


def test_the_site_is_busy_warm_and_fresh() -> None:
    bench = BenchSite(200, now_s=NOW_S)
    view = bench.site.pool(MODEL, NOW_S + 0.5, bench.request(0))
    holders = [each for each in view.instances if each.hit_tokens]
    assert len(view.instances) == 200
    assert len(holders) == 200 // PROMPTS
    assert len({each.hit_tokens for each in holders}) > 10  # to different depths
    assert {each.kv_state for each in holders} == {"exact"}
    assert sum(each.queued for each in view.instances) > 100
    assert not any(each.suspect for each in view.instances)
    bench.hears_telemetry(NOW_S + 3.0)
    later = bench.site.pool(MODEL, NOW_S + 3.0, bench.request(0))
    assert sum(each.hit_tokens for each in later.instances) == sum(each.hit_tokens for each in holders)  # no doubt
    assert bench.prompts == prompts_of()


def test_what_is_measured_is_an_admitted_decision_with_all_evidence() -> None:
    bench = BenchSite(200, now_s=NOW_S)
    decision = decide(bench.site, bench.request(0), ROUTE, Ids(decision="d", now_wall_s=1.0), now_s=NOW_S).decision
    assert (decision.verdict, decision.mode, len(decision.candidates)) == ("admit", "fresh", 8)


@pytest.mark.integration
def test_every_measure_runs_and_is_told_with_its_goal() -> None:
    done = tokenfleet("bench", "--quick", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    figures = report["figures"]
    assert {each["part"] for each in figures} == set(PARTS)
    assert all(each["value"] > 0.0 for each in figures)
    assert [each["goal"] for each in figures if each["name"].startswith("RouteStream")] == [160.0]
    assert all((each["met"] is None) == (each["goal"] is None) for each in figures)


def test_a_part_that_there_is_not_is_told_with_the_list() -> None:
    assert complaint("bench", "--only", "all") == "--only: 'all' is none of choose, kv, memory, calls"


def test_a_goal_is_met_from_its_own_side() -> None:
    facts = {"part": "kv", "name": "n", "unit": "µs", "goal": 2.0}
    figures = [Figure(value=value, at_most=most, **facts) for value in (1.0, 3.0) for most in (True, False)]  # pyright: ignore[reportArgumentType]  # facts of several types
    assert [each.met for each in figures] == [True, False, False, True]
    report = Report(figures=tuple(figures), python="3", cpus=1, load_before=0.0, compiled=True)
    for quick, missed in ((False, 2), (True, 0)):
        console = Console(width=200)
        with console.capture() as told:
            console.print(bench_table(report, quick=quick))
        assert told.get().count("missed") == missed
        assert ("too little to judge by" in told.get()) == quick
