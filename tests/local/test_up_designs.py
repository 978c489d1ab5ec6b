"""Up's designs: what each makes of the policy and the cluster, and the mixed load that they are compared on."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tokenfleet.adapters.policy_file import load_policy, policy_text
from tokenfleet.client.gateway import Answer
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.policy import Policy, parse_policy
from tokenfleet.core.revisions import with_pools
from tokenfleet.core.slomax.terms import BatchPolicy, Setting
from tokenfleet.local.configs import load_config
from tokenfleet.local.designs import BULK_POOL, DESIGNS, POOL, design_change, design_of, designed
from tokenfleet.local.fleet import mixed_fleet, refuse_strangers
from tokenfleet.local.layout import lay_out
from tokenfleet.local.load import Load
from tokenfleet.local.load_config import LoadConfig
from tokenfleet.local.load_requests import laid_rows, request_of
from tokenfleet.local.options import UpOptions
from tokenfleet.local.policy_change import merged
from tokenfleet.local.report import ClassReport, design_lines
from tokenfleet.local.up import EXIT_FAILED, run_up
from tokenfleet.sim.mixed.workload import BULK_STARTS_S
from tokenfleet.wire.v1 import decision_pb2

SHIPPED, _ = load_policy()


def policy_for(design: str) -> Policy:
    return parse_policy(design_change(design).of(policy_text()), source=design)


def config_for(design: str, folder: Path = Path("load")) -> LoadConfig:
    fleet = designed(mixed_fleet(), design)
    return load_config(fleet, lay_out(fleet, port_base=7400), run="r", folder=folder, copies=None, seed=1)


# --- the policies ---


@pytest.mark.parametrize("design", DESIGNS)
def test_a_design_leaves_every_service_level_as_it_was_and_fits_the_cluster(design: str) -> None:
    policy, fleet = policy_for(design), designed(mixed_fleet(), design)
    agreed = {
        name: (terms.ttft_s, terms.ttft_per_token_s, terms.tpot_s, terms.deadline_s, terms.rank)
        for name, terms in policy.classes.items()
    }
    assert agreed == {
        name: (terms.ttft_s, terms.ttft_per_token_s, terms.tpot_s, terms.deadline_s, terms.rank)
        for name, terms in SHIPPED.classes.items()
    }
    refuse_strangers(fleet, policy, source=design)
    assert fleet.engines == 4
    assert policy.revision == SHIPPED.revision


def test_what_tells_the_designs_apart() -> None:
    paced = {name: policy_for(name).slomax.pacing.enabled for name in DESIGNS}
    assert paced == {"slomax": True, "least_requests": False, "priority": True, "pools": True}
    blind = policy_for("least_requests")
    assert (blind.products.slomax, blind.products.fleetmind, blind.tokenpilot.rule) == (False, False, "least_requests")
    for name in ("priority", "pools"):
        queues = {each: terms.queue for each, terms in policy_for(name).classes.items()}
        assert all(queue.steer_weight == 0.0 for queue in queues.values())
        assert min(queues[each].gate_share for each in ("long", "batch")) > 1000.0
    own = policy_for("slomax")
    assert own.classes == SHIPPED.classes


def test_pools_give_chat_one_half_of_the_engines_and_the_others_the_other() -> None:
    fleet = designed(mixed_fleet(), "pools")
    engines = Counter(engine.model for engine in lay_out(fleet, port_base=7400).engines)
    assert engines == {POOL: 2, BULK_POOL: 2}
    config = config_for("pools")
    asked = Counter((r.declared_class, r.model) for r in requests(config, 200))
    assert set(asked) == {("chat", POOL), ("long", BULK_POOL), ("batch", BULK_POOL)}
    assert {r.model for r in requests(config_for("slomax"), 200)} == {POOL}


def test_a_policy_is_merged_table_by_table_and_nothing_else_changes() -> None:
    assert parse_policy(merged(policy_text(), {}), source="merged") == SHIPPED
    changed = parse_policy(merged(policy_text(), {"slomax": {"gate": {"enabled": False}}}), source="merged")
    assert not changed.slomax.gate.enabled
    assert changed.classes == SHIPPED.classes
    assert changed.slomax.pacing == SHIPPED.slomax.pacing


@pytest.mark.parametrize("name", DESIGNS)
def test_people_and_the_controller_of_shares_can_add_tables_to_a_designs_policy(name: str) -> None:
    text = design_change(name).of(policy_text())
    before = parse_policy(text, source="the design")
    added = parse_policy(text + "\n[slomax.batch]\nenabled = true\n", source="a table more")
    assert added == replace(before, slomax=replace(before.slomax, batch=BatchPolicy(enabled=True)))
    setting = Setting(shares={"chat": 0.6, "batch": 0.4}, ceiling=0.9)
    moved = parse_policy(with_pools(text, 7, {"small-chat@b": setting}), source="moved")
    assert moved.slomax.controller.pools == {"small-chat@b": setting}


def test_a_name_that_is_no_bare_key_is_quoted_and_an_empty_table_is_kept() -> None:
    changes = {"tenants": {"the.bank": {"weight": 2.0}, "new one": {}}}
    tenants = parse_policy(merged(policy_text(), changes), source="merged").tenants
    assert tenants.keys() == {*SHIPPED.tenants, "the.bank", "new one"}
    assert tenants["the.bank"].weight == 2.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UpOptions(design="magic"), "no design 'magic'; there is: slomax, least_requests, priority, pools"),
        (UpOptions(design="slomax", policy="random"), "--policy"),
        (UpOptions(design="slomax", copies=2), "--copies"),
        (UpOptions(design="slomax", engines=Path("engines.toml")), "--engines"),
    ],
)
def test_what_cant_be_tried_is_refused_before_anything_starts(
    options: UpOptions, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_up(options) == EXIT_FAILED
    assert words in capsys.readouterr().err


def test_a_design_that_there_is_not_is_told_with_the_list() -> None:
    with pytest.raises(BadRequestError, match="slomax, least_requests, priority, pools"):
        design_of("fifo")


# --- the load ---


def requests(config: LoadConfig, most: int) -> list[decision_pb2.Request]:
    rows = laid_rows(config)
    return [request_of(config, row, id=f"r{n}", number=n)[0] for n, row in enumerate(rows[:: len(rows) // most])]


def test_the_mixed_load_declares_classes_and_batch_has_a_deadline_and_no_stream() -> None:
    asked = requests(config_for("slomax"), 300)
    by_class = Counter(request.declared_class for request in asked)
    assert by_class["chat"] > by_class["batch"] > by_class["long"] > 0
    for request in asked:
        assert request.stream == (request.declared_class != "batch")
        assert request.HasField("deadline_s") == (request.declared_class == "batch")
        assert request.wait_max_s > 240.0
    assert {request.tenant for request in asked} == {"acme", "globex"}


def test_prompts_of_the_mixed_load_have_nothing_in_common_that_its_traces_dont_say() -> None:
    config = config_for("slomax")
    chats = [row for row in laid_rows(config) if row.request_class == "chat" and row.prompt_tokens > 300][:50]
    first_keys = {request_of(config, row, id="r", number=0)[0].block_keys[:8] for row in chats}
    assert len(first_keys) == 50


def test_a_bulk_of_jobs_comes_over_forty_seconds_and_everything_by_arrival() -> None:
    rows = laid_rows(config_for("slomax"))
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    first = [row.at_s for row in rows if row.request_class == "batch" and row.at_s < BULK_STARTS_S[1]]
    assert BULK_STARTS_S[0] <= min(first)
    assert BULK_STARTS_S[0] + 38.0 < max(first) <= BULK_STARTS_S[0] + 40.0


class Told:
    """A gateway that gives these answers in turn, and keeps what it was asked."""

    def __init__(self, *decisions: decision_pb2.Decision) -> None:
        self.decisions = list(decisions)
        self.asked: list[tuple[int, float]] = []

    async def schedule(self, request: decision_pb2.Request) -> Answer:
        self.asked.append((request.attempt, request.elapsed_s))
        decision = self.decisions.pop(0)
        decision.attempt = request.attempt
        return Answer(decision=decision, trail=(decision,), gateways=("g",))


def busy(**facts: Any) -> decision_pb2.Decision:
    known: dict[str, Any] = {"verdict": decision_pb2.VERDICT_REJECT, "reason": decision_pb2.REASON_ALL_BUSY}
    decision = decision_pb2.Decision(id="d", request="r", **(known | facts))
    decision.admission.retry_after_s = 0.01
    return decision


@pytest.mark.parametrize(
    ("design", "refusal", "times"),
    [("least_requests", {}, 3), ("least_requests", {"reason": decision_pb2.REASON_INFEASIBLE}, 1)],
)
async def test_who_is_refused_for_load_comes_again_as_another_attempt(
    design: str, refusal: dict[str, Any], times: int, tmp_path: Path
) -> None:
    admit = decision_pb2.Decision(id="d3", request="r", verdict=decision_pb2.VERDICT_ADMIT)
    gateway: Any = Told(busy(**refusal), busy(), admit)
    load = Load(config_for(design, tmp_path))
    with load._books:
        answer = await asyncio.wait_for(load._admitted(gateway, decision_pb2.Request(id="r"), 0.0), 10.0)
    assert [attempt for attempt, _ in gateway.asked] == list(range(times))
    assert (answer is not None and answer.admitted) == (times == 3)


def test_a_design_is_told_class_by_class() -> None:
    chat = ClassReport(
        goodput_tokens_per_s=2000.0,
        output_tokens_per_s=2500.0,
        attainment_admitted=0.9,
        attainment_offered=0.8,
        ttft_s={},
        met=8,
        missed=1,
        rejected=1,
        excluded=0,
    )
    (line,) = design_lines("slomax", {"chat": chat})
    assert line == (
        "design slomax, chat: 80 % of offered and 90 % of admitted within their service level; "
        "2,000 of 2,500 output tokens/s count"
    )
