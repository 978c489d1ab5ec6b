"""What if over gRPC and on the command line: both choices, what they rest on, and no trace of the question."""

import asyncio
import json
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2

from tests.adapters.desks import Office, details_of, request
from tests.test_cli import tokenfleet
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2, scheduler_pb2_grpc


async def what_if(
    channel: grpc.aio.Channel, asked: decision_pb2.Request, **changes: Any
) -> scheduler_pb2.WhatIfResponse:
    stub: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
    return await stub.WhatIf(scheduler_pb2.WhatIfRequest(request=asked, changes=scheduler_pb2.Changes(**changes)))


async def test_both_choices_come_with_their_candidates_and_tables_and_nothing_is_left() -> None:
    office = Office(small=2)
    async with office.serving() as (_, channel):
        told = await what_if(channel, request(), drained=["b-small-0"])
        added = [scheduler_pb2.AddedInstances(like="b-small-1")]
        more = await what_if(channel, request(), weights={"reuse_max": 1.0}, calibration={"a_s": 2.0}, added=added)
    assert told.changed.target == "b-small-1"
    assert {c.instance for c in told.present.candidates} == {"b-small-0", "b-small-1"}
    assert dict(told.changed.excluded) == {"draining": 1}
    assert told.tables == office.town.site.versions()
    assert (told.policy_revision, told.pool, list(told.changes)) == (1, "small-chat@b", ["drained: b-small-0"])
    assert more.changed.considered == 3
    assert len(more.changes) == 3
    assert office.outbox.put_in == []
    assert len(office.town.site.ledger) == 0


BAD_CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "an unknown weight": ("weights", {"weights": {"gold": 1.0}}),
    "an unknown instance": ("drained", {"drained": ["nobody"]}),
    "an empty name": ("removed", {"removed": [""]}),
    "a name that forges a line": ("removed", {"removed": ["a\nb"]}),
    "an unknown make": ("added", {"added": [scheduler_pb2.AddedInstances(like="nobody")]}),
    "too many": ("added", {"added": [scheduler_pb2.AddedInstances(like="b-small-0", count=2**32 - 1)]}),
    "a factor below 0": ("calibration", {"calibration": {"a_s": -1.0}}),
    "a hundred and one weights": ("weights", {"weights": {f"w{n}": 1.0 for n in range(101)}}),
}


async def test_a_change_that_can_not_be_made_names_its_field() -> None:
    office = Office(small=1)
    async with office.serving() as (_, channel):
        for name, (field, changes) in BAD_CHANGES.items():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await what_if(channel, request(), **changes)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
            info = details_of(caught.value)["ErrorInfo"]
            assert isinstance(info, error_details_pb2.ErrorInfo)
            assert info.metadata["field"] == field, name
        office.ready = False
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await what_if(channel, request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_the_command_tells_the_difference_first_and_what_it_rests_on() -> None:
    office = Office(small=2)
    async with office.serving() as (server, _):

        async def said(*words: str) -> tuple[int, str]:
            command = ("whatif", "--model", "small-chat", "--tenant", "acme", "--gateway", f"127.0.0.1:{server.port}")
            done = await asyncio.to_thread(tokenfleet, *command, *words, COLUMNS="100")
            return done.returncode, done.stdout + done.stderr

        code, same = await said("--id", "r")
        assert code == 0
        assert same.startswith("NO CHANGE  the request stays at b-small-")
        target = same.partition("stays at ")[2].split()[0]
        code, moved = await said("--id", "r", "--drain", target)
        assert code == 0
        assert f"instead of to {target}" in moved.splitlines()[0]
        assert f"if drained: {target}" in moved
        assert "nothing was placed or recorded" in moved
        assert "capacity.0 0:" in moved
        code, refused = await said("--remove", "b-small-0", "--remove", "b-small-1")
        assert "goes nowhere (no_instances) instead of to b-small-" in refused
        code, added = await said("--add", "b-small-0=3", "--weights", "reuse_max=1", "--json")
        assert json.loads(added)["changed"]["considered"] == 5
        assert await said("--drain", "nobody") == (
            1,
            "drained: no instance 'nobody' serves this model here; there is: b-small-0, b-small-1\n",
        )
        assert await said("--weights", "x") == (1, "--weights: 'x' is not NAME=NUMBER\n")
        assert await said("--add", "b-small-0=none") == (1, "--add: 'b-small-0=none' is not INSTANCE=COUNT\n")
