"""One run from its options: what is measured, what is refused, and how the command line says it."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.sim.worlds import TINY, Announcer, Holder, Recorder, kept, row
from tokenfleet.core.accounts import Feedback
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.records import PlacementEnvelope
from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.measure import loads_of, prefill_s, quantiles
from tokenfleet.sim.pilot import model_of
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.router import Answer
from tokenfleet.sim.run import Run, RunOptions, run, window
from tokenfleet.sim.scenarios import SCENARIOS, options_of
from tokenfleet.sim.served import Served


def trace_file(folder: Path, rows: Sequence[dict[str, Any]] | None = None) -> str:
    """A Mooncake trace of 200 requests, one each 100 ms."""
    lines = rows or [
        {"timestamp": n * 100, "input_length": 1_500, "output_length": 20, "hash_ids": [n % 20, 100 + n % 20, 300 + n]}
        for n in range(200)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def ran(folder: Path, **options: Any) -> Run:
    known: dict[str, Any] = {
        "trace": options.pop("trace", None) or trace_file(folder),
        "copies": 1.0,
        "instances": 2,
        "len_s": 20.0,
        "warm_s": 5.0,
    }
    return run(RunOptions(**(known | options)), cpu_s=iter([10.0, 12.0]).__next__)


class Refuser(Recorder):
    """Refuses one request of ten."""

    def route(self, request: Request, now_s: float) -> Answer:
        answer = super().route(request, now_s)
        return Answer(request=request.id, refused="all_busy") if request.id.endswith("7") else answer


@pytest.mark.parametrize(
    ("values", "p50", "p95", "mean"),
    [
        ([1.0], 1.0, 1.0, 1.0),
        ([3.0, 1.0, 2.0, 4.0], 2.0, 4.0, 2.5),
        ([float(n) for n in range(1, 101)], 50.0, 95.0, 50.5),
        ([1.0] * 94 + [math.inf] * 6, 1.0, None, None),
        ([], None, None, None),
    ],
)
def test_percentiles_are_by_nearest_rank_and_never_hide_what_never_came(
    values: list[float], p50: float | None, p95: float | None, mean: float | None
) -> None:
    found = quantiles(values)
    assert (found.p50, found.p95, found.mean) == (p50, p95, mean)


def test_requests_that_arrive_before_the_warm_up_ends_are_served_but_not_measured(tmp_path: Path) -> None:
    result, served = ran(tmp_path).result, ran(tmp_path).served
    assert (len(served), result.measured, result.completed) == (200, 150, 150)
    assert (result.unfinished, result.rejected) == (0, 0)
    assert result.requests_per_cpu_s == 100.0  # 200 in 2 s of the processor
    assert 0.0 < result.rho_cached < result.rho
    assert sum(load.requests for load in result.loads) == 200


def test_the_window_s_throughput_counts_what_ends_in_it(tmp_path: Path) -> None:
    sizes = [(0, 30), (9_500, 5)]
    two = [{"timestamp": at, "input_length": 512, "output_length": out, "hash_ids": [at]} for at, out in sizes]
    early = ran(tmp_path, trace=trace_file(tmp_path, two), len_s=10.0, warm_s=0.0).result
    late = ran(tmp_path, trace=trace_file(tmp_path, two), len_s=10.0, warm_s=9.0).result
    assert (early.throughput_tokens_per_s, late.throughput_tokens_per_s) == (3.5, 5.0)


def test_refused_and_unfinished_requests_count_as_misses_in_every_percentile(tmp_path: Path) -> None:
    refused = ran(tmp_path, make_router=Refuser).result
    assert (refused.rejected, refused.completed, refused.measured) == (15, 135, 150)
    assert refused.ttft_s.p50 is not None
    assert refused.rho == pytest.approx(0.9 * ran(tmp_path, make_router=Recorder).result.rho)
    assert (refused.ttft_s.p95, refused.ttft_s.mean, refused.e2e_s.p99) == (None, None, None)

    class Keeper(Holder):
        wait_s = 1e9

    held = ran(tmp_path, make_router=Keeper, drain_max_s=5.0).result
    assert (held.unfinished, held.completed, held.ttft_s.p50) == (150, 0, None)


def test_the_event_delay_is_the_placements_link_and_learning_sends_lessons(tmp_path: Path) -> None:
    made: list[Recorder] = []
    ran(tmp_path, make_router=kept(made, Announcer), gateways=2, event_delay_s=0.7, learning=True)
    sent = {request.id: at_s for gateway in made for at_s, request in gateway.of(Request)}
    heard = [(at_s, envelope.events[0].request) for at_s, envelope in made[0].of(PlacementEnvelope)]
    assert heard == [(sent[request] + 0.7, request) for _, request in heard]
    assert len(heard) > 20
    assert len(made[0].of(Feedback)) > 10
    made.clear()
    ran(tmp_path, make_router=kept(made))
    assert (made[0].of(PlacementEnvelope), made[0].of(Feedback)) == ([], [])


def test_the_load_is_stand_alone_prefill_seconds_of_what_was_admitted() -> None:
    profile = replace(TINY, pair_s=1e-6)
    served = Served(id="a", row=row(0.0, prompt=100, chain=1), instance=0, cached_tokens=32)
    other = Served(id="b", row=row(0.0, prompt=100), refused="all_busy")
    [load, idle] = loads_of([served, other], profile, ["x", "y"])
    # 68 new tokens behind 32 cached ones, in two iterations
    assert load.prefill_s == pytest.approx(2 * 0.010 + 0.068 + 1e-6 * 68 * (32 + 34))
    assert (load.requests, load.cached_tokens, idle.requests) == (1, 32, 0)
    assert prefill_s(served, profile, cached_tokens=0) > load.prefill_s


def test_a_policy_s_model_computes_as_its_profile_does() -> None:
    profile = profiles()["L70"]
    model = model_of(profile)
    for tokens in (16, 70, 4_096):
        as_policy = model.c0_s + max(model.w_min_s, model.a_s * tokens)
        assert as_policy == pytest.approx(profile.step_s(prefill_tokens=tokens, pairs=0, decodes=0, context_tokens=0))
    assert model_of(profile, factor=2.0).a_s == 2.0 * model.a_s


@pytest.mark.parametrize(
    ("instances", "expected"), [(1, (700.0, 250.0)), (8, (700.0, 250.0)), (16, (500.0, 200.0)), (64, (240.0, 120.0))]
)
def test_larger_fleets_run_for_a_shorter_time(instances: int, expected: tuple[float, float]) -> None:
    assert window(RunOptions(instances=instances)) == expected
    assert window(RunOptions(instances=instances, len_s=30.0, warm_s=1.0)) == (30.0, 1.0)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"policy": "fastest"}, "no policy 'fastest'; there is: .*tokenpilot"),
        ({"profile": "H900"}, "no profile 'H900'.*L70"),
        ({"trace": "nowhere"}, "no trace 'nowhere'.*synthetic"),
        ({"instances": 0}, "--instances 0: it is 1 to 10000"),
        ({"instances": 1_000_000}, "--instances 1000000: it is 1 to 10000"),
        ({"gateways": 0}, "--gateways 0: it is 1 to 1000"),
        ({"copies": 1e9}, r"--copies 1e\+09 of the 200 requests .* at most 2,000,000"),
        ({"warm_s": 19.95}, "nothing to measure, the last request within --len 20 s arrives at 19.9 s"),
        ({"event_delay_s": -0.1}, "--event-delay -0.1: it is 0.0 or more"),
        ({"event_delay_s": math.nan}, "--event-delay nan"),
        ({"copies": 0.0}, "--copies 0: it is more than 0"),
        ({"prior_factor": -1.0}, "--prior-factor -1: it is more than 0"),
        ({"warm_s": 20.0}, "--warm 20 s must be at least 0 and less than --len 20 s"),
        ({"len_s": 0.001, "warm_s": 0.0, "copies": 0.01, "trace": "conversation"}, "no request arrives within"),
        ({"profile": "demo", "trace": "synthetic"}, "trace synthetic on demo: line .* more KV memory"),
    ],
)
def test_what_can_t_be_run_is_refused_with_a_remedy_before_it_runs(
    tmp_path: Path, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PolicyError, match=problem):
        ran(tmp_path, **({"len_s": 700.0} if options.get("profile") == "demo" else {}) | options)


def test_the_command_prints_one_object_with_all_figures(tmp_path: Path) -> None:
    arguments = ["run", "routing", "--trace", trace_file(tmp_path), "--copies", "1", "--instances", "2"]
    done = CliRunner().invoke(sim_app, [*arguments, "--len", "20", "--warm", "5", "--seed", "3", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert {"seed", "rho", "completed", "unfinished", "rejected", "hit_ratio", "throughput_tokens_per_s"} <= told.keys()
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert sorted(told[name]) == ["mean", "p50", "p95", "p99"]
    assert (told["seed"], told["policy"], told["completed"]) == (3, "tokenpilot", 150)


def test_lines_left_out_and_rows_that_come_twice_are_counted_where_the_figures_are(tmp_path: Path) -> None:
    path = Path(trace_file(tmp_path))
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, first, "{}", *others]))
    result = ran(tmp_path, trace=str(path), skip_bad=True).result
    assert (result.bad_lines, result.repeated_rows) == (1, 1)
    asked = ["run", "routing", "--trace", str(path), "--copies", "1", "--instances", "2", "--len", "20", "--warm", "5"]
    told = CliRunner().invoke(sim_app, [*asked, "--skip-bad"]).stdout
    assert "1 bad lines of the trace left out; 1 rows repeat the one before" in told


def test_the_command_s_table_names_run_and_misses(tmp_path: Path) -> None:
    arguments = ["run", "routing", "--trace", trace_file(tmp_path), "--copies", "1", "--len", "20", "--warm", "5"]
    done = CliRunner().invoke(sim_app, arguments)
    assert done.exit_code == 0, done.output
    assert "TTFT" in done.stdout
    assert "150 of 150 completed" in " ".join(done.stdout.split())
    assert done.stderr == ""  # the bar is for terminals


def test_the_list_names_all_there_is() -> None:
    told = json.loads(CliRunner().invoke(sim_app, ["list", "--json"]).stdout)
    assert told["traces"] == ["azure-code", "azure-conv", "conversation", "synthetic"]
    assert "tokenpilot" in told["policies"]
    assert told["scenarios"] == sorted(SCENARIOS)
    assert {"L70", "DSV3", "GLM5"} <= {*told["profiles"]}
    assert told["designs"] == ["at_once", "gated", "least_requests", "pools", "priority", "slomax"]
    assert "synthetic" in CliRunner().invoke(sim_app, ["list"]).stdout


def test_a_scenario_is_changed_by_the_options_given() -> None:
    assert options_of("overload", {"seed": 5}) == replace(SCENARIOS["overload"], seed=5)
    with pytest.raises(PolicyError, match="no scenario 'nothing'; there is: chat"):
        options_of("nothing", {})


def test_a_trace_of_one_s_own_is_served_as_it_is_unless_copies_are_asked_for() -> None:
    assert options_of("", {"trace": "mine.jsonl"}).copies == 1.0
    assert options_of("", {"trace": "mine.jsonl", "copies": 4.0}).copies == 4.0
    assert options_of("", {"trace": "conversation"}).copies == options_of("", {}).copies == 2.0
