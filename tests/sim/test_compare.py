"""Comparing: which runs are made, what is kept, what the table and the page say."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
from typer.testing import CliRunner

from tokenfleet.core.errors import PolicyError, SetupError
from tokenfleet.core.records import CapacityShard
from tokenfleet.sim import compare as comparing
from tokenfleet.sim import page as paging
from tokenfleet.sim import runs as running
from tokenfleet.sim.baselines.blind import LeastStale
from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.compare import BOUNDS, Cell, Job, Requests, cell_of, file_name, routing_runs
from tokenfleet.sim.compare_command import jobs_of, policies_of, seeds_of
from tokenfleet.sim.compare_words import percent, seconds
from tokenfleet.sim.compared import Span, compared, span
from tokenfleet.sim.measure import Quantiles
from tokenfleet.sim.page import check_report, write_report
from tokenfleet.sim.pictures import reuse_of
from tokenfleet.sim.policies import policy_named
from tokenfleet.sim.report import report
from tokenfleet.sim.router import Record
from tokenfleet.sim.run import RunOptions, run
from tokenfleet.sim.runs import Runs
from tokenfleet.sim.tuned import GRIDS, grid_of, tried

SHORT = RunOptions(trace="synthetic", copies=1.0, instances=2, len_s=20.0, warm_s=5.0)


def quantiles(p50: float | None, p95: float | None) -> Quantiles:
    return Quantiles(p50=p50, p95=p95, p99=p95, mean=p50)


def cell(policy: str, seed: int, p50: float | None = 1.0, p95: float | None = 2.0, *, scenario: str = "s") -> Cell:
    """A cell of two requests, of which the second is measured."""
    ttft = quantiles(p50, p95)
    return Cell(
        scenario=scenario,
        policy=policy,
        seed=seed,
        warm_s=5.0,
        len_s=40.0,
        instances=2,
        rho=0.5,
        measured=1,
        lost=0 if p95 is not None else 1,
        ttft_s=ttft,
        tpot_s=ttft,
        e2e_s=ttft,
        hit_ratio=0.25,
        throughput_tokens_per_s=10.0,
        loads=(),
        requests=Requests(
            at_s=[1.0, 6.0],
            instance=[0, 1],
            prompt_tokens=[100, 100],
            cached_tokens=[100, 10],
            available_tokens=[100, 30],
            captured_tokens=[100, 20],
            ttft_s=[9.0, p50],
            tpot_s=[0.1, 0.1],
            e2e_s=[10.0, p95],
        ),
    )


@dataclass
class Maker:
    """Instead of the simulator: cells in an instant, and which were asked for."""

    made: list[tuple[str, int]] = field(default_factory=list)
    broken_after: int = 10**6

    def __call__(self, job: Job) -> Cell:
        if len(self.made) >= self.broken_after:
            raise KeyboardInterrupt
        self.made.append((job.options.policy, job.options.seed))
        return cell(job.options.policy, job.options.seed, scenario=job.scenario)


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Maker:
    of = Maker()
    monkeypatch.setattr(comparing, "cell_of", of)
    return of


def jobs(policies: Iterable[str] = ("a", "b"), seeds: Sequence[int] = (1, 2)) -> list[Job]:
    return jobs_of("s", SHORT, policies, seeds)


def test_cells_come_in_the_order_of_their_jobs_and_are_told_as_they_are_made(maker: Maker) -> None:
    told: list[tuple[str, int]] = []
    made = routing_runs(None).cells(jobs(), made=lambda each: told.append((each.policy, each.seed)))
    assert [(each.policy, each.seed) for each in made] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)] == told == maker.made


def test_a_comparison_broken_off_goes_on_where_it_was(maker: Maker, tmp_path: Path) -> None:
    maker.broken_after = 3
    with pytest.raises(KeyboardInterrupt):
        routing_runs(tmp_path).cells(jobs())
    maker.broken_after, maker.made = 10, []
    assert len(routing_runs(tmp_path).cells(jobs())) == 4
    assert maker.made == [("b", 2)]


def test_a_kept_file_that_is_damaged_is_made_anew(maker: Maker, tmp_path: Path) -> None:
    routing_runs(tmp_path).cells(jobs())
    (tmp_path / file_name(jobs()[0])).write_text("{")
    maker.made = []
    routing_runs(tmp_path).cells(jobs())
    assert maker.made == [("a", 1)]


def test_other_options_other_code_and_another_trace_under_the_same_name_are_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "mine.jsonl"
    trace.write_text("1")
    job = Job(scenario="s", options=msgspec.structs.replace(SHORT, trace=str(trace)))
    names = {file_name(job)}
    names.add(file_name(Job(scenario="s", options=msgspec.structs.replace(job.options, copies=1.5))))
    trace.write_text("2")
    names.add(file_name(job))
    monkeypatch.setattr(running, "code_version", lambda: "another")
    names.add(file_name(job))
    assert len(names) == 4
    assert all(re.fullmatch(r"s-tokenpilot\.1\.[0-9a-f]{16}\.json", name) for name in names)


def test_a_real_cell_has_every_request_and_what_reuse_there_was() -> None:
    made = cell_of(Job(scenario="s", options=msgspec.structs.replace(SHORT, policy="dynamo")))
    columns = [getattr(made.requests, name) for name in Requests.__struct_fields__]
    assert {len(column) for column in columns} == {len(made.requests.at_s)}
    assert made.measured == sum(made.warm_s <= at_s < made.len_s for at_s in made.requests.at_s) > 0
    assert sum(load.requests for load in made.loads) == len(made.requests.at_s)
    pairs = list(zip(made.requests.available_tokens, made.requests.captured_tokens, strict=True))
    assert all(available >= captured for available, captured in pairs)
    assert any(captured for _, captured in pairs)


def test_a_place_that_cannot_be_written_is_named_and_costs_nothing_kept_before(maker: Maker, tmp_path: Path) -> None:
    routing_runs(tmp_path).cells(jobs())
    kept = sorted(tmp_path.glob("*.json"))
    kept[0].unlink()
    kept[0].mkdir()
    with pytest.raises(SetupError, match="what was kept before is whole"):
        routing_runs(tmp_path).cells(jobs())
    assert all(path.is_file() for path in kept[1:])


def test_kept_cells_are_those_that_were_made(tmp_path: Path) -> None:
    job = Job(scenario="s", options=msgspec.structs.replace(SHORT, policy="least_requests"))
    made = routing_runs(tmp_path).cells([job])
    assert routing_runs(tmp_path).cells([job]) == made
    assert msgspec.structs.asdict(made[0])["policy"] == "least_requests"


def test_no_policy_passes_the_bounds() -> None:
    policies = ("least_requests", "sglang", *BOUNDS)
    made = {each.policy: each for each in routing_runs(None).cells(jobs_of("s", SHORT, policies, [3]))}
    pooled, endless = (made[name] for name in BOUNDS)
    for name in ("least_requests", "sglang"):
        for best, bound in ((made[name], pooled), (pooled, endless)):
            assert bound.requests.at_s == best.requests.at_s
            assert best.ttft_s.mean is not None
            assert bound.ttft_s.mean is not None
            assert bound.ttft_s.mean <= best.ttft_s.mean
            assert bound.hit_ratio >= best.hit_ratio


def test_a_bound_of_no_requests_is_refused_as_a_run_is() -> None:
    nothing = msgspec.structs.replace(SHORT, trace="conversation", copies=0.01, len_s=0.001, warm_s=0.0)
    with pytest.raises(PolicyError, match="no request arrives within"):
        routing_runs(None).cells(jobs_of("s", nothing, BOUNDS, [1]))


def test_a_scenario_s_memory_and_scrapes_reach_engines_bounds_and_gateways() -> None:
    scraped: list[float] = []

    class Listening(LeastStale):
        def heard(self, record: Record, now_s: float) -> None:
            scraped.extend([now_s] if isinstance(record, CapacityShard) else [])

    options = msgspec.structs.replace(SHORT, make_router=Listening, telemetry_period_s=2.0)
    run(options, cpu_s=lambda: 0.0)
    assert {round(later - earlier, 6) for earlier, later in pairwise(scraped[1:])} == {2.0}  # after what it starts from
    longer = msgspec.structs.replace(SHORT, copies=2.0, instances=4, len_s=60.0)
    small, large = (
        routing_runs(None).cells(
            jobs_of("s", msgspec.structs.replace(longer, kv_blocks=blocks), ["sglang", BOUNDS[0]], [1])
        )
        for blocks in (400, 4_000)
    )
    assert all(few.hit_ratio < many.hit_ratio for few, many in zip(small, large, strict=True))


def test_processes_make_the_same_cells() -> None:
    two = jobs_of("s", msgspec.structs.replace(SHORT, len_s=8.0), BOUNDS, [1])
    assert routing_runs(None).cells(two, processes=2) == routing_runs(None).cells(two)


def test_changes_are_taken_seed_by_seed_and_the_worst_is_the_least_gain() -> None:
    made = [cell("base", 1, 1.0), cell("base", 2, 10.0), cell("x", 1, 0.5), cell("x", 2, 9.0)]
    base, x = compared(made, scenario="s", baseline="base").lines
    assert base.change_p50 == Span(mean=0.0, worst=0.0)
    assert x.ttft_p50_s == Span(mean=4.75, worst=9.0)
    assert (x.change_p50.mean, x.change_p50.worst) == (pytest.approx(-0.3), pytest.approx(-0.1))


def test_lost_requests_make_a_figure_never_not_better() -> None:
    made = [cell("base", 1), cell("base", 2), cell("x", 1, 0.5, None), cell("x", 2, 0.5, 1.0)]
    _, x = compared(made, scenario="s", baseline="base").lines
    assert (x.ttft_p95_s, x.change_p95, x.lost) == (Span(mean=None, worst=None), Span(mean=None, worst=None), 1)
    assert seconds(x.ttft_p95_s) == percent(x.change_p95) == "never"


def test_bounds_stand_last_and_a_baseline_that_was_not_run_is_refused() -> None:
    made = [cell(BOUNDS[0], 1), cell("base", 1)]
    assert [line.policy for line in compared(made, scenario="s", baseline="base").lines] == ["base", BOUNDS[0]]
    with pytest.raises(PolicyError, match="base"):
        compared(made, scenario="s", baseline="nobody")


def test_figures_read_as_people_write_them() -> None:
    assert seconds(span([0.0612, 0.0612])) == "0.0612"
    assert seconds(span([1.0, 139.4])) == "70.2 (139)"
    assert percent(span([-0.713, -0.4])) == "-55.6 (-40.0)"


def test_the_best_of_a_grid_is_good_at_both_percentiles() -> None:
    made = [cell("llmd:kv=0", 1, 0.1, 9.0), cell("llmd:kv=2", 1, 0.3, 2.0), cell("dynamo:overlap_weight=2", 1, 1.0)]
    made += [cell("llmd:kv=0", 2, 0.1, 9.0), cell("llmd:kv=2", 2, 0.3, 2.0)]
    best = tried(made)
    assert [point.policy for point in best["llmd"]] == ["llmd:kv=2", "llmd:kv=0"]
    assert set(best) == {"llmd", "dynamo"}
    assert tried([cell("llmd:kv=0", 1, 0.1, None), cell("llmd:kv=2", 1, 9.0, 9.0)])["llmd"][0].policy == "llmd:kv=2"


def test_every_point_of_the_grids_is_a_policy_and_the_defaults_are_among_them() -> None:
    points = grid_of(["tokenpilot", *GRIDS])
    assert len(set(points)) == len(points) == 24 + 7 + 18
    for point in points:
        policy_named(point)
    for default in ("sglang:balance_abs=64,balance_rel=1.5,match_min=0.3", "dynamo:overlap_weight=1"):
        assert default in points
    assert "llmd:prefix=3,queue=2,kv=2" in points


def test_policies_and_seeds_are_read_as_written() -> None:
    assert policies_of("random, sglang:balance_abs=8,match_min=0.1,llmd") == [
        "random",
        "sglang:balance_abs=8,match_min=0.1",
        "llmd",
    ]
    assert seeds_of("--seeds", "7,1-3,2") == [7, 1, 2, 3]
    for wrong in ("", "x", "4-1", "1-", "-1", "1-5000"):
        with pytest.raises(PolicyError, match="--seeds"):
            seeds_of("--seeds", wrong)


def test_reuse_is_of_the_measured_requests() -> None:
    assert reuse_of(cell("x", 1)) == (0.3, 0.2, 0.1)


def test_the_page_is_whole_in_itself_and_escapes_what_it_is_told() -> None:
    made = [cell(name, seed, scenario="<s>") for name in ("base", "tokenpilot", *BOUNDS) for seed in (1, 2)]
    grids = {"<s>": tried([cell("llmd:kv=0", 1)])}
    text = report([compared(made, scenario="<s>", baseline="base")], made, grids)
    assert "<s>" not in text
    assert "&lt;s&gt;" in text
    assert text.count("<svg") == text.count("</svg>") == 4
    assert all(link.startswith("#") for link in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert "llmd:kv=0" in text
    assert text == report([compared(made, scenario="<s>", baseline="base")], made, grids)


def test_without_matplotlib_the_remedy_is_told_before_anything_runs(
    maker: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=re.escape("tokenfleet[report]")):
        check_report(Path("x.html"))
    result = CliRunner().invoke(sim_app, ["compare", "--html", "x.html", "--seeds", "1"])
    assert isinstance(result.exception, SetupError)
    assert maker.made == []


def test_a_page_or_a_folder_that_can_t_be_made_is_told_before_anything_runs(maker: Maker, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option, path in (("--html", tmp_path), ("--html", tmp_path / "no" / "r.html"), ("--keep", tmp_path / "file")):
        result = CliRunner().invoke(sim_app, ["compare", option, str(path), "--seeds", "1"])
        assert isinstance(result.exception, SetupError)
        assert str(result.exception).startswith(f"{option} {path}: ")
    assert maker.made == []


@pytest.mark.parametrize(("option", "module"), [("--html", paging), ("--keep", running)])
def test_a_folder_that_takes_no_file_is_told_before_anything_runs(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: str, module: ModuleType
) -> None:
    def refuses(*, dir: Path) -> None:
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr(module, "TemporaryFile", refuses)
    path = tmp_path / "new"
    result = CliRunner().invoke(sim_app, ["compare", option, str(path), "--seeds", "1"])
    assert isinstance(result.exception, SetupError)
    assert re.fullmatch(rf"{option} {path}: Permission denied; name a \w+ that can be written.*", str(result.exception))
    assert maker.made == []


def test_asking_whether_a_page_can_be_written_leaves_what_is_there(tmp_path: Path) -> None:
    old, new = tmp_path / "old.html", tmp_path / "new.html"
    old.write_text("old")
    check_report(old)
    check_report(new)
    assert old.read_text() == "old"
    assert not new.exists()


def test_two_comparisons_may_keep_the_same_run_at_once(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write, others = Path.write_bytes, [2]

    def interrupted(path: Path, data: bytes) -> int:
        """Between one's writing and renaming the other does both."""
        written = write(path, data)
        if others:
            monkeypatch.setattr(running, "current_process", lambda: SimpleNamespace(pid=others.pop()))
            routing_runs(tmp_path).cells(jobs(("a",), (1,)))
        return written

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    routing_runs(tmp_path).cells(jobs(("a",), (1,)))
    assert [path.name for path in tmp_path.iterdir()] == [file_name(jobs()[0])]


def test_a_process_that_is_killed_is_told_with_the_remedy() -> None:
    runs = Runs(None, kind=int, make=os._exit, name=str)
    with pytest.raises(SetupError, match=r"one of 2 processes was killed.* fewer --jobs"):
        runs.cells([1, 1], processes=2)


@pytest.mark.parametrize("how", [["--json"], ["--markdown"], []])
def test_the_figures_are_printed_though_the_page_can_t_be_written(
    maker: Maker, monkeypatch: pytest.MonkeyPatch, how: list[str]
) -> None:
    def full(*args: object) -> None:
        raise SetupError("--html r.html: No space left on device")

    monkeypatch.setattr(paging, "write_report", full)
    result = CliRunner().invoke(sim_app, ["compare", "reuse", "--seeds", "1", "--html", "r.html", *how])
    assert isinstance(result.exception, SetupError)
    assert "tokenpilot" in result.stdout


def test_a_page_that_can_t_be_written_is_told_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="name a file that can be written"):
        write_report(tmp_path / "no" / "r.html", "page")


def test_the_command_prints_one_object(maker: Maker) -> None:
    arguments = ["compare", "reuse", "chat", "--policies", "random,dynamo", "--baseline", "random", "--seeds", "1-2"]
    result = CliRunner().invoke(sim_app, [*arguments, "--tuned", "--tune-seeds", "9", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert [table["scenario"] for table in told["scenarios"]] == ["reuse", "chat"]
    policies = [line["policy"] for line in told["scenarios"][0]["lines"]]
    assert policies == ["random", "dynamo", "dynamo:overlap_weight=0.5", *BOUNDS]
    assert set(told["grids"]["chat"]) == {"dynamo"}
    assert ("dynamo:overlap_weight=8", 9) in maker.made


@pytest.mark.parametrize("kept", [False, True])
def test_broken_off_it_tells_how_far_it_came_and_how_to_go_on(maker: Maker, tmp_path: Path, kept: bool) -> None:
    maker.broken_after = 3
    keep = ["--keep", str(tmp_path)] if kept else []
    words = ["compare", "reuse", "--policies", "random,llmd", "--baseline", "random", "--seeds", "1-4", "--no-bounds"]
    result = CliRunner().invoke(sim_app, [*words, *keep])
    assert result.exit_code == 130
    goes_on = f"the same command goes on from {tmp_path}" if kept else "with --keep FOLDER the same command would go on"
    assert result.stderr == f"stopped: 3 of 8 runs of reuse are done; {goes_on}\n"


def test_the_command_prints_a_table(maker: Maker) -> None:
    result = CliRunner().invoke(sim_app, ["compare", "--policies", "random", "--baseline", "random", "--no-bounds"])
    assert result.exit_code == 0, result.output
    assert re.search(r"random\W+1\.00\W+2\.00", result.output)
    assert maker.made == [("random", seed) for seed in (1, 2, 3, 4)]


def test_the_command_prints_tables_for_a_document(maker: Maker) -> None:
    arguments = ["compare", "chat", "--policies", "random,dynamo", "--baseline", "random", "--seeds", "1"]
    result = CliRunner().invoke(sim_app, [*arguments, "--tuned", "--tune-seeds", "9", "--markdown"])
    lines = result.output.splitlines()
    assert lines[0] == "**chat**: seed 1; 1 requests measured a seed; ρ 0.50 without caches; changes against random."
    assert lines[4] == "| random | 1.00 | 2.00 | +0.0 | +0.0 | 0.250 | 2000 | 1.00 | 0 |"
    assert lines[-1] == "Tuned on seeds 9: `dynamo:overlap_weight=0.5` (of 7)."


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no scenario 'nowhere'"),
        (["--policies", "nobody"], "no policy 'nobody'"),
        (["--policies", "random"], "--baseline 'least_requests' is none of --policies random"),
        (["--seeds", "one"], "--seeds"),
        (["reuse", "moe", "--warm", "650"], "moe: --warm 650 s must be at least 0 and less than --len 600 s"),
        (["reuse", "chat", "--profile", "demo"], "reuse: trace synthetic on demo: line "),
    ],
)
def test_what_can_t_be_compared_is_refused_before_anything_runs(
    maker: Maker, arguments: Sequence[str], words: str
) -> None:
    result = CliRunner().invoke(sim_app, ["compare", *arguments])
    assert isinstance(result.exception, PolicyError)
    assert words in str(result.exception)
    assert maker.made == []


def test_a_request_too_large_for_the_fleet_is_told_before_anything_runs_though_only_a_later_seed_has_it(
    maker: Maker, tmp_path: Path
) -> None:
    line = '{{"at_s": {0}, "prompt_tokens": {1}, "output_tokens": 1}}\n'
    path = tmp_path / "t.jsonl"
    path.write_text("".join(line.format(at_s, 2_000_000 if at_s == 30 else 10) for at_s in range(60)))
    within = ["--trace", str(path), "--copies", "2", "--len", "10", "--warm", "0"]  # another part of it on each seed
    result = CliRunner().invoke(sim_app, ["compare", *within, "--seeds", "1-20"])
    assert isinstance(result.exception, PolicyError)
    assert "custom: trace" in str(result.exception)
    assert "2000000 prompt" in str(result.exception)
    assert maker.made == []
