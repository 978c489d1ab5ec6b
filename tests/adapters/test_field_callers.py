"""What a caller sends beyond its rights is ignored or refused, and what it makes up grows no metric."""

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from tests.adapters.desks import Office, event, request
from tokenfleet.core.asked import SCHEDULE
from tokenfleet.core.errors import BadRequestError
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

NAMES = 2000
CLAIMS = b"".join(
    [
        b"\xa0\x06\x64",  # field 100, a number: a priority of 100
        b"\xaa\x06\x06random",  # field 101, a text: another fairness id for each call
        b"\xb2\x06\x06globex",  # field 102: a tenant
    ]
)
BUDGET = b"\x38"  # the tag of max_tokens


def with_bytes(raw: bytes) -> decision_pb2.Request:
    """A request that bears `raw` behind what it says."""
    return decision_pb2.Request.FromString(request().SerializeToString() + raw)


async def test_fields_and_headers_that_are_the_gateway_s_own_change_nothing() -> None:
    """As NVIDIA/nvcf PR #341 and praxis-proxy/ai #418: a client set the priority or the routing header itself."""
    said: list[decision_pb2.Decision] = []
    headers = (("x-priority", "100"), ("x-gateway-inference-fairness-id", "random"), ("x-tenant", "globex"))
    for asked, metadata in ((request(), None), (with_bytes(CLAIMS), headers)):
        async with Office(small=2).serving() as (_, channel):
            stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
            message = scheduler_pb2.ScheduleRequest(request=asked, dry_run=True)
            decision = (await stub.Schedule(message, metadata=metadata)).decision
        for field in ("at_wall_s", "took_s", "age_s", "candidates", "sentence"):  # they bear the time
            decision.ClearField(field)
        said.append(decision)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("raw", "taken"),
    [
        (b"", True),
        (BUDGET + b"\x00", False),
        (BUDGET + b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", False),  # -1
        (BUDGET + b"\x01", True),
        (BUDGET + b"\x80\x80\x04", True),  # 65,536
        (BUDGET + b"\x80\x80\x80\x80\x08", True),  # 2^31
        (BUDGET + b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", False),  # 2^63, a negative number there
    ],
    ids=["absent", "0", "-1", "1", "65,536", "2^31", "2^63"],
)
def test_a_budget_below_one_is_refused_and_no_other_is(raw: bytes, taken: bool) -> None:
    """As Mesh-LLM/mesh-llm #1350; of two caps the gateway sends the larger (BerriAI/litellm PR #34223)."""
    desk = Office(small=1).desk
    if taken:
        assert desk.decide(with_bytes(raw), SCHEDULE, dry_run=True).verdict == "admit"
    else:
        with pytest.raises(BadRequestError, match="max_tokens"):
            desk.decide(with_bytes(raw), SCHEDULE, dry_run=True)


def test_names_that_callers_make_up_are_no_series_of_any_metric() -> None:
    """As llm-d/llm-d-router #1625: each value that a client chose became a label."""
    office = Office(small=1)
    site = office.town.site
    site.adopt(replace(site.policy, default_tenant="globex"))

    def claims(n: int) -> None:
        office.desk.decide(request(f"r{n}", tenant=f"tenant-{n}", task=f"task-{n}"), SCHEDULE, dry_run=False)
        for wrong in ({"model": f"model-{n}"}, {"declared_class": f"class-{n}"}, {"origin": f"site-{n}"}):
            with pytest.raises(BadRequestError):
                office.desk.decide(request(f"r{n}", **wrong), SCHEDULE, dry_run=False)
        made_up = {
            "model": f"m-{n}",
            "request_class": f"c-{n}",
            "site": f"s-{n}",
            "instance": f"i-{n}",
            "stop": f"x-{n}",
        }
        for kind in (outcomes_pb2.OUTCOME_KIND_FINISHED, outcomes_pb2.OUTCOME_KIND_FAILED):
            office.desk.report(event(f"r{n}", kind=kind, tenant=f"tenant-{n}", **made_up))

    for n in range(NAMES // 2):
        claims(n)
    before = series()
    for n in range(NAMES // 2, NAMES):
        claims(n)
    assert series() == before


def series() -> set[str]:
    """All series there are, by metric and labels."""
    return {f"{sample.name}{sample.labels}" for metric in REGISTRY.collect() for sample in metric.samples}
