"""Return tickets over real gRPC: given with a refusal for want of room, honoured by any replica, lost by nobody."""

import asyncio
from io import StringIO
from typing import Any

import grpc.aio
from msgspec.structs import replace
from rich.console import Console

from tests.adapters.desks import Office, event, request
from tests.adapters.test_services import report, schedule
from tokenfleet.client.coming_again import come_again, wait_s
from tokenfleet.client.gateway import Gateway
from tokenfleet.client.words import decision_words
from tokenfleet.wire.v1 import decision_pb2

ADMIT, REJECT = decision_pb2.VERDICT_ADMIT, decision_pb2.VERDICT_REJECT
SECRET = b"the site's key"


def office(replica: str = "0", secret: bytes = SECRET, *, again_s: float = 0.05, most: int = 1) -> Office:
    """A replica of b whose one instance takes so many requests of a class, and that says to come again so soon."""
    made = Office(small=1)
    site = made.town.site
    site.replica = replica
    site.returns.sign_with(secret, issuer=f"{replica}/1")
    policy = site.policy
    classes = {name: replace(terms, running_max_per_instance=most) for name, terms in policy.classes.items()}
    slomax = replace(policy.slomax, retry_after_min_s=again_s, retry_after_max_s=again_s)
    site.adopt(replace(policy, classes=classes, slomax=slomax))
    return made


async def filled(channel: grpc.aio.Channel) -> decision_pb2.Decision:
    running = await schedule(channel, request("running"))
    assert running.verdict == ADMIT
    return running


async def ends(channel: grpc.aio.Channel, running: decision_pb2.Decision) -> None:
    end = event("running", decision=running.id, instance=running.target, output_tokens=9)
    assert (await report(channel, [end])).accepted == 1


def said(decision: decision_pb2.Decision) -> str:
    console = Console(width=200, file=(out := StringIO()))
    console.print(decision_words(decision))
    return " ".join(out.getvalue().split())


async def test_who_comes_again_with_its_ticket_has_its_place_and_the_record_and_the_words_say_so() -> None:
    desk = office()
    async with desk.serving() as (_, channel):
        running = await filled(channel)
        asked = request("r")
        refused = await schedule(channel, asked)
        assert (refused.verdict, refused.reason) == (REJECT, decision_pb2.REASON_ALL_BUSY)
        assert refused.admission.HasField("ahead_s")
        assert "a return ticket keeps its place" in said(refused)
        assert "prefill go before it" in said(refused)
        await ends(channel, running)
        again_s = wait_s(refused)
        assert again_s is not None
        await asyncio.sleep(again_s)
        come_again(asked, refused, elapsed_s=again_s)
        came = await schedule(channel, asked)
        assert (came.verdict, came.returned, came.attempt) == (ADMIT, "kept", 1)
        assert came.stood_s >= again_s
        assert "its return ticket kept its place" in said(came)
        repeated = await schedule(channel, asked)
        assert repeated.id == came.id  # a repeated call has the first answer
    recorded = [d for envelope in desk.outbox.of("decisions") for d in envelope.decisions]
    assert [(d.verdict, d.returned, bool(d.return_ticket)) for d in recorded] == [
        ("admit", "", False),
        ("reject", "", True),
        ("admit", "kept", False),
    ]


async def test_another_replica_of_the_site_honours_it_by_the_gateway_s_clock_alone() -> None:
    """It gave no ticket, its clock reads otherwise, and it knows nothing of the first but their key."""
    first, second = office("0"), office("1")
    async with first.serving() as (_, channel), second.serving() as (_, other):
        await filled(channel)
        asked = request("r", elapsed_s=5.0)
        refused = await schedule(channel, asked)
        come_again(asked, refused, elapsed_s=5.0 + 0.06)
        came = await schedule(other, asked)
        assert (came.verdict, came.returned) == (ADMIT, "kept")
        stale = request("r", attempt=1, elapsed_s=5.0 + 20.0, return_ticket=refused.return_ticket)
        assert (await schedule(channel, stale)).returned == "kept"  # by its own clock it is in time


async def test_a_forged_expired_or_foreign_ticket_is_told_and_loses_no_request() -> None:
    desk, elsewhere = office(most=50), office(secret=b"another site's")
    async with desk.serving() as (_, channel), elsewhere.serving() as (_, other):
        await filled(other)
        foreign = await schedule(other, request("r0"))
        shown: list[tuple[str, Any]] = [
            ("forged", foreign.return_ticket),
            ("forged", "x" * 100_000),
            ("forged", "\x00\n\u202e"),
        ]
        for number, (note, text) in enumerate(shown):
            came = await schedule(channel, request(f"r{number}", attempt=1, return_ticket=text))
            assert (came.verdict, came.returned) == (ADMIT, note)
            assert "its return ticket was ignored: this site did not sign it" in said(came)


async def test_the_python_client_comes_again_by_itself_within_its_patience() -> None:
    desk = office(again_s=0.2)
    async with desk.serving() as (server, channel), Gateway([f"127.0.0.1:{server.port}"]) as fleet:
        running = await filled(channel)
        at_once = await fleet.schedule(request("impatient"))
        assert (at_once.admitted, len(at_once.trail)) == (False, 1)
        waits = asyncio.create_task(fleet.schedule(request("r"), patience_s=20.0))
        async with asyncio.timeout(10.0):
            while len([d for e in desk.outbox.of("decisions") for d in e.decisions if d.request == "r"]) < 1:
                await asyncio.sleep(0.01)
        await ends(channel, running)
        answer = await asyncio.wait_for(waits, 20.0)
    assert answer.admitted
    assert answer.decision.returned == "kept"
    assert [each.attempt for each in answer.trail] == list(range(len(answer.trail)))
