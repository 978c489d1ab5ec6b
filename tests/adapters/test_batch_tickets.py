"""A replica's part in batch tickets: kept before the answer, brought to PostgreSQL behind it, run when granted."""

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from tests.adapters.batch_rows import rows, states, ticket
from tests.adapters.desks import Office, event, request
from tests.postgres_proxy import Proxy
from tokenfleet.adapters import batch_tickets, services
from tokenfleet.adapters.batch_store import BatchStore
from tokenfleet.adapters.batch_tickets import LANE, BatchTickets
from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.messages import request_from_wire
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.adapters.spool import Spool
from tokenfleet.core.asked import SCHEDULE
from tokenfleet.core.decision import Decision
from tokenfleet.core.slomax.terms import BatchPolicy
from tokenfleet.core.slomax.tickets import HandedIn
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2, scheduler_pb2, scheduler_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

WAIT_MAX_S = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_tickets, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(batch_tickets, "COUNT_EVERY_S", 0.02)
    monkeypatch.setattr(batch_tickets, "COUNT_SHARE_MAX", 1.0)
    monkeypatch.setattr(batch_tickets, "RETRY_MAX_S", 0.2)


@contextlib.asynccontextmanager
async def working(dsn: str, folder: Path, *, queued: int = 0, **terms: Any) -> AsyncGenerator[Office]:
    """Site b's desk with tickets in PostgreSQL, looked after; the folder's spool is what a former life left. No ticket
    has its turn while `queued` interactive requests wait."""
    office = Office(small=1)
    site = office.desk.site
    quickly: dict[str, Any] = {"enabled": True, "poll_min_s": 0.01}
    batch = BatchPolicy(**(quickly | terms))
    site.policy = replace(site.policy, slomax=replace(site.policy.slomax, batch=batch))
    site.tickets.secret = b"secret"
    with Spool(folder / "batch", bytes_max=batch_tickets.SPOOL_BYTES_MAX, lanes=(LANE,)) as spool:
        async with Postgres(dsn) as postgres:
            store = BatchStore(postgres, "b")
            tickets = BatchTickets(site, store, spool, me="0-1", owns=lambda _: None, queued=lambda _: queued)
            office.desk.tickets = tickets
            running = asyncio.create_task(tickets.run())
            try:
                yield office
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


async def until(true: Callable[[], Any]) -> None:
    """Returns when it is so."""
    give_up_s = monotonic_s() + WAIT_MAX_S
    while True:
        found = true()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert monotonic_s() < give_up_s
        await asyncio.sleep(0.01)


def job(name: str, **facts: Any) -> decision_pb2.Request:
    return request(name, **({"task": "batch", "deadline_s": 7_200.0} | facts))


def asks(office: Office, name: str, **facts: Any) -> Decision:
    return office.desk.decide(job(name, **facts), SCHEDULE, dry_run=False)


def fell_back(why: str) -> float:
    return REGISTRY.get_sample_value("tokenfleet_batch_fell_back_total", {"why": why}) or 0.0


async def test_from_hand_in_to_its_end(database: str, tmp_path: Path) -> None:
    await migrate(database)
    async with working(database, tmp_path) as office:
        site = office.desk.site
        await until(lambda: not site.tickets.closed)
        first = asks(office, "r")
        assert first.verdict == "defer"
        assert first.ticket is not None
        token = first.ticket.token
        await until(lambda: site.tickets.granted(request_from_wire(job("r"), site="b")))
        answer = asks(office, "r", ticket=token)
        assert (answer.verdict, answer.target) == ("admit", "b-small-0")
        ended = event("r", decision=answer.id, instance=answer.target, request_class="batch", output_tokens=10)
        office.desk.report(ended)

        async def done() -> bool:
            return await rows(database, "select state, decision, ended_as from batch_tickets") == [
                ("done", answer.id, "finished")
            ]

        await until(done)
        [told] = office.desk.tickets.states() if office.desk.tickets else []
        assert (told.model, told.owned, told.closed) == ("small-chat", True, "")


async def test_an_open_stream_is_told_when_its_turn_comes(database: str, tmp_path: Path) -> None:
    await migrate(database)
    async with working(database, tmp_path) as office, office.serving() as (_, channel):
        await until(lambda: not office.desk.site.tickets.closed)
        stub: Any = scheduler_pb2_grpc.SLOMaxStub(channel)
        answers = [each async for each in stub.Admit(scheduler_pb2.AdmitRequest(request=job("r")), timeout=WAIT_MAX_S)]
        verdicts = [each.decision.verdict for each in answers]
        assert verdicts == [decision_pb2.VERDICT_DEFER, decision_pb2.VERDICT_ADMIT]
        scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        asked = scheduler_pb2.ScheduleRequest(request=job("r", ticket=answers[0].decision.ticket.token))
        answer = (await scheduler.Schedule(asked, timeout=WAIT_MAX_S)).decision
        assert (answer.verdict, answer.target) == (decision_pb2.VERDICT_ADMIT, "b-small-0")
        sites: Any = scheduler_pb2_grpc.FleetMindStub(channel)
        [told] = (await sites.Sites(scheduler_pb2.SitesRequest())).batch
        assert (told.model, told.owned) == ("small-chat", True)


async def test_an_open_stream_hears_the_forecast_again_and_ends_with_the_deadline(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "FORECAST_AGAIN_S", 0.05)
    await migrate(database)
    async with working(database, tmp_path, queued=1, deadline_min_s=0.3) as office, office.serving() as (_, channel):
        await until(lambda: not office.desk.site.tickets.closed)
        policy = office.desk.site.policy
        gate = replace(policy.slomax.gate, enabled=False)  # a mere forecast refuses nobody, a deadline that passed does
        office.desk.site.policy = replace(policy, slomax=replace(policy.slomax, gate=gate))
        stub: Any = scheduler_pb2_grpc.SLOMaxStub(channel)
        asked = scheduler_pb2.AdmitRequest(request=job("r", deadline_s=5.0, max_tokens=10))
        answers = [each.decision async for each in stub.Admit(asked, timeout=WAIT_MAX_S)]
        assert [each.verdict for each in answers[:-1]] == [decision_pb2.VERDICT_DEFER] * (len(answers) - 1)
        assert len(answers) > 3
        assert (answers[-1].verdict, answers[-1].reason) == (
            decision_pb2.VERDICT_REJECT,
            decision_pb2.REASON_INFEASIBLE,
        )


async def test_a_stream_that_closes_takes_nothing_back_and_a_cancel_does(database: str, tmp_path: Path) -> None:
    await migrate(database)
    async with working(database, tmp_path, queued=1) as office, office.serving() as (_, channel):
        await until(lambda: not office.desk.site.tickets.closed)
        stub: Any = scheduler_pb2_grpc.SLOMaxStub(channel)
        call = stub.Admit(scheduler_pb2.AdmitRequest(request=job("r")), timeout=WAIT_MAX_S)
        assert (await call.read()).decision.verdict == decision_pb2.VERDICT_DEFER
        call.cancel()

        async def is_now(state: str) -> bool:
            return await states(database) == {"r": state}

        await until(lambda: is_now("waiting"))
        office.desk.report(event("r", kind=outcomes_pb2.OUTCOME_KIND_CANCELLED, request_class="batch"))
        await until(lambda: is_now("withdrawn"))


async def test_postgresql_away_loses_nothing_and_batch_work_runs_meanwhile(database: str, tmp_path: Path) -> None:
    await migrate(database)
    proxy = Proxy(database)
    await proxy.join()
    async with working(proxy.dsn, tmp_path) as office:
        tickets = office.desk.site.tickets
        await until(lambda: not tickets.closed)
        await proxy.cut()
        before = fell_back("postgres_away")
        kept: set[str] = set()
        while not tickets.closed:
            name = f"kept-{len(kept)}"
            if asks(office, name).ticket is not None:
                kept.add(name)
            await asyncio.sleep(0)
        assert asks(office, "meanwhile").verdict == "admit"
        assert fell_back("postgres_away") > before
        assert await states(database) == {}
        await proxy.join()
        await until(lambda: not tickets.closed)
        assert asks(office, "later").ticket is not None

        async def all_there() -> bool:
            return set(await states(database)) == kept | {"later"}

        await until(all_there)
    await proxy.cut()


async def test_a_former_life_left_its_tickets_in_the_spool(database: str, tmp_path: Path) -> None:
    """It is killed before PostgreSQL has them; what is torn at the end of the file was answered to nobody."""
    await migrate(database)
    async with working("postgres://postgres@127.0.0.1:1/none", tmp_path) as office:
        tickets = office.desk.tickets
        assert tickets is not None
        for number in range(100):
            assert tickets.keep(ticket_of(f"r{number}"))
    [segment] = (tmp_path / "batch").glob("*.seg")
    segment.write_bytes(segment.read_bytes() + b"torn")
    async with working(database, tmp_path):

        async def all_there() -> bool:
            return len(await states(database)) == 100

        await until(all_there)


async def test_a_full_spool_takes_no_ticket_and_keeps_all_that_it_has(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_tickets, "SPOOL_BYTES_MAX", 64 * 1024)
    async with working("postgres://postgres@127.0.0.1:1/none", tmp_path) as office:
        tickets = office.desk.site.tickets
        kept = 0
        before = fell_back("spool_full")
        while kept < 1_000:
            tickets.closed = ""  # as if PostgreSQL had answered the last look
            if asks(office, f"r{kept}").ticket is None:
                break
            kept += 1
        assert fell_back("spool_full") == before + 1
        assert kept > 100
    await migrate(database)
    async with working(database, tmp_path) as office:

        async def all_there() -> bool:
            return len(await states(database)) == kept

        await until(all_there)


async def test_one_that_postgresql_refuses_keeps_none_of_the_others_back(database: str, tmp_path: Path) -> None:
    await migrate(database)
    async with working(database, tmp_path) as office:
        tickets = office.desk.tickets
        assert tickets is not None
        for number in range(20):
            assert tickets.keep(ticket_of(f"r{number}", attempt=2**40 if number == 7 else 0))

        async def all_but_one() -> bool:
            return len(await states(database)) == 19

        await until(all_but_one)


async def test_twenty_thousand_tickets_wait_without_memory(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed in while there is no room. What grows by them is the database."""
    monkeypatch.setattr(batch_tickets, "COUNT_EVERY_S", 0.5)
    await migrate(database)
    async with working(database, tmp_path, queued=1) as office:
        office.outbox.put = lambda *_, **__: True  # type: ignore[method-assign, assignment]
        tickets = office.desk.site.tickets
        await until(lambda: not tickets.closed)
        resident: list[int] = []
        for number in range(20_000):
            if number % 100 == 0:
                await asyncio.sleep(0)  # others have their turn
            assert asks(office, f"r{number}", deadline_s=3_600.0 + number).ticket is not None, tickets.closed
            if number in (5_000, 19_999):
                gc.collect()
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

        async def all_there() -> bool:
            return await rows(database, "select count(*) from batch_tickets") == [(20_000,)]

        await until(all_there)
        await until(lambda: tickets.backlog("small-chat").tickets == 20_000)
        print(f"{(resident[1] - resident[0]) / 1e6:.1f} MB more for 15,000 tickets")
        assert resident[1] - resident[0] < 15 * 1000 * 500  # half a kilobyte each would already be seen


def ticket_of(name: str, *, attempt: int = 0) -> HandedIn:
    return ticket(name, attempt=attempt, at_wall_s=wall_s())
