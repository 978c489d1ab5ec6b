"""Mixed classes: what arrives, what is promised, and that a run's figures are those of its requests."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from tests.sim.worlds import Holder, Recorder, kept, row
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.sim.commands import sim_app
from tokenfleet.sim.demand import demand_named
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links, LinkTerms
from tokenfleet.sim.mixed.accounts import Accounts
from tokenfleet.sim.mixed.allowances import control_of_allowance
from tokenfleet.sim.mixed.designs import DESIGNS
from tokenfleet.sim.mixed.measure import bulk_ends_s
from tokenfleet.sim.mixed.run import TOKEN_BUDGET, MixedOptions, MixedRun, run_mixed
from tokenfleet.sim.mixed.service_levels import CLASSES, mixed_policy
from tokenfleet.sim.mixed.sharing import SHARING
from tokenfleet.sim.mixed.workload import BULK_STARTS_S, LEN_S, workload
from tokenfleet.sim.profiles import load_profile, profile_text, profiles
from tokenfleet.sim.router import Answer
from tokenfleet.sim.served import Served
from tokenfleet.sim.telemetry import SITE
from tokenfleet.sim.traces.rows import TraceRow

CLASS_NAMES = ("chat", "long", "batch")


def arrivals(**options: Any) -> list[TraceRow]:
    usual: dict[str, Any] = {"load": 0.9, "instances": 8, "seed": 1, "chat": "azure-conv", "batch_deadline_s": 240.0}
    return workload(**(usual | options))


def of(rows: Sequence[TraceRow], name: str) -> list[TraceRow]:
    return [each for each in rows if each.request_class == name]


class Refuser(Recorder):
    """Sends all to instance after instance, but refuses one request of ten."""

    def route(self, request: Request, now_s: float) -> Answer:
        answer = super().route(request, now_s)
        return Answer(request=request.id, refused="all_busy") if request.id.endswith("7") else answer


def run_anew(**options: Any) -> MixedRun:
    """A small run: 1,000 requests on one instance."""
    usual: dict[str, Any] = {"design": "least_requests", "instances": 1, "load": 0.25, "seed": 1}
    return run_mixed(MixedOptions(**(usual | options)), cpu_s=iter([10.0, 12.0]).__next__)


ran = cache(run_anew)


def ended(name: str, *, output: int, ttft_s: float, tpot_s: float, at_s: float = 0.0) -> Served:
    """A request that was served in so much time."""
    first_s = at_s + ttft_s
    return Served(
        id=f"{name}-{output}-{ttft_s}-{tpot_s}-{at_s}",
        row=TraceRow(at_s=at_s, prompt_tokens=100, output_tokens=output, request_class=name),
        gateway=0,
        instance=0,
        dispatched_s=at_s,
        first_token_s=first_s,
        finished_s=first_s + tpot_s * (output - 1),
    )


def test_the_workload_is_the_recorded_chat_sped_up_long_prompts_and_five_bulks_of_batch() -> None:
    rows = arrivals()
    assert rows == sorted(rows, key=lambda each: each.at_s)
    chat, long, batch = (of(rows, name) for name in CLASS_NAMES)
    assert len(chat) == 19_366  # all there is, by 538 s
    assert chat[-1].at_s == pytest.approx(19_366 / 36.0, rel=0.001)
    assert len(long) == pytest.approx(0.75 * 0.9 * 2 * 600, rel=0.1)
    assert min(each.prompt_tokens for each in long) >= 16_384
    assert Counter(int((each.at_s - 15.0) // 120.0) for each in batch) == dict.fromkeys(range(5), 1_296)
    assert all((each.at_s - 15.0) % 120.0 <= 2.0 for each in batch)
    assert max(each.output_tokens for each in batch) == 1_024
    assert min(each.output_tokens for each in rows) == 2
    assert {each.deadline_s for each in batch} == {240.0}
    assert {each.deadline_s for each in (*chat, *long)} == {None}


def test_the_seed_moves_long_and_batch_and_leaves_the_recorded_chat() -> None:
    one, same, other = arrivals(seed=1), arrivals(seed=1), arrivals(seed=2)
    assert one == same
    assert of(one, "chat") == of(other, "chat")
    assert of(one, "batch") != of(other, "batch")
    first, others = ({each.prompt_tokens for each in of(rows, "long")[:50]} for rows in (one, other))
    assert len(first & others) < 25  # from another part of the trace, not the same shaken


@pytest.mark.parametrize(("load", "instances"), [(0.9, 8), (1.0, 4), (0.5, 4)])
def test_rates_follow_load_and_size(load: float, instances: int) -> None:
    rows, scale = arrivals(load=load, instances=instances), load * instances / 4
    chat_s = min(LEN_S, 19_366 / (20.0 * scale))
    assert len(of(rows, "chat")) == pytest.approx(20.0 * scale * chat_s, rel=0.12)  # the recorded rate is not even
    assert len(of(rows, "long")) == pytest.approx(0.75 * scale * LEN_S, rel=0.35)
    assert len(of(rows, "batch")) == 5 * round(720 * scale)


@pytest.mark.parametrize("chat", ["azure-code", "conversation"])
def test_another_chat_stream_brings_as_many_prompt_tokens_a_second_and_lasts(chat: str) -> None:
    rows = arrivals(chat=chat)
    its = of(rows, "chat")
    assert its[-1].at_s > 480.0
    per_s = sum(each.prompt_tokens for each in its) / its[-1].at_s
    assert per_s == pytest.approx(36.0 * 1_155, rel=0.1)
    assert max(each.prompt_tokens for each in its) < 8_192
    assert {each.hash_ids for each in its} == {()}
    assert of(rows, "long") == of(arrivals(), "long")


def test_gateways_declare_class_deadline_and_task_and_know_no_output() -> None:
    made: list[Recorder] = []
    rows = [
        TraceRow(at_s=0.0, prompt_tokens=900, output_tokens=7, request_class="long"),
        TraceRow(at_s=0.1, prompt_tokens=900, output_tokens=9, request_class="batch", deadline_s=240.0),
        TraceRow(at_s=0.2, prompt_tokens=900, output_tokens=5, request_class="search"),  # a word of the trace's own
    ]
    Fleet(FleetTerms(profile=profiles()["L70"], instances=1), kept(made), seed=1).serve(rows)
    asked = [request for _, request in made[0].of(Request)]
    assert [(r.declared_class, r.task, r.stream, r.deadline_s) for r in asked] == [
        ("long", "", True, None),
        ("batch", "batch", False, 240.0),
        ("chat", "", True, None),
    ]
    assert {request.max_tokens for request in asked} == {0}
    told = Counter(event.request_class for _, event in made[0].of(OutcomeEvent))
    assert told == {"long": 2, "batch": 2, "chat": 2}


@pytest.mark.parametrize(
    ("served", "met"),
    [
        (ended("chat", output=20, ttft_s=2.0, tpot_s=0.06), True),
        (ended("chat", output=20, ttft_s=2.01, tpot_s=0.01), False),
        (ended("chat", output=20, ttft_s=0.5, tpot_s=0.061), False),
        (ended("chat", output=7, ttft_s=0.5, tpot_s=0.5), True),  # too short for a time per token
        (ended("long", output=20, ttft_s=15.0, tpot_s=0.149), True),
        (ended("long", output=20, ttft_s=15.1, tpot_s=0.01), False),
        (ended("long", output=20, ttft_s=1.0, tpot_s=0.16), False),
        (ended("batch", output=101, ttft_s=140.0, tpot_s=1.0), True),
        (ended("batch", output=101, ttft_s=140.1, tpot_s=1.0), False),
    ],
)
def test_each_class_is_judged_by_its_own_terms(served: Served, met: bool) -> None:
    sums = Accounts([served], mixed_policy(profiles()["L70"])).by_class()
    name, tokens = served.request_class, served.row.output_tokens
    assert (sums[name].attainment_offered, sums["all"].attainment_offered) == (float(met), float(met))
    assert (sums[name].goodput_tokens, sums[name].waste_tokens) == ((tokens, 0) if met else (0, tokens))


def test_what_was_refused_or_waits_to_the_end_was_offered_and_what_still_runs_is_missed() -> None:
    good = ended("chat", output=10, ttft_s=0.1, tpot_s=0.01)
    refused = Served(id="r", row=row(1.0), refused="all_busy", refused_s=1.5)
    runs = Served(id="n", row=row(2.0), gateway=0, instance=1, dispatched_s=2.5)
    waits = Served(id="w", row=row(2.0), gateway=0)
    chat = Accounts([good, refused, runs, waits], mixed_policy(profiles()["L70"])).by_class()["chat"]
    assert (chat.met, chat.missed, chat.rejected) == (1, 1, 2)
    assert chat.attainment_offered == pytest.approx(1 / 4)
    assert chat.attainment_admitted == pytest.approx(1 / 2)


def meets(served: Served) -> bool:
    """The service levels once more, straight from the request's times."""
    if served.finished_s is None or served.first_token_s is None:
        return False
    terms, tokens, at_s = CLASSES[served.request_class], served.row.output_tokens, served.row.at_s
    if terms.deadline_s is not None:
        return served.finished_s - at_s <= terms.deadline_s
    assert terms.ttft_s is not None
    assert terms.tpot_s is not None
    tpot_s = (served.finished_s - served.first_token_s) / (tokens - 1)
    return served.first_token_s - at_s <= terms.ttft_s and (tokens < 8 or tpot_s <= terms.tpot_s)


@pytest.mark.parametrize("make_router", [None, Refuser])
def test_the_accounts_of_the_product_agree_with_the_requests_times(make_router: Any) -> None:
    run = ran(make_router=make_router, load=1.0)
    result = run.result
    assert 0.1 < (result.attainment_offered["all"] or 0.0) < 0.9  # else it would show little
    for name in ("all", *CLASS_NAMES):
        its = [each for each in run.served if name in ("all", each.request_class)]
        admitted = [each for each in its if not each.refused]
        within = [each for each in its if each.finished_s is not None and each.finished_s < LEN_S]
        met = sum(meets(each) for each in its)
        assert result.attainment_offered[name] == pytest.approx(met / len(its))
        assert result.attainment_admitted[name] == pytest.approx(met / len(admitted))
        assert result.goodput_tokens_per_s[name] == pytest.approx(
            sum(each.row.output_tokens for each in within if meets(each)) / LEN_S
        )
        assert result.requests[name].offered == len(its)
        assert result.requests[name].rejected == len(its) - len(admitted)
        if name == "all":
            assert result.throughput_tokens_per_s.window == pytest.approx(
                sum(each.row.output_tokens for each in within) / LEN_S
            )
    completed = [each for each in run.served if each.finished_s is not None]
    assert result.waste_tokens == sum(each.row.output_tokens for each in completed if not meets(each))
    assert result.makespan_s == max(each.finished_s or 0.0 for each in completed)
    assert result.throughput_tokens_per_s.makespan == pytest.approx(
        sum(each.row.output_tokens for each in completed) / result.makespan_s
    )
    assert result.rejected == sum(bool(each.refused) for each in run.served)


def test_a_million_goodput_tokens_cost_all_instances_over_the_window() -> None:
    result = ran().result
    cost = 1 * 2.0 * LEN_S / 3_600.0  # instances × price per hour × hours
    assert result.cost_per_million_goodput_tokens == pytest.approx(
        cost * 1e6 / (result.goodput_tokens_per_s["all"] * LEN_S)
    )
    policy = mixed_policy(profiles()["L70"])
    dear = replace(policy, sites={SITE: replace(policy.sites[SITE], price_per_instance_hour=6.0)})
    assert run_anew(policy=dear).result.cost_per_million_goodput_tokens == pytest.approx(
        3.0 * (result.cost_per_million_goodput_tokens or 0.0)
    )


def test_a_bulk_ends_with_the_last_of_its_jobs() -> None:
    first, second = BULK_STARTS_S[:2]
    jobs = [
        ended("batch", output=11, ttft_s=ttft_s, tpot_s=1.0, at_s=at_s)
        for at_s, ttft_s in [(first + 0.5, 5.0), (first + 1.0, 40.0), (second, 7.0)]
    ]
    never = Served(id="n", row=row(BULK_STARTS_S[2] + 1.0))
    assert bulk_ends_s([*jobs, never]) == (51.0, 17.0, None, 0.0, 0.0)


def test_outcomes_reach_a_gateway_as_late_as_their_link_brings_them() -> None:
    def heard(links: Links) -> tuple[list[tuple[float, str, float]], list[Served]]:
        made: list[Recorder] = []
        terms = FleetTerms(profile=profiles()["L70"], instances=1, links=links)
        rows = [row(0.0, prompt=64), row(3.0, prompt=64)]
        served = Fleet(terms, kept(made), seed=1).serve([replace(each, block_tokens=512) for each in rows])
        return [(at_s, e.kind, e.elapsed_s) for at_s, e in made[0].of(OutcomeEvent)], served

    at_once, late = heard(Links()), heard(Links(outcomes=LinkTerms(delay_s=0.1)))
    assert [each.finished_s for each in late[1]] == [each.finished_s for each in at_once[1]]
    told = [(pytest.approx(at_s + 0.1), kind, elapsed_s) for at_s, kind, elapsed_s in at_once[0]]
    assert late[0] == told[:2]  # the run is over before it hears of the second


def test_a_held_request_may_go_out_as_soon_as_its_gateway_hears_of_a_first_token() -> None:
    class OneAtATime(Holder):
        """Lets the next go when the one before has given its first token, as far as it has heard."""

        heard_of = 0

        def released(self, now_s: float) -> Sequence[Answer]:
            if not self.held or self.heard_of < len(self.of(Request)):
                return []
            _, request = self.held.pop(0)
            return [super(Holder, self).route(request, now_s)]

        def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
            self.heard_of += event.kind == "first_token"
            return super().settled(event, now_s)

    links = Links(outcomes=LinkTerms(delay_s=0.0123))
    terms = FleetTerms(profile=profiles()["L70"], instances=1, links=links)
    rows = [replace(row(0.0, prompt=64), block_tokens=512, output_tokens=400) for _ in range(3)]
    served = Fleet(terms, kept([], OneAtATime), seed=1).serve(rows)
    heard_s = [(each.first_token_s or 0.0) + 0.0123 for each in served]
    assert [each.dispatched_s for each in served] == [0.0, *(pytest.approx(at_s) for at_s in heard_s[:2])]


@pytest.mark.parametrize("design", sorted(set(DESIGNS)))
def test_every_design_serves_all_and_the_same_again(design: str) -> None:
    options: dict[str, Any] = {"instances": 2, "load": 0.05, "seed": 3}
    one = run_anew(design=design, **options).result
    assert one.requests["all"].completed + one.rejected == one.requests["all"].offered > 250
    assert one.throughput_tokens_per_s.makespan > 0.0
    assert run_anew(design=design, **options).result == one


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"design": "fastest"}, "--design 'fastest': there is at_once, gated, least_requests, pools, priority, slomax"),
        ({"chat": "nothing"}, "--chat 'nothing': there is azure-code, azure-conv, conversation"),
        ({"shares": "fair"}, "--shares 'fair': there is controlled, none, static"),
        ({"shares": "static"}, "--shares static: least_requests shares nothing out between classes"),
        ({"instances": 0}, "--instances 0: it is 1 to 1000"),
        ({"tenants": 0}, "--tenants 0: it is 1 to 1000"),
        ({"tenants": 2, "flood": 0.5}, "--flood 0.5: it is 1 to 1000"),
        ({"flood": 100.0}, "--flood 100: it takes two --tenants or more"),
        ({"load": 0.0}, "--load 0: it is more than 0 and at most 10"),
        ({"load": float("nan")}, "--load nan: it is more than 0"),
        ({"outcome_delay_s": -1.0}, "--outcome-delay -1: it is 0.0 or more"),
        ({"profile": "H900"}, "no profile 'H900'"),
        ({"design": "pools"}, "design pools: its two pools need 2 instances or more"),
    ],
)
def test_what_can_t_be_run_is_refused_with_a_remedy(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PolicyError, match=problem):
        ran(**options)


def test_a_fleet_that_can_t_hold_the_long_prompts_is_refused(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(profile_text(replace(profiles()["L70"], kv_tokens=65_536)))
    with pytest.raises(PolicyError, match=r"mixed on .*small.toml: line .* more KV memory"):
        run_anew(profile=str(small))


def test_the_command_prints_one_object_with_all_figures_by_class() -> None:
    arguments = ["run", "mixed", "--instances", "1", "--load", "0.1", "--design", "least_requests", "--seed", "12"]
    done = CliRunner().invoke(sim_app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    for name in ("attainment_offered", "attainment_admitted", "goodput_tokens_per_s", "ttft_s", "tpot_s", "requests"):
        assert set(told[name]) == {"all", *CLASS_NAMES}
    assert set(told["throughput_tokens_per_s"]) == {"window", "makespan"}
    assert {"waste_tokens", "cost_per_million_goodput_tokens", "rejected", "rho"} <= told.keys()
    assert (told["seed"], told["design"], told["instances"], told["load"]) == (12, "least_requests", 1, 0.1)
    assert {"p50", "p95", "p99"} <= told["ttft_s"]["long"].keys()
    table = CliRunner().invoke(sim_app, arguments).stdout
    assert all(name in table for name in CLASS_NAMES)
    assert "least_requests: load 0.1 on 1 × L70, chat azure-conv, seed 12, 600 s" in table


def without_reserve() -> Policy:
    base = mixed_policy(replace(load_profile("L70"), token_budget=TOKEN_BUDGET))
    return replace(base, slomax=replace(base.slomax, reserve=replace(base.slomax.reserve, enabled=False)))


def test_a_reserve_for_interactive_requests_pays_where_gateways_can_hold_nothing_back() -> None:
    kept, taken = ran(design="at_once", load=0.9), run_anew(design="at_once", load=0.9, policy=without_reserve())
    offered = [run.result.attainment_offered["all"] or 0.0 for run in (taken, kept)]
    assert offered[1] > offered[0] + 0.05
    assert kept.result.goodput_tokens_per_s["all"] > 1.05 * taken.result.goodput_tokens_per_s["all"]


def test_the_feasibility_gate_pays_where_gateways_can_hold_nothing_back() -> None:
    policy = without_reserve()
    at_once, gated = (run_anew(design=design, load=0.9, policy=policy) for design in ("at_once", "gated"))
    assert gated.result.rejected > at_once.result.rejected == 0
    offered = [run.result.attainment_offered["all"] or 0.0 for run in (at_once, gated)]
    assert offered[1] > offered[0] + 0.04
    assert (gated.result.attainment_admitted["all"] or 0.0) > offered[1]
    goodput = [run.result.goodput_tokens_per_s["all"] for run in (at_once, gated)]
    assert goodput[1] > 1.05 * goodput[0]


def test_class_shares_give_chat_its_service_level_where_gateways_can_hold_nothing_back() -> None:
    none, static, controlled = (ran(design="at_once", load=0.9, shares=name) for name in SHARING)
    offered = [run.result.attainment_offered for run in (none, static, controlled)]
    chat = [each["chat"] or 0.0 for each in offered]
    assert chat[1] > chat[0] + 0.05
    assert (offered[1]["all"] or 0.0) > (offered[0]["all"] or 0.0)
    assert static.result.share_of_chat is None
    control = controlled.result.share_of_chat
    assert control is not None
    assert control.changes > 0
    assert control.worst_minute <= 1


def test_a_job_that_is_deferred_comes_again_and_is_counted_from_when_it_came_first() -> None:
    run = ran(design="at_once", load=0.9, shares="static")
    batch = [each for each in run.served if each.request_class == "batch"]
    late = [each for each in batch if each.dispatched_s is not None and each.dispatched_s > each.row.at_s]
    assert late
    assert all(each.refused or each.finished_s is not None for each in batch)


@pytest.mark.parametrize("name", ["step", "square"])
def test_a_demand_moves_the_chat_stream_alone(name: str) -> None:
    demand = demand_named(name, seed=1)
    moved, recorded = arrivals(instances=4, demand=demand), arrivals(instances=4)
    assert of(moved, "long") == of(recorded, "long")
    changed_s = demand.changes_s[0]
    before, after = (
        sum(from_s <= each.at_s < until_s for each in of(moved, "chat")) / (until_s - from_s)
        for from_s, until_s in ((0.0, changed_s), (changed_s, changed_s + 200.0))
    )
    assert after / before == pytest.approx(0.65 / 0.35, rel=0.25)  # the recorded rate is not even


def test_a_run_tells_how_the_allowance_was_moved_where_there_is_one() -> None:
    moved = ran(design="slomax", demand="step").result
    assert moved.demand == "step"
    assert moved.allowance is not None
    assert moved.allowance.changes > 10
    assert len(moved.allowance.settled_s) == 1
    assert ran().result.allowance is None


def test_the_allowance_is_settled_when_it_stays_near_what_it_comes_to() -> None:
    demand = demand_named("step", seed=1)
    series = [(0.0, 0.03), (100.0, 0.4), (300.0, 0.4), (310.0, 0.3), (340.0, 0.1), (500.0, 0.12)]
    control = control_of_allowance(series, demand, until_s=600.0)
    assert (control.reversals, control.settled_s) == (2, (40.0,))
