"""What callers name or claim: limits count once, rights hold without room, made-up names share one account."""

import gc
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core import expected, repeats, sessions
from tokenfleet.core.asked import SCHEDULE
from tokenfleet.core.decision import Decision
from tokenfleet.core.goodput.labels import OTHER
from tokenfleet.core.goodput.lessons import Lessons
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent
from tokenfleet.core.remembered import Remembered
from tokenfleet.core.site import pool_name

STEPS = 1000
KEPT = 200  # instead of the tens of thousands that a replica remembers


def test_a_limit_that_is_the_tenant_s_and_its_team_s_admits_all_of_it() -> None:
    """As BerriAI/litellm #34140: two paths appended one limit, and N a minute admitted half of N."""
    b = Town("b", small=1, tenant_limits={"acme": 2})
    acme = replace(b.site.policy.tenants["acme"], team="acme")
    b.site.adopt(replace(b.site.policy, tenants={**b.site.policy.tenants, "acme": acme}))
    answers = [b.place(asked(f"r{n}")) for n in range(3)]
    assert [each.reason for each in answers] == ["", "", "quota"]


def test_a_tenant_s_claims_buy_it_nothing_that_it_has_no_right_to() -> None:
    """As NVIDIA/nvcf PR #341: a client set a priority that was the gateway's to set."""
    b = Town("b", small=1)
    answer = b.decide(asked("r1", tenant="archive", declared_class="chat", session="mine")).decision
    assert answer.request_class == "batch"


def test_names_made_up_for_each_call_have_one_tenant_s_share() -> None:
    b = Town("b", small=4, tenant_limits={"globex": 5})
    b.site.adopt(replace(b.site.policy, default_tenant="globex"))
    made_up = [b.place(asked(f"r{n}", tenant=f"made-up-{n}")) for n in range(20)]
    assert sum(each.verdict == "admit" for each in made_up) == 5
    assert {each.reason for each in made_up[5:]} == {"quota"}
    assert b.place(asked("own", tenant="acme")).verdict == "admit"


def saturated() -> Town:
    b = Town("b", small=1)
    n = 0
    while b.place(asked(f"fill-{n}", cross_site=False)).verdict == "admit":
        n += 1
    return b


def stale() -> Town:
    b = saturated()
    b.now_s += 120.0  # no fact comes any more
    return b


@pytest.mark.parametrize("home", [saturated, lambda: Town("b"), stale], ids=["saturated", "empty", "stale"])
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_tenant_bound_to_the_eu_is_refused_where_others_go_to_the_us(home: Callable[[], Town], attempt: int) -> None:
    """As BerriAI/litellm PR #6234: clients limited to the EU were sent to both regions."""
    b, d = home(), Town("d", small=4)
    d.now_s = b.now_s - (60.0 if home is stale else 0.0)
    d.hears_telemetry()
    b.hears_summary_of(d)
    bound: Decision = b.decide(asked("r1", tenant="eu-bank", attempt=attempt)).decision
    assert bound.verdict in ("reject", "defer"), bound.sentence
    assert (bound.target, bound.gateways) == ("", ())
    assert "residency" in next(each.refused for each in bound.sites if each.site == "d")
    free: Decision = b.decide(asked("r2", attempt=attempt)).decision
    assert (free.verdict, free.site) == ("redirect", "d"), free.sentence
    there = d.decide(asked("r1", tenant="eu-bank", hop=1, attempt=attempt)).decision
    assert (there.verdict, there.reason) == ("reject", "not_permitted")


def told(tenant: str, model: str, site: str, request_class: str, n: int) -> OutcomeEvent:
    return OutcomeEvent(
        request=f"r{n}",
        attempt=0,
        kind="finished",
        decision=f"odd-{n}",
        tenant=tenant,
        request_class=request_class,
        model=model,
        origin="b",
        site=site,
        instance="i",
        pool=pool_name(model, site),
        at_wall_s=1.8e9,
        elapsed_s=1.0,
        ttft_s=0.1,
        prompt_tokens=1000,
        output_tokens=10,
        clock=f"clock-{n}",
        clock_s=1.0,
    )


def test_rows_of_goodput_and_lessons_are_of_the_policy_s_names_and_the_others_share_one() -> None:
    policy = Town("b").site.policy
    partition, lessons = PartitionGoodput(policy, sources=("b",)), Lessons()
    partition.caught_up("b")
    events = [told("acme", "small-chat", "b", "chat", 0)]
    for n in range(1, 5000):
        events.append(told(f"tenant-{n}", f"model-{n}", f"site-{n}", f"class-{n}", n))
    for n, event in enumerate(events):
        envelope = OutcomeEnvelope(site="b", replica="0", sent_wall_s=1.8e9, events=(event,))
        new = partition.hear("b", envelope, appended_wall_s=1.8e9, now_s=n / 1000)
        lessons.observe(new, policy)
    rows = [row for each in partition.partials(site="b", partition=0, cluster="k", now_s=60.0) for row in each.rows]
    assert {(row.request_class, row.tenant, row.pool) for row in rows} == {
        ("chat", "acme", "small-chat@b"),
        ("no_slo", OTHER, OTHER),
    }
    outputs = lessons.feedback(at_wall_s=0.0).outputs
    assert {each.tenant for each in outputs} == {"acme", ""}
    assert {each.model for each in outputs} == {"small-chat", ""}


def test_who_floods_a_table_pushes_out_its_own() -> None:
    table: Remembered[int, int] = Remembered(100)
    for n in range(30):
        table.put("honest", n, n)
    for n in range(10_000):
        table.put("flood", n, n)
    assert len(table) == 100
    assert [table.get("honest", n) for n in range(30)] == list(range(30))
    assert (table.get("flood", 0), table.get("flood", 9_999)) == (None, 9_999)
    for n in range(30, 200):
        table.put("honest", n, n)
    assert len(table) == 100
    assert table.get("flood", 9_999 - 40) is not None  # each has its half
    assert table.get("honest", 199 - 40) is not None


def test_blocks_on_their_way_are_bounded_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "KEYS_MAX", 1000)
    rng, on_the_way = Random(1), expected.Expected()
    for n in range(500):
        on_the_way.add(f"d{n}", n % 8, rng.randbytes(8 * 45), now_s=float(n) / 1000)
    assert (len(on_the_way), len(on_the_way.holders)) == (22, 990)
    for n in range(500):
        on_the_way.drop(f"d{n}")
    assert (on_the_way.holders, on_the_way.slots) == ({}, 0)


def flooded(b: Town, first: int, rng: Random) -> None:
    """Requests of ever new names, prompts and conversations that are placed and end; some of them are odd reports."""
    for n in range(first, first + STEPS):
        b.now_s += 0.1
        if n % 10 == 0:
            b.hears_telemetry()
            b.site.advance(0, b.now_s, live=True)
        request = asked(
            f"r{n}",
            tenant=f"tenant-{n}",
            session=f"talk-{n}",
            prompt_tokens=2048,
            block_keys=rng.randbytes(8 * 8),
            block_tokens=256,
            idempotency_key=f"key-{n}",
        )
        decision = b.place(request)
        assert decision.verdict == "admit", decision.sentence
        b.site.repeats.charged(request)
        b.site.repeats.answer(request, SCHEDULE, decision, now_s=b.now_s)
        b.hears_outcome(decision, "first_token", ttft_s=0.05)
        b.hears_outcome(decision, "finished", ttft_s=0.05, prompt_tokens=2048, output_tokens=10)
        odd = told(f"tenant-{n}", f"model-{n}", f"site-{n}", f"class-{n}", n)
        b.site.settled(replace(odd, instance=f"instance-{n}"), now_s=b.now_s)


def test_ever_new_names_keep_the_memory_of_a_site_bounded_and_push_no_configured_one_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As llm-d/llm-d-router #1625 and vllm-project/production-stack #687: names of callers grew tables until OOM."""
    monkeypatch.setattr(sessions, "SESSIONS_MAX", KEPT)
    monkeypatch.setattr(repeats, "ANSWERS_MAX", KEPT)
    monkeypatch.setattr(repeats, "CHARGED_MAX", KEPT)
    monkeypatch.setattr("tokenfleet.core.slomax.idempotency.KEYS_MAX", KEPT)
    b, rng = Town("b", small=4), Random(1)
    b.site.adopt(replace(b.site.policy, default_tenant="globex"))
    mine = b.place(asked("mine", session="talk"))
    b.site.repeats.charged(asked("mine"))
    tracemalloc.start()
    try:
        flooded(b, 0, rng)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        flooded(b, STEPS, rng)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 200_000, f"{after - before:,} bytes more after {STEPS:,} more names"
    assert b.site.sessions.last("acme", "talk") == mine.target
    assert b.site.repeats.was_charged(asked("mine"))
    assert (len(b.site.sessions), len(b.site.ledger.running_by_tenant())) == (KEPT, 0)
    assert 0 < len(b.site.repeats) <= KEPT
