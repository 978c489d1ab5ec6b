"""Mixed runs compared: what happened over time, the table over seeds, and how command line and page show it."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.mixed import compare as comparing
from tokenfleet.sim.mixed.accounts import Accounts
from tokenfleet.sim.mixed.compare import Cell, cell_of, file_name, mixed_runs
from tokenfleet.sim.mixed.compare_words import markdown, texts
from tokenfleet.sim.mixed.compared import compared
from tokenfleet.sim.mixed.measure import Throughput
from tokenfleet.sim.mixed.report import report
from tokenfleet.sim.mixed.run import MixedOptions
from tokenfleet.sim.mixed.service_levels import mixed_policy
from tokenfleet.sim.mixed.timeline import Timeline, timeline_of
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.rows import TraceRow

L70 = profiles()["L70"]
SMALL = MixedOptions(design="least_requests", instances=2, load=0.05)
SMALL_ARGUMENTS = ["compare", "mixed", "--instances", "2", "--load", "0.05", "--seeds", "1"]


def over_time(*served: Served) -> Timeline:
    return timeline_of(served, Accounts(served, mixed_policy(L70)), L70)


def chat(at_s: float, dispatched_s: float | None, first_s: float, finished_s: float, *, output: int = 4) -> Served:
    return Served(
        id=f"c{at_s}",
        row=TraceRow(at_s=at_s, prompt_tokens=1_000, output_tokens=output, request_class="chat"),
        gateway=0,
        instance=0,
        dispatched_s=dispatched_s,
        first_token_s=first_s,
        finished_s=finished_s,
    )


@cache
def cell(design: str = "least_requests", seed: int = 1) -> Cell:
    return cell_of(replace(SMALL, design=design, seed=seed))


def changed(of: Cell, **figures: Any) -> Cell:
    return replace(of, result=replace(of.result, **figures))


def test_held_and_running_are_counted_at_every_full_second() -> None:
    found = over_time(chat(0.5, 2.0, 2.5, 4.2), chat(1.0, 3.5, 4.0, 5.0))
    assert found.held["chat"][:6] == [0, 2, 1, 1, 0, 0]  # at 2 s the first goes out
    assert found.running["chat"][:7] == [0, 0, 1, 1, 2, 0, 0]
    assert {len(column) for column in (*found.held.values(), *found.running.values())} == {600}
    assert sum(found.held["long"]) == 0


def test_a_refused_request_waits_until_it_is_refused_and_an_unfinished_one_to_the_end() -> None:
    row = TraceRow(at_s=1.5, prompt_tokens=100, output_tokens=4, request_class="long")
    refused = Served(id="r", row=row, refused="late", refused_s=4.5)
    never = Served(id="n", row=replace(row, request_class="batch"))
    found = over_time(refused, never)
    assert found.held["long"][:7] == [0, 0, 1, 1, 1, 0, 0]
    assert (found.held["batch"][1], found.held["batch"][2], found.held["batch"][599]) == (0, 1, 1)
    assert found.attained["long"][0] == found.attained["batch"][0] == 0.0


def test_attainment_counts_where_a_request_arrived_and_tokens_where_it_ended() -> None:
    found = over_time(chat(5.0, 5.0, 6.0, 25.0), chat(7.0, 7.0, 17.0, 26.0, output=5))
    assert found.attained["chat"][:3] == [0.5, None, None]
    assert found.goodput_tokens_per_s["chat"][:4] == [0.0, 0.0, 0.4, 0.0]
    assert found.waste_tokens_per_s["chat"][:4] == [0.0, 0.0, 0.5, 0.0]


def test_the_share_of_a_class_is_the_work_that_goes_out_in_instances() -> None:
    found = over_time(chat(5.0, 12.0, 13.0, 25.0))
    work_s = 0.0075 + 1_000 * 3.78e-5 + 4.94e-10 * 1_000**2 / 2
    assert found.prefill_share["chat"][:3] == [0.0, pytest.approx(work_s / 10.0), 0.0]


def test_a_run_s_timeline_adds_up_to_its_figures() -> None:
    made = cell()
    columns = made.timeline.goodput_tokens_per_s
    for name, column in columns.items():
        assert sum(column) / 60 == pytest.approx(made.result.goodput_tokens_per_s[name])


def test_of_what_is_the_better_the_greater_the_worst_seed_is_the_least() -> None:
    def of(seed: int, met: float, goodput: float, output: float, cost: float) -> Cell:
        return changed(
            cell(),
            seed=seed,
            attainment_offered=dict.fromkeys(("all", "chat", "long", "batch"), met),
            goodput_tokens_per_s=dict.fromkeys(("all", "chat", "long", "batch"), goodput),
            throughput_tokens_per_s=Throughput(window=output, makespan=output / 2),
            cost_per_million_goodput_tokens=cost,
        )

    base = [of(1, 0.5, 100.0, 200.0, 2.0), of(2, 0.6, 110.0, 200.0, 2.0)]
    better = [changed(each, design="better") for each in (of(1, 0.9, 150.0, 180.0, 1.0), of(2, 0.8, 220.0, 200.0, 1.5))]
    table = compared([*base, *better], baseline="least_requests")
    line = table.lines[1]
    assert (table.seeds, line.design, line.seeds) == ((1, 2), "better", (1, 2))
    assert (line.attained["all"].mean, line.attained["chat"].worst) == (pytest.approx(0.85), 0.8)
    assert (line.goodput_change.mean, line.goodput_change.worst) == (pytest.approx(0.75), pytest.approx(0.5))
    assert line.goodput_share.worst == pytest.approx(150 / 180)
    assert (line.output_change.worst, line.output_to_end_change.worst) == (pytest.approx(-0.1), pytest.approx(-0.1))
    assert (line.cost.worst, line.cost_change.worst) == (1.5, pytest.approx(-0.25))
    assert texts(line)[0] == "85 (80)"
    assert "+75.0 (+50.0)" in markdown(table)
    with pytest.raises(PolicyError, match="--baseline 'pools' is none of the designs compared: better, least_requests"):
        compared([*base, *better], baseline="pools")


def test_a_job_that_never_ended_makes_its_figures_never_and_not_better() -> None:
    lost = changed(cell(), design="lost", bulk_end_s=(1.0, None), cost_per_million_goodput_tokens=None)
    line = compared([cell(), lost], baseline="least_requests").lines[1]
    assert (line.bulk_end_s.worst, line.cost.mean, line.cost_change.worst) == (None, None, None)
    assert "never" in texts(line)


def test_other_options_and_a_changed_profile_are_other_runs(tmp_path: Path) -> None:
    from tokenfleet.sim.profiles import profile_text

    mine = tmp_path / "mine.toml"
    mine.write_text(profile_text(L70))
    own = replace(SMALL, profile=str(mine))
    names = {file_name(SMALL), file_name(replace(SMALL, load=0.06)), file_name(own)}
    mine.write_text(profile_text(replace(L70, token_s=5e-5)))
    names.add(file_name(own))
    assert len(names) == 4
    assert all(re.fullmatch(r"mixed-least-requests\.1\.[0-9a-f]{16}\.json", name) for name in names)


def test_a_kept_cell_is_the_one_that_was_made(tmp_path: Path) -> None:
    made = mixed_runs(tmp_path).cells([SMALL])
    assert mixed_runs(tmp_path).cells([SMALL]) == made
    assert made[0].label == "least_requests, seed 1"


def test_the_page_shows_every_design_over_time_and_needs_nothing_else() -> None:
    made = [cell(), changed(cell(), design="slomax")]
    table = compared(made, baseline="least_requests")
    text = report(table, made)
    assert text.count("<svg") == text.count("</svg>") == 6
    assert all(link.startswith("#") for link in re.findall(r'(?:src|href)="([^"]*)"', text))
    assert '<tr class="own"><td>slomax</td>' in text
    assert text == report(table, made)


def test_the_command_compares_designs_on_the_same_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    def made(options: MixedOptions) -> Cell:
        asked.append((options.design, options.seed))
        return changed(cell(), design=options.design, seed=options.seed)

    monkeypatch.setattr(comparing, "cell_of", made)
    arguments = [*SMALL_ARGUMENTS[:-1], "1-2", "--designs", "least_requests,priority"]
    page = tmp_path / "mixed.html"
    told = json.loads(CliRunner().invoke(sim_app, [*arguments, "--json", "--html", str(page)]).stdout)
    assert [line["design"] for line in told["lines"]] == ["least_requests", "priority"]
    assert asked == [("least_requests", 1), ("least_requests", 2), ("priority", 1), ("priority", 2)]
    assert "priority" in page.read_text()
    table = CliRunner().invoke(sim_app, arguments).stdout
    assert "N = 2, load 0.05, chat azure-conv: seeds 1, 2" in table
    assert "| priority | " in CliRunner().invoke(sim_app, [*arguments, "--markdown"]).stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--designs", "fastest,least_requests"], "--design 'fastest': there is"),
        (["--designs", "priority"], "--baseline 'least_requests' is none of --designs priority"),
        (["--seeds", "x"], "--seeds 'x'"),
    ],
)
def test_what_can_t_be_compared_is_refused_before_anything_runs(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(sim_app, [*SMALL_ARGUMENTS, *arguments])
    assert isinstance(result.exception, PolicyError)
    assert problem in str(result.exception)


def test_a_comparison_that_names_no_kind_is_one_of_routing() -> None:
    for arguments in (["compare", "nothing"], ["compare", "routing", "nothing"]):
        result = CliRunner().invoke(sim_app, arguments)
        assert "no scenario 'nothing'" in str(result.exception)
    told = CliRunner().invoke(sim_app, ["compare", "--help"]).stdout
    assert "routing" in told
    assert "mixed" in told
