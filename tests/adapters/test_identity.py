"""Who may call: each call of each service, by each role, for its own tenant and for another's."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec.structs import replace

from tests.adapters.desks import Office, details_of, event, request
from tests.core.fleets import Town, asked
from tokenfleet.adapters.audit_service import AuditService, register
from tokenfleet.adapters.credentials import Credentials, token_sha256
from tokenfleet.adapters.identity import ROLES_OF
from tokenfleet.adapters.safe_text import safe_json
from tokenfleet.core.identity import ROLES
from tokenfleet.wire.v1 import audit_pb2, decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

METHODS: dict[str, MethodDescriptor] = {
    f"{service.name}/{method.name}": method
    for file in (audit_pb2, outcomes_pb2, scheduler_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
MAY: dict[str, set[str]] = {
    "gateway": {
        "Scheduler/Schedule",
        "Scheduler/ScheduleStream",
        "SLOMax/Admit",
        "FleetMind/Dispatch",
        "TokenPilot/Route",
        "TokenPilot/RouteStream",
        "Outcomes/Report",
    },
    "operator": {"FleetMind/Sites", "TokenPilot/WhatIf", "Audit/Find", "Audit/Explain", "Audit/Goodput"},
    "auditor": {"Audit/Find", "Audit/Explain", "Audit/Goodput"},
}
OF_NO_TENANT = {"FleetMind/Sites"}
DENIED = grpc.StatusCode.PERMISSION_DENIED


class Store:
    """An audit store without a database: two tenants' requests, and whose rows were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        town = Town("b", small=1)
        of = {tenant: town.place(asked(f"of-{tenant}", tenant=tenant)) for tenant in ("acme", "globex")}
        self.decisions = {each.request: [safe_json(each)] for each in of.values()}
        self.outcomes = {each.request: [safe_json(town.hears_outcome(each, "finished"))] for each in of.values()}
        both = replace(town.hears_outcome(of["acme"], "finished"), tenant="globex")
        self.outcomes["of-acme"].append(safe_json(both))  # a request of globex bears the same id

    async def decisions_like(self, *, filters: tuple[str, ...], **_: Any) -> list[str]:
        self.asked.append(filters[0])
        return []

    async def told_of(self, name: str) -> tuple[list[str], list[str]]:
        return self.decisions.get(name, []), self.outcomes.get(name, [])

    async def goodput_windows(self, *, tenant: str, **_: Any) -> list[dict[str, object]]:
        self.asked.append(tenant)
        return []


def credentials(folder: Path, **entries: dict[str, Any]) -> Credentials:
    """Callers by name, each with its name for a token."""
    file = folder / "credentials.toml"
    lines: list[str] = []
    for name, entry in entries.items():
        lines += [f"[credentials.{name}]", f'token_sha256 = "{token_sha256(name)}"', f"roles = {entry['roles']}"]
        lines += [f"tenants = {entry['tenants']}"] if "tenants" in entry else []
    file.write_text("\n".join(lines))
    return Credentials(file)


def shown(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def question(method: MethodDescriptor, tenant: str) -> Message:
    """What the call takes, of a tenant."""
    message: Any = GetMessageClass(method.input_type)()
    fields = method.input_type.fields_by_name
    if "request" in fields:
        message.request.CopyFrom(request(f"r-{method.full_name}", tenant=tenant))
    if "requests" in fields:
        message.requests.add(request=request(f"r-{method.full_name}", tenant=tenant))
    if "events" in fields:
        message.events.append(event("r1", tenant=tenant))
    if "tenant" in fields:
        message.tenant = tenant
    if "request_id" in fields:
        message.request_id = f"of-{tenant}"
    if "window_s" in fields:
        message.window_s = 60.0
    return message


async def answers(
    channel: grpc.aio.Channel, name: str, message: Message, metadata: tuple[tuple[str, str], ...] | None
) -> list[Any]:
    """What one message to the call brings."""
    method = METHODS[name]
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = GetMessageClass(method.output_type).FromString
    call: Any = getattr(channel, kind)(path, request_serializer=bytes_of, response_deserializer=read)
    sent = iter([message]) if method.client_streaming else message
    if method.server_streaming:
        return [answer async for answer in call(sent, metadata=metadata, timeout=10.0)]
    return [await call(sent, metadata=metadata, timeout=10.0)]


def bytes_of(message: Message) -> bytes:
    return message.SerializeToString()


def problems(messages: Iterable[Any]) -> Iterator[int]:
    """The codes of what was refused inside answers."""
    for message in messages:
        if isinstance(message, scheduler_pb2.ScheduleResponse) and message.HasField("error"):
            yield message.error.code
        if isinstance(message, scheduler_pb2.RouteStreamResponse):
            yield from (each.error.code for each in message.answers if each.HasField("error"))
        if isinstance(message, outcomes_pb2.ReportResponse):
            yield from (DENIED.value[0] for each in message.refused if "speaks for" in each.problem)


async def code_of(channel: grpc.aio.Channel, name: str, tenant: str, token: str) -> grpc.StatusCode:
    """How one call ended, as a status."""
    try:
        told = await answers(channel, name, question(METHODS[name], tenant), shown(token) if token else None)
    except grpc.aio.AioRpcError as error:
        if "execute_batch" in (
            error.debug_error_string() or ""
        ):  # it was refused before gRPC had written: who knows why
            return await code_of(channel, name, tenant, token)
        _ = details_of(error)["ErrorInfo"]  # whatever is refused says why
        return error.code()
    codes = {code: status for status in grpc.StatusCode for code in status.value[:1]}
    return next((codes[code] for code in problems(told)), grpc.StatusCode.OK)


def test_each_call_there_is_has_its_roles_and_no_other_has() -> None:
    assert set(ROLES_OF) == set(METHODS)
    assert {role: {name for name, roles in ROLES_OF.items() if role in roles} for role in ROLES} == MAY


@pytest.mark.parametrize("name", METHODS)
async def test_a_call_is_answered_to_a_caller_of_its_role_for_its_own_tenant_alone(name: str, tmp_path: Path) -> None:
    store: Any = Store()
    entries = {role: {"roles": [role], "tenants": ["acme"]} for role in ROLES}
    office = Office(small=1)
    async with office.serving(credentials(tmp_path, **entries), further=(register(AuditService(store)),)) as (
        _,
        channel,
    ):
        for role in ROLES:
            own, foreign = [await code_of(channel, name, tenant, role) for tenant in ("acme", "globex")]
            if name not in MAY[role]:
                assert (own, foreign) == (DENIED, DENIED), role
            elif name in OF_NO_TENANT:
                assert own == grpc.StatusCode.OK
            elif name == "Audit/Explain":  # a foreign request is as one that there never was
                assert (own, foreign) == (grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)
            else:
                assert (own, foreign) == (grpc.StatusCode.OK, DENIED)
        for token in ("", "nobody's"):
            assert await code_of(channel, name, "acme", token) is grpc.StatusCode.UNAUTHENTICATED
    assert "globex" not in store.asked
    assert {each.tenant for records in office.outbox.of("decisions") for each in records.decisions} <= {"acme"}
    assert {each.tenant for records in office.outbox.of("outcomes") for each in records.events} <= {"acme"}


async def test_who_speaks_for_one_tenant_need_not_name_it_and_for_several_must(tmp_path: Path) -> None:
    known = credentials(
        tmp_path,
        one={"roles": ["gateway", "auditor"], "tenants": ["acme"]},
        two={"roles": ["gateway"], "tenants": ["acme", "globex"]},
        all={"roles": ["gateway", "auditor"]},
    )
    store: Any = Store()
    office = Office(small=1)
    async with office.serving(known, further=(register(AuditService(store)),)) as (_, channel):
        schedule = scheduler_pb2.ScheduleRequest(request=request("r1", tenant=""))
        [answer] = await answers(channel, "Scheduler/Schedule", schedule, shown("one"))
        assert answer.decision.tenant == "acme"
        assert await code_of(channel, "Scheduler/Schedule", "", "two") is DENIED
        for tenant in ("acme", "globex"):
            assert await code_of(channel, "TokenPilot/RouteStream", tenant, "two") is grpc.StatusCode.OK
        assert await code_of(channel, "Scheduler/Schedule", "eu-bank", "two") is DENIED
        assert await code_of(channel, "Scheduler/Schedule", "eu-bank", "all") is grpc.StatusCode.OK
        await answers(channel, "Audit/Find", audit_pb2.FindRequest(), shown("one"))
        await answers(channel, "Audit/Find", audit_pb2.FindRequest(), shown("all"))
    assert store.asked == ["acme", ""]


async def test_of_an_id_that_two_tenants_use_each_is_told_its_own_part(tmp_path: Path) -> None:
    known = credentials(
        tmp_path, acme={"roles": ["auditor"], "tenants": ["acme"]}, globex={"roles": ["auditor"], "tenants": ["globex"]}
    )
    store: Any = Store()
    async with Office().serving(known, further=(register(AuditService(store)),)) as (_, channel):
        for tenant, decisions in (("acme", 1), ("globex", 0)):
            explain = audit_pb2.ExplainRequest(request_id="of-acme")
            [told] = await answers(channel, "Audit/Explain", explain, shown(tenant))
            assert (len(told.decisions), [each.tenant for each in told.outcomes]) == (decisions, [tenant])


async def test_no_tenant_ends_what_runs_as_another_s(tmp_path: Path) -> None:
    known = credentials(
        tmp_path, acme={"roles": ["gateway"], "tenants": ["acme"]}, globex={"roles": ["gateway"], "tenants": ["globex"]}
    )
    office = Office(small=1)
    async with office.serving(known) as (_, channel):
        schedule = scheduler_pb2.ScheduleRequest(request=request("r1"))
        [answer] = await answers(channel, "Scheduler/Schedule", schedule, shown("acme"))
        placed = answer.decision
        ends = [
            event("r2", tenant="globex", decision=placed.id, instance=placed.target),
            event("r1", tenant="globex", decision="b-0-1-999", instance=placed.target),
        ]
        [refused] = await answers(channel, "Outcomes/Report", outcomes_pb2.ReportRequest(events=ends), shown("globex"))
        assert (refused.accepted, len(refused.refused)) == (0, 2)
        assert placed.id in office.town.site.ledger
        end = event("r1", tenant="", decision=placed.id, instance=placed.target)
        [taken] = await answers(channel, "Outcomes/Report", outcomes_pb2.ReportRequest(events=[end]), shown("acme"))
        assert taken.accepted == 1
        assert placed.id not in office.town.site.ledger


async def test_a_request_of_a_stream_for_another_tenant_harms_no_other(tmp_path: Path) -> None:
    known = credentials(tmp_path, acme={"roles": ["gateway"], "tenants": ["acme"]})
    asked_for = ["acme", "globex", ""]
    requests = [
        scheduler_pb2.RouteRequest(request=request(f"r{n}", tenant=tenant)) for n, tenant in enumerate(asked_for)
    ]
    async with Office(small=1).serving(known) as (_, channel):
        batch = scheduler_pb2.RouteStreamRequest(requests=requests)
        [told] = await answers(channel, "TokenPilot/RouteStream", batch, shown("acme"))
    first, other, last = told.answers
    assert (first.decision.tenant, last.decision.tenant) == ("acme", "acme")
    assert (other.error.code, other.error.reason, other.error.field) == (7, "FOREIGN_TENANT", "tenant")


async def test_health_is_told_to_everybody_and_a_refusal_names_the_remedy(tmp_path: Path) -> None:
    known = credentials(tmp_path, audit={"roles": ["auditor"]})
    async with Office(small=1).serving(known) as (server, channel):
        await server.serving(True)
        health: Any = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == health_pb2.HealthCheckResponse.SERVING
        stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        for metadata, words in (
            (None, "authorization: Bearer TOKEN"),
            (shown("x" * 2000), "ask the operator for a credential"),
            ((("authorization", "audit"),), "ask the operator for a credential"),
            (shown("audit"), "audit may not call Scheduler/Schedule, that takes a role of: gateway"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words):
                await stub.Schedule(scheduler_pb2.ScheduleRequest(), metadata=metadata)


async def test_without_credentials_everybody_may_ask_for_everybody_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Office(small=1).serving() as (_, channel):
        assert sum("TOKENFLEET_CREDENTIALS is not set" in line for line in caplog.messages) == 1
        for tenant in ("acme", "globex"):
            [told] = await answers(
                channel, "Scheduler/Schedule", question(METHODS["Scheduler/Schedule"], tenant), shown("whoever")
            )
            assert told.decision.verdict == decision_pb2.VERDICT_ADMIT
            assert told.decision.tenant == tenant
