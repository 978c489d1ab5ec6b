"""Services: what a caller may ask over real gRPC, what a bad question gets for an answer, and what is left of it."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from tests.adapters.desks import Office, details_of, event, request
from tests.core.fleets import Town
from tokenfleet.adapters.desk import DECISIONS_COUNTED
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.client.policies import refuse_no_newer
from tokenfleet.core.asked import DISPATCH
from tokenfleet.core.errors import PolicyError
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, outcomes_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

SERVE = "/tokenfleet.wire.v1.Scheduler/Schedule"
KEYS = b"12345678"


async def schedule(channel: grpc.aio.Channel, asked: decision_pb2.Request, **how: Any) -> decision_pb2.Decision:
    stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
    return (await stub.Schedule(scheduler_pb2.ScheduleRequest(request=asked, **how))).decision


async def report(channel: grpc.aio.Channel, *batches: list[outcomes_pb2.OutcomeEvent]) -> outcomes_pb2.ReportResponse:
    stub: Any = outcomes_pb2_grpc.OutcomesStub(channel)
    return await stub.Report(iter([outcomes_pb2.ReportRequest(events=batch) for batch in batches]))


async def test_an_unknown_name_is_not_found_with_the_list_of_what_exists_and_leaves_nothing() -> None:
    office = Office(small=1)
    unknown = {
        "model": (request(model="gpt-9"), "UNKNOWN_MODEL", "large-chat, small-chat"),
        "tenant": (request(tenant="nobody"), "UNKNOWN_TENANT", "acme, archive"),
        "origin": (request(origin="mars", hop=1), "UNKNOWN_SITE", "a, b, c, d"),
    }
    async with office.serving() as (_, channel):
        for field, (asked, reason, there_is) in unknown.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await schedule(channel, asked)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND
            details = details_of(caught.value)
            info, bad = details["ErrorInfo"], details["BadRequest"]
            assert isinstance(info, error_details_pb2.ErrorInfo)
            assert isinstance(bad, error_details_pb2.BadRequest)
            assert (info.reason, info.domain, info.metadata["field"]) == (reason, "tokenfleet", field)
            assert bad.field_violations[0].field == field
            assert there_is in bad.field_violations[0].description
    assert office.outbox.put_in == []


BAD_REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no id": ("id", {"request_id": ""}),
    "an id of 257 bytes": ("id", {"request_id": "x" * 257}),
    "an id of 1 MB": ("id", {"request_id": "x" * 1_000_000}),
    "an id of 129 two-byte letters": ("id", {"request_id": "é" * 129}),
    "an id that NFC makes too long": ("id", {"request_id": "\u0958" * 85}),
    "NUL": ("id", {"request_id": "a\x00b"}),
    "a new line": ("tenant", {"tenant": "acme\nERROR forged"}),
    "an escape sequence": ("session", {"session": "\x1b[2J"}),
    "a line separator": ("task", {"task": "a\u2028b"}),
    "a change of direction": ("model", {"model": "small\u202etahc"}),
    "an isolate": ("data_class", {"data_class": "\u2067eu"}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "max_tokens negative": ("max_tokens", {"max_tokens": -1}),
    "prompt_tokens negative": ("prompt_tokens", {"prompt_tokens": -1}),
    "prompt_tokens 2^31": ("prompt_tokens", {"prompt_tokens": 2**31}),
    "16,385 keys": ("block_keys", {"block_keys": KEYS * 16_385, "block_tokens": 16, "prompt_tokens": 10**6}),
    "7 bytes of keys": ("block_keys", {"block_keys": b"1234567", "block_tokens": 16}),
    "keys without block_tokens": ("block_tokens", {"block_keys": KEYS}),
    "more keys than prompt": ("block_keys", {"block_keys": KEYS * 5, "block_tokens": 256}),
    "a deadline that is no number": ("deadline_s", {"deadline_s": float("nan")}),
    "an infinite deadline": ("deadline_s", {"deadline_s": float("inf")}),
    "a deadline in the past": ("deadline_s", {"deadline_s": -1.0}),
    "an elapsed time that is no number": ("elapsed_s", {"elapsed_s": float("nan")}),
    "an infinite elapsed time": ("elapsed_s", {"elapsed_s": float("inf")}),
    "a negative elapsed time": ("elapsed_s", {"elapsed_s": -0.1}),
    "an elapsed time of 10^300 s": ("elapsed_s", {"elapsed_s": 1e300}),
    "attempt huge": ("attempt", {"attempt": 2**32 - 1}),
    "hop 2": ("hop", {"hop": 2}),
    "a negative upload": ("upload_bytes", {"upload_bytes": -1}),
    "65 sites tried": ("sites_tried", {"sites_tried": ["c"] * 65}),
    "an empty site tried": ("sites_tried", {"sites_tried": [""]}),
    "an unknown class": ("declared_class", {"declared_class": "gold"}),
    "another site's request without a redirect": ("origin", {"origin": "c"}),
}


async def test_a_field_that_can_not_be_used_is_named_and_leaves_nothing() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        for name, (field, facts) in BAD_REQUESTS.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await schedule(channel, request(**facts))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
            info = details_of(caught.value)["ErrorInfo"]
            assert isinstance(info, error_details_pb2.ErrorInfo)
            assert (info.reason, info.metadata["field"]) == ("BAD_REQUEST", field), name
            assert len(caught.value.details() or "") < 200, name
    assert office.outbox.put_in == []
    assert len(office.town.site.ledger) == 0


GOOD_REQUESTS: dict[str, dict[str, Any]] = {
    "no budget": {},
    "max_tokens 1": {"max_tokens": 1},
    "max_tokens 2^31": {"max_tokens": 2**31},
    "max_tokens 2^63-1": {"max_tokens": 2**63 - 1},
    "an empty prompt": {"prompt_tokens": 0},
    "one token": {"prompt_tokens": 1},
    "10,000 keys": {"block_keys": KEYS * 10_000, "block_tokens": 8, "prompt_tokens": 80_000},
    "an id of 256 bytes": {"request_id": "x" * 256},
    "an id that NFC makes short enough": {"request_id": "e\u0301" * 128},
    "an upload of 2^63-1 bytes": {"upload_bytes": 2**63 - 1},
    "a tiny deadline": {"deadline_s": 5e-324},
}


@pytest.mark.parametrize("name", GOOD_REQUESTS)
async def test_what_is_unusual_and_can_be_used_is_decided_recorded_and_readable(name: str) -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        decision = await schedule(channel, request(**GOOD_REQUESTS[name]))
    assert decision.verdict in (decision_pb2.VERDICT_ADMIT, decision_pb2.VERDICT_REJECT)
    assert len(office.outbox.of("decisions")) == 1


async def test_the_two_forms_of_an_accented_id_are_one_request() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        first = await schedule(channel, request("caf\u00e9"))
        assert (await schedule(channel, request("cafe\u0301"))).id == first.id
    assert first.request == "caf\u00e9"


async def test_a_call_without_a_request_and_bytes_that_are_no_message_are_refused() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="id: is empty"):
            await stub.Schedule(scheduler_pb2.ScheduleRequest())
        raw: Any = channel.unary_unary(SERVE)
        surrogate = b"\x0a\x05\x0a\x03\xed\xa0\x80"  # an id that is a lone surrogate: not UTF-8
        for value in (b"\xff\xff\xff", surrogate):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await raw(value)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert "Traceback" not in (caught.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(b"\x00" * (3 << 20))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tokenfleet.wire.v1.Scheduler/Guess")(b"")  # pyright: ignore[reportUnknownMemberType]
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert (await schedule(channel, request())).verdict == decision_pb2.VERDICT_ADMIT


async def test_before_the_tables_are_read_every_question_is_unavailable_and_says_when_to_ask_again() -> None:
    office = Office(small=1)
    office.ready = False
    async with office.serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await schedule(channel, request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        retry = details_of(caught.value)["RetryInfo"]
        assert isinstance(retry, error_details_pb2.RetryInfo)
        assert retry.retry_delay.seconds == 1
        office.ready = True
        assert (await schedule(channel, request())).verdict == decision_pb2.VERDICT_ADMIT


async def test_a_repeated_call_gets_the_same_answer_and_counts_once() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        first = await schedule(channel, request())
        again = await schedule(channel, request())
        assert again == first
        retry = await schedule(channel, request(attempt=1))
        assert retry.id != first.id
        with pytest.raises(grpc.aio.AioRpcError, match="another prompt or model") as caught:
            await schedule(channel, request(prompt_tokens=7))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        other = await schedule(channel, request(tenant="globex"))
        assert (other.tenant, other.id) not in [("acme", first.id), ("globex", first.id)]
    assert len(office.outbox.of("decisions")) == 3


def counted() -> float:
    """All decisions that the metrics of this process count."""
    return sum(sample.value for family in DECISIONS_COUNTED.collect() for sample in family.samples)


async def test_a_dry_run_leaves_no_trace() -> None:
    office = Office(small=2, tenant_limits={"acme": 1})
    before = counted()
    async with office.serving() as (_, channel):
        for _ in range(3):
            decision = await schedule(channel, request(), dry_run=True)
            assert (decision.verdict, decision.dry_run) == (decision_pb2.VERDICT_ADMIT, True)
        assert counted() == before
        assert office.outbox.put_in == []
        assert len(office.town.site.ledger) == 0
        assert (await schedule(channel, request())).verdict == decision_pb2.VERDICT_ADMIT
        over = await schedule(channel, request("r2"), dry_run=True)
        assert over.reason == decision_pb2.REASON_QUOTA
    assert office.outbox.of("outcomes") == []


async def test_one_bad_event_of_a_report_is_named_and_the_others_are_kept() -> None:
    office = Office(small=1)
    nan = float("nan")
    bad = [
        event(kind=77),
        event(kind=outcomes_pb2.OUTCOME_KIND_UNSPECIFIED),
        event(kind=outcomes_pb2.OUTCOME_KIND_REJECTED),
        event(""),
        event(tenant="a\x00"),
        event(elapsed_s=nan),
        event(ttft_s=-1.0),
        event(tpot_s=float("inf")),
        event(output_tokens=-1),
        event(prompt_tokens=2**63 - 1),
        event(attempt=2**31),
        event(clock="c", clock_s=nan),
    ]
    async with office.serving() as (_, channel):
        response = await report(channel, [event("good-1"), *bad], [event("good-2")])
    assert response.accepted == 2
    assert [refused.index for refused in response.refused] == list(range(1, len(bad) + 1))
    assert "finished" in response.refused[0].problem  # what may be said is told
    assert [e.request for envelope in office.outbox.of("outcomes") for e in envelope.events] == ["good-1", "good-2"]


async def test_a_report_that_a_full_disk_lost_is_not_acknowledged_and_decisions_go_on() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        admitted = await schedule(channel, request())
        office.outbox.full = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await report(channel, [event(decision=admitted.id)])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # the gateway keeps the event and asks again
        assert "RetryInfo" in details_of(caught.value)
        assert (await schedule(channel, request("r2"))).verdict == decision_pb2.VERDICT_ADMIT
        office.outbox.full = False
        assert (await report(channel, [event(decision=admitted.id)])).accepted == 1
    assert [e.request for envelope in office.outbox.of("outcomes") for e in envelope.events] == ["r1"]


async def test_a_time_that_is_none_is_replaced_by_the_time_of_receipt() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        await report(channel, [event(f"r{n}", at_wall_s=at) for n, at in enumerate((float("nan"), -1.0, 1e300))])
    told = [e for envelope in office.outbox.of("outcomes") for e in envelope.events]
    assert all(abs(e.at_wall_s - time.time()) < 600 for e in told)


async def test_a_report_of_strange_names_is_recorded_in_one_form() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        await report(channel, [event(model="mode\u0301le", site="re\u0301gion", instance="i")])
    [told] = [e for envelope in office.outbox.of("outcomes") for e in envelope.events]
    assert told.pool == f"{told.model}@{told.site}" == "mod\u00e9le@r\u00e9gion"


async def test_a_call_whose_deadline_has_passed_does_no_work() -> None:
    office = Office(small=1)
    async with office.serving() as (server, _):
        code: list[grpc.StatusCode] = []

        def ask() -> None:
            with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
                grpc.channel_ready_future(channel).result(timeout=30.0)
                connected.set()
                standing.wait()
                try:
                    stub.Schedule(scheduler_pb2.ScheduleRequest(request=request()), timeout=0.2)
                except grpc.RpcError as error:
                    code.append(error.code())  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]

        connected, standing = threading.Event(), threading.Event()
        asking = asyncio.create_task(asyncio.to_thread(ask))
        while not connected.is_set():
            await asyncio.sleep(0.01)
        standing.set()
        time.sleep(1.0)  # noqa: ASYNC251  the loop stands still beyond the call's deadline
        await asking
        await asyncio.sleep(0.1)
    assert code == [grpc.StatusCode.DEADLINE_EXCEEDED]
    assert office.outbox.put_in == []


async def test_a_cancelled_call_hurts_nobody_and_its_repeat_is_answered() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)

        async def endless() -> AsyncIterator[scheduler_pb2.ScheduleRequest]:
            yield scheduler_pb2.ScheduleRequest(request=request("r1"))
            await asyncio.Event().wait()

        call = stub.ScheduleStream(endless())
        first = (await anext(aiter(call))).decision
        call.cancel()
        assert (await schedule(channel, request("r1"))).id == first.id
        for n in range(20):
            task = asyncio.ensure_future(stub.Schedule(scheduler_pb2.ScheduleRequest(request=request(f"c{n}"))))
            await asyncio.sleep(0)
            task.cancel()
        assert (await schedule(channel, request("r2"))).verdict == decision_pb2.VERDICT_ADMIT


async def test_a_policy_that_is_not_newer_than_the_one_in_force_is_not_published(tmp_path: Path) -> None:
    office = Office(small=1)
    file = tmp_path / "policy.toml"
    async with office.serving() as (server, _):
        gateways = {"b": (f"127.0.0.1:{server.port}",)}
        file.write_text(policy_text())
        with pytest.raises(PolicyError, match="is not above 1, which is in force"):
            await refuse_no_newer(file, gateways)
        file.write_text(policy_text().replace("revision = 1", "revision = 2", 1))
        await refuse_no_newer(file, gateways)


async def test_what_goes_to_another_site_is_told_to_the_other_replicas() -> None:
    office = Office()
    office.town.hears_summary_of(Town("c", small=1))
    decision = office.desk.decide(request("r1"), DISPATCH, dry_run=False)
    assert (decision.verdict, decision.site) == ("redirect", "c")
    [envelope] = office.outbox.of("placements")
    assert (envelope.n, envelope.events) == (1, ())
    assert [(sent.request, sent.site) for sent in envelope.sends] == [("r1", "c")]
