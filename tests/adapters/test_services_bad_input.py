"""What a caller can send that makes no sense, over real gRPC: each gets a typed answer or is accounted for."""

from datetime import datetime, timedelta, timezone
from typing import Any

import grpc
import grpc.aio
import pytest
from msgspec.structs import replace

from tests.adapters.desks import Office, details_of, event, request
from tests.adapters.test_services import report, schedule
from tokenfleet.adapters.audit_service import SERVICE_NAME, AuditService, register
from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.grpc_server import GrpcServer
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.table import GoodputTable
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.records import OutcomeEnvelope
from tokenfleet.wire.v1 import audit_pb2, audit_pb2_grpc, decision_pb2, outcomes_pb2

REJECT = decision_pb2.VERDICT_REJECT


async def test_a_class_that_the_tenant_is_not_entitled_to_is_refused_or_the_next_that_it_may_use() -> None:
    office = Office(small=1)
    site = office.town.site
    only_chat = replace(site.policy.tenants["globex"], classes=("chat",))
    site.adopt(replace(site.policy, tenants={**site.policy.tenants, "globex": only_chat}))
    async with office.serving() as (_, channel):
        refused = await schedule(channel, request("r1", tenant="globex", declared_class="batch"))
        capped = await schedule(channel, request("r2", tenant="archive", declared_class="chat"))
    assert (refused.verdict, refused.reason) == (REJECT, decision_pb2.REASON_FILTERED_BY_POLICY)
    assert "it may use chat" in refused.detail
    assert capped.request_class == "batch"
    assert "not open to the tenant" in capped.admission.rule
    assert [e.kind for envelope in office.outbox.of("outcomes") for e in envelope.events] == ["rejected"]


async def test_a_deadline_that_has_passed_is_infeasible_and_counts_as_offered() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        refused = await schedule(channel, request("r1", deadline_s=1.0, elapsed_s=1.5, local_only=True))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await schedule(channel, request("r2", deadline_s=0.0))
    assert (refused.verdict, refused.reason) == (REJECT, decision_pb2.REASON_INFEASIBLE)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    [outcome] = [e for envelope in office.outbox.of("outcomes") for e in envelope.events]
    assert (outcome.request, outcome.kind, outcome.stop) == ("r1", "rejected", "infeasible")


@pytest.mark.parametrize("term", ["ttft_s", "tpot_s", "deadline_s"])
def test_a_policy_with_a_service_level_of_0_is_refused_by_key(term: str) -> None:
    text = f"[classes.chat]\n{term} = 0.0\n[classes.long]\n[classes.batch]\n[tenants]\n[models]\n[sites]\n"
    with pytest.raises(PolicyError, match=rf"classes.*{term}|{term}|> 0"):
        parse_policy(text, source="mine")


@pytest.mark.parametrize("clock", ["", "gateway-1"])
@pytest.mark.parametrize("off_s", [-30.0, 30.0, -2e9, 2.4e9])
async def test_a_reporter_whose_clock_is_wrong_is_counted_when_the_broker_took_its_report(
    off_s: float, clock: str
) -> None:
    """30 s slow and fast, and stamps of about 1970 and 2100."""
    office = Office(small=1)
    now_s = wall_s()
    stamp_s = max(now_s + off_s, 1.0)
    async with office.serving() as (_, channel):
        first = await schedule(channel, request("r1"))
        told = {"ttft_s": 0.1, "output_tokens": 3, "at_wall_s": stamp_s, "clock": clock}
        assert (await report(channel, [event("r1", decision=first.id, instance=first.target, **told)])).accepted == 1
        assert (await schedule(channel, request("r2"))).verdict == decision_pb2.VERDICT_ADMIT
    [envelope] = office.outbox.of("outcomes")
    [row] = rows_of(envelope, appended_wall_s=now_s)
    assert (row.met, row.start_s) == (1, now_s // 10.0 * 10.0)


def rows_of(envelope: OutcomeEnvelope, *, appended_wall_s: float) -> list[Any]:
    """The rows of 10 s that goodput makes of one envelope."""
    policy = Office().town.site.policy
    partition, table = PartitionGoodput(policy, sources=("b",)), GoodputTable()
    partition.caught_up("b")
    partition.hear("b", envelope, appended_wall_s=appended_wall_s, now_s=0.0)
    for partial in partition.partials(site="b", partition=0, cluster="k", now_s=0.0):
        table.hear(partial)
    rows = table.published(cluster="k", site="b", partition=0)
    return [row for row in rows if row.width_s == 10.0 and row.met]


async def test_the_same_key_with_another_body_is_a_typed_conflict() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        await schedule(channel, request("r1", idempotency_key="k"))
        other = await schedule(channel, request("r2", idempotency_key="k", prompt_tokens=7))
    assert (other.verdict, other.reason) == (REJECT, decision_pb2.REASON_KEY_CONFLICT)


async def test_an_end_of_a_request_that_nobody_asked_for_and_one_before_its_decision_are_kept_and_harm_nothing() -> (
    None
):
    office = Office(small=1)
    async with office.serving() as (_, channel):
        early = event("r1", decision="b-0-1-1", instance="b-small-0")  # the name that its decision will have
        answer = await report(channel, [event("never-asked"), early])
        assert (answer.accepted, len(answer.refused)) == (2, 0)
        decision = await schedule(channel, request("r1"))
        assert (decision.verdict, decision.id) == (decision_pb2.VERDICT_ADMIT, "b-0-1-1")
        assert len(office.town.site.ledger) == 0  # it has ended, whichever came first
        assert (await schedule(channel, request("r2"))).verdict == decision_pb2.VERDICT_ADMIT
        assert len(office.town.site.ledger) == 1
    told = [e.request for envelope in office.outbox.of("outcomes") for e in envelope.events]
    assert told == ["never-asked", "r1"]


async def test_tokens_that_are_reported_twice_are_kept_twice_and_counted_once() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        first = await schedule(channel, request("r1"))
        end = event("r1", decision=first.id, instance=first.target, ttft_s=0.1, output_tokens=3)
        assert (await report(channel, [end, end], [end])).accepted == 3
    events = tuple(e for envelope in office.outbox.of("outcomes") for e in envelope.events)
    assert len(events) == 3
    [envelope, *_] = office.outbox.of("outcomes")
    [row] = rows_of(replace(envelope, events=events), appended_wall_s=wall_s())
    assert (row.met, row.goodput_tokens) == (1, 3)
    assert len(office.town.site.ledger) == 0


async def test_an_event_of_no_kind_or_with_a_time_below_zero_is_named_and_the_others_are_kept() -> None:
    office = Office(small=1)
    bad = [event("r1", kind=outcomes_pb2.OUTCOME_KIND_UNSPECIFIED), event("r2", elapsed_s=-1.0), event("r3")]
    async with office.serving() as (_, channel):
        answer = await report(channel, bad)
    assert (answer.accepted, [each.index for each in answer.refused]) == (1, [0, 1])


class Store:
    """An audit store without a database: keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, float | None, float | None]] = []

    async def goodput_windows(self, *, width_s: float, since_s: Any, until_s: Any, **_: Any) -> list[dict[str, object]]:
        self.asked.append((width_s, since_s, until_s))
        return []


async def test_a_day_of_any_time_zone_is_made_of_whole_windows_and_a_window_of_no_width_is_refused() -> None:
    store: Any = Store()
    zones = [timezone(timedelta(minutes=minutes)) for minutes in range(-12 * 60, 14 * 60 + 1, 15)]
    midnights = [datetime(2026, 11, 30, tzinfo=zone).timestamp() for zone in zones]
    async with (
        GrpcServer("127.0.0.1:0", registers=[register(AuditService(store))], names=(SERVICE_NAME,), reflect=False) as s,
        grpc.aio.insecure_channel(f"127.0.0.1:{s.port}") as channel,
    ):
        stub: Any = audit_pb2_grpc.AuditStub(channel)
        for since_s in midnights:
            for width_s in (10.0, 60.0, 300.0):
                assert since_s % width_s == 0.0
            day = audit_pb2.GoodputRequest(window_s=300.0, since_wall_s=since_s, until_wall_s=since_s + 86_400.0)
            await stub.Goodput(day)
        assert store.asked == [(300.0, since_s, since_s + 86_400.0) for since_s in midnights]
        bad: dict[str, audit_pb2.GoodputRequest] = {
            "window_s": audit_pb2.GoodputRequest(),
            "until_wall_s": audit_pb2.GoodputRequest(window_s=60.0, since_wall_s=2.0, until_wall_s=1.0),
            "since_wall_s": audit_pb2.GoodputRequest(window_s=60.0, since_wall_s=float("nan")),
        }
        for field, asked in bad.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Goodput(asked)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert field in str(details_of(caught.value)["BadRequest"])
