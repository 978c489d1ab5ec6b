"""Two models on one site: what arrives, how slots follow it, and what a run and a comparison tell."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.demand import DEMANDS, demand_named
from tokenfleet.sim.measure import prefill_row_s
from tokenfleet.sim.models.compare import Cell, compared, table_of
from tokenfleet.sim.models.run import ModelsOptions, ModelsRun, run_models
from tokenfleet.sim.models.workload import LEN_S, MODELS, PROMPT_TOKENS, RHO_OF_LOAD_1, workload
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.traces.rows import TraceRow

L70 = profiles()["L70"]


@cache
def arrivals(demand: str = "step", load: float = 0.9, slots: int = 8) -> list[TraceRow]:
    return workload(load=load, slots=slots, demand=demand_named(demand, seed=1), profile=L70, seed=1)


@cache
def ran(**options: Any) -> ModelsRun:
    """A small run: some hundred requests."""
    usual: dict[str, Any] = {"instances": 2, "load": 0.05, "demand": "step"}
    return run_models(ModelsOptions(**(usual | options)), cpu_s=iter([10.0, 12.0]).__next__)


def work_s(rows: list[TraceRow], from_s: float, until_s: float, model: str = "") -> float:
    its = [row for row in rows if from_s <= row.at_s < until_s and model in ("", row.model)]
    return math.fsum(prefill_row_s(row, L70, cached_tokens=0) for row in its)


def test_each_model_gets_chat_requests_of_its_lengths() -> None:
    rows = arrivals()
    assert rows == sorted(rows, key=lambda row: row.at_s)
    assert {row.model for row in rows} == set(MODELS)
    for row in rows:
        least, most = PROMPT_TOKENS[row.model]
        assert least <= row.prompt_tokens <= most
        assert row.request_class == "chat"
        assert row.output_tokens >= 2


@pytest.mark.parametrize("load", [0.45, 0.9])
def test_the_load_is_the_same_all_the_time_and_moves_between_the_models(load: float) -> None:
    rows = arrivals(load=load)
    before, after = ((0.0, 300.0), (300.0, LEN_S))
    for from_s, until_s in (before, after):
        offered = work_s(rows, from_s, until_s) / (8 * (until_s - from_s))
        assert offered == pytest.approx(load * RHO_OF_LOAD_1, rel=0.1)
    parts = [work_s(rows, *span, model=MODELS[0]) / work_s(rows, *span) for span in (before, after)]
    assert parts == [pytest.approx(0.35, abs=0.04), pytest.approx(0.65, abs=0.04)]


@pytest.mark.parametrize("name", DEMANDS)
def test_a_demand_leaves_each_stream_a_part_and_says_when_it_changes(name: str) -> None:
    demand = demand_named(name, seed=1)
    assert all(0.25 <= demand.share(at_s) <= 0.75 for at_s in range(round(LEN_S)))
    assert all(demand.share(at_s - 1.0) != demand.share(at_s) for at_s in demand.changes_s)


def test_waves_begin_where_the_seed_says_and_change_sides_once() -> None:
    one, other = (demand_named("waves", seed=seed).share for seed in (1, 2))
    assert one(0.0) != other(0.0)
    assert one(749.0) - 0.5 == pytest.approx(0.5 - one(751.0), abs=0.01)
    assert abs(one(749.0) - one(748.0)) < 0.01


def test_a_run_tells_of_all_requests_by_model() -> None:
    result = ran(design="static").result
    of = result.requests
    assert of["all"].offered == of["talk"].offered + of["read"].offered == len(ran(design="static").served)
    assert of["all"].unfinished == 0
    assert all(attained and attained > 0.9 for attained in result.attainment_offered.values())
    assert result.goodput_tokens_per_s["all"] == pytest.approx(
        result.goodput_tokens_per_s["talk"] + result.goodput_tokens_per_s["read"]
    )
    assert (result.moves, result.revisions, result.control) == ((), (), None)
    assert result.shares == ((0.0, {"talk": 1, "read": 1}),)


def test_the_same_options_give_the_same_run() -> None:
    assert (
        ran(design="static").result
        == run_models(
            ModelsOptions(design="static", instances=2, load=0.05, demand="step"), cpu_s=iter([10.0, 12.0]).__next__
        ).result
    )


def test_slots_move_for_what_is_offered_and_every_change_says_why() -> None:
    result = ran(instances=3, load=0.5, split=1).result
    assert result.moves
    assert all("needs" in each.why for each in result.revisions)
    assert [each.kind for each in result.revisions] == ["step"] * len(result.moves)
    for revision, move in zip(result.revisions, result.moves, strict=True):
        assert revision.at_s < move.begun_s
        assert revision.applied_s is None or move.ready_s is None or 0.0 <= revision.applied_s - move.ready_s <= 1.0
    assert all(sum(slots.values()) in (2, 3) for _, slots in result.shares)  # one on its way at most
    assert all(min(slots.values()) >= 1 for _, slots in result.shares)
    assert result.control is not None
    assert result.control.reversals == result.reversals
    assert result.control.worst_minute <= 1


def test_slots_stay_where_all_have_room() -> None:
    assert ran(instances=4).result.moves == ()


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"design": "dynamic"}, "there is following, static"),
        ({"demand": "tide"}, "there is ramp, square, steady, step, waves"),
        ({"instances": 1}, "2 to 100"),
        ({"split": 8}, "1 to 7, for each model has a slot"),
        ({"load": 0.0}, "more than 0"),
    ],
)
def test_what_cant_be_run_is_refused(option: dict[str, Any], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        run_models(ModelsOptions(**option), cpu_s=lambda: 0.0)


def test_a_comparison_sets_following_beside_static_splits(tmp_path: Path) -> None:
    args = "compare models --instances 2 --load 0.05 --demand step --seeds 1 --keep"
    done = CliRunner().invoke(sim_app, [*args.split(), str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "| 1/1 (the better one) |" in done.output
    assert "Following less the best static split of each seed, in points: +0.00." in done.output  # there is but one


def test_the_gain_is_against_the_best_split_of_the_seed() -> None:
    result = ran(design="static").result

    def cell(design: str, split: int, seed: int, attained: float) -> Cell:
        import msgspec

        shares = dict.fromkeys(("all", "talk", "read"), attained)
        return Cell(
            result=msgspec.structs.replace(
                result, design=design, split=split, seed=seed, instances=3, attainment_offered=shares
            )
        )

    table = compared(
        [
            cell("following", 1, 1, 0.9),
            cell("following", 1, 2, 0.95),
            cell("static", 1, 1, 0.8),
            cell("static", 1, 2, 0.93),
            cell("static", 2, 1, 0.85),
            cell("static", 2, 2, 0.5),
        ]
    )
    assert table.gain == {1: pytest.approx(0.05), 2: pytest.approx(0.02)}
    assert [line.design for line in table.lines if line.better] == ["1/2"]
    assert "| 1/2 (the better one) | 86.50 |" in table_of(table)


def test_the_command_prints_figures_and_control_or_json() -> None:
    args = ["run", "models", "--instances", "2", "--load", "0.05", "--demand", "step"]
    told = CliRunner().invoke(sim_app, args)
    assert told.exit_code == 0, told.output
    assert "0.00 reversals a minute, at most 0 in one; settled after" in told.output
    found = json.loads(CliRunner().invoke(sim_app, [*args, "--json"]).output)
    assert found["shares"] == [[0.0, {"talk": 1, "read": 1}]]
    assert (found["moves"], found["reversals"]) == ([], 0)
