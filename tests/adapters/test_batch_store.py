"""Batch tickets in PostgreSQL: one row a ticket, turns by deadline, and no two owners that grant one."""

import asyncio
import signal
import sys
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from msgspec.structs import replace

from tests.adapters.batch_rows import (
    MODEL,
    NOW_S,
    TERMS,
    claimed,
    ended,
    opened,
    rows,
    states,
    ticket,
    turn,
    used,
)
from tests.postgres_server import execute
from tokenfleet.adapters.batch_store import BatchStore, Turn
from tokenfleet.adapters.postgres import Postgres, PostgresAwayError, RowsRefusedError, migrate

pytestmark = pytest.mark.integration


async def test_a_ticket_is_one_row_however_often_it_is_handed_in(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r"), ticket("r", left_s=60.0), ticket("r", attempt=1)], wall_s=NOW_S)
        await store.write([ticket("r", left_s=60.0)], wall_s=NOW_S)
        left = await rows(
            database,
            "select attempt, extract(epoch from deadline - handed_in_at)::float8 from batch_tickets order by 1",
        )
    assert left == [(0, pytest.approx(3_600.0)), (1, pytest.approx(3_600.0))]


async def test_the_time_to_a_deadline_runs_while_a_ticket_is_on_its_way(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r"), ticket("ahead", at_wall_s=NOW_S + 5_000.0)], wall_s=NOW_S + 600.0)
        [(first,), (second,)] = await rows(
            database, "select extract(epoch from deadline - handed_in_at)::float8 from batch_tickets order by deadline"
        )
    assert first == pytest.approx(3_000.0)
    assert second == pytest.approx(3_600.0)  # this host's clock was set back: no time is added


async def test_turns_go_by_deadline_while_there_is_room(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket(name, left_s=s) for name, s in (("c", 900), ("a", 700), ("b", 800))], wall_s=NOW_S)
        epoch = await claimed(store, "one")
        assert await turn(store, epoch, tickets=2) == Turn(granted=2, unused=0, expired=0)
        assert [request for _, request, _ in await store.granted()] == ["a", "b"]
        assert await turn(store, epoch, tickets=2) == Turn(granted=0, unused=0, expired=0)  # two grants are out
        await store.write([used("a")], wall_s=NOW_S)
        assert await turn(store, epoch, tickets=2) == Turn(granted=1, unused=0, expired=0)
        assert [request for _, request, _ in await store.granted()] == ["b", "c"]


async def test_who_ends_is_done_and_who_ends_otherwise_is_withdrawn(database: str) -> None:
    async with opened(database) as store:
        late = await store.write(
            [*map(ticket, "abcd"), used("a"), ended("a"), ended("b", "cancelled"), ended("unknown")], wall_s=NOW_S
        )
        assert late == 0
        await store.write([used("b"), ended("a", "cancelled"), ticket("a")], wall_s=NOW_S)  # all too late
        assert await states(database) == {"a": "done", "b": "withdrawn", "c": "waiting", "d": "waiting"}
        pool = (await store.pools(window_s=60.0))[MODEL]
        assert (pool.done_s, pool.backlog.tickets, pool.backlog.seconds) == (1.0, 2, 2.0)
        view = await rows(database, "select state, tickets, gpu_s from batch_backlog order by state")
        assert view == [("done", 1, 1.0), ("waiting", 2, 2.0), ("withdrawn", 1, 1.0)]


async def test_a_grant_that_nobody_uses_goes_back_and_comes_again_ever_later(database: str) -> None:
    terms = replace(TERMS, grant_s=0.001)
    async with opened(database) as store:
        await store.write([ticket("r"), ticket("runs")], wall_s=NOW_S)
        epoch = await claimed(store, "one")
        await turn(store, epoch, terms=terms)
        await store.write([used("runs")], wall_s=NOW_S)
        for unused in range(1, 4):
            taken_back = await turn(store, epoch, tickets=0, terms=terms)
            assert taken_back == Turn(granted=0, unused=1, expired=0)
            [(times, waits_s)] = await rows(
                database,
                "select unused, extract(epoch from not_before - now())::float8 from batch_tickets where request = 'r'",
            )
            assert times == unused
            assert waits_s <= 0.001 * 2**unused
            await asyncio.sleep(0.02)
            await turn(store, epoch, terms=terms)
            await asyncio.sleep(0.01)
        assert (await states(database))["runs"] == "granted"


async def test_deadlines_that_pass_are_told_once_and_kept_for_a_while(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r", left_s=-1.0), ticket("runs", left_s=-1.0), ticket("far")], wall_s=NOW_S)
        await store.write([used("runs")], wall_s=NOW_S)
        epoch = await claimed(store, "one")
        assert await turn(store, epoch, tickets=0) == Turn(granted=0, unused=0, expired=1)
        assert await turn(store, epoch, tickets=0) == Turn(granted=0, unused=0, expired=0)
        assert await states(database) == {"r": "expired", "runs": "granted", "far": "waiting"}
        assert await store.write([ended("runs"), ended("r")], wall_s=NOW_S) == 1  # only one was not told before
        await turn(store, epoch, tickets=0, terms=replace(TERMS, kept_s=1e-6))
        assert await states(database) == {"far": "waiting"}


async def test_who_will_miss_is_marked_told_and_behind_all_others_until_that_changes(database: str) -> None:
    async with opened(database) as store:
        await store.write(
            [ticket("giant", left_s=60.0, gpu_s=55.0), ticket("a", left_s=61.0), ticket("b", left_s=62.0, gpu_s=20.0)],
            wall_s=NOW_S,
        )
        epoch = await claimed(store, "one")
        await turn(store, epoch, tickets=1, rate=1.0)
        [(marked,)] = await rows(database, "select request from batch_tickets where will_miss")
        assert marked == "giant"
        assert [request for _, request, _ in await store.granted()] == ["a"]
        assert (await store.pools(window_s=60.0))[MODEL].backlog.seconds == 20.0
        await turn(store, epoch, tickets=2, rate=10.0)
        assert await rows(database, "select request from batch_tickets where will_miss") == []


async def test_a_deposed_owner_grants_nothing(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r")], wall_s=NOW_S)
        old = await claimed(store, "one")
        assert await store.claim(MODEL, "two", by_right=False) is None  # the first has looked just now
        new = await claimed(store, "two")
        assert new > old
        assert await turn(store, old) is None
        assert await states(database) == {"r": "waiting"}
        assert await turn(store, new) == Turn(granted=1, unused=0, expired=0)
        await execute(database, "update batch_owners set renewed_at = now() - interval '11 seconds'")
        assert await store.claim(MODEL, "one", by_right=False) == new + 1


async def test_owners_at_once_grant_each_ticket_once(database: str) -> None:
    """Whoever believes to own the pool: 300 tickets, five owners that depose one another all the time."""
    async with opened(database) as store:
        await store.write([ticket(f"r{i}") for i in range(300)], wall_s=NOW_S)

        async def owns(name: str) -> int:
            granted = 0
            for _ in range(400):
                made = await turn(store, await claimed(store, name), tickets=10**6, terms=replace(TERMS, page_max=7))
                granted += made.granted if made is not None else 0
                if made is not None and not made.granted:
                    return granted
            return granted

        granted = await asyncio.gather(*(owns(name) for name in "abcde"))
        assert sum(granted) == 300
        assert set((await states(database)).values()) == {"granted"}


async def test_an_owner_that_is_killed_between_looking_and_granting_has_granted_nothing(database: str) -> None:
    """The row of its epoch is locked when it dies; the next owner grants each ticket, once, and nothing is lost."""
    async with opened(database) as store:
        await store.write([ticket(f"r{i}") for i in range(50)], wall_s=NOW_S)
        dies = (
            "import asyncio, os, signal\n"
            "from tests.adapters.batch_rows import MODEL, TERMS, claimed, opened\n"
            "from tokenfleet.core.slomax.grants import Room\n"
            "async def main():\n"
            f"    async with opened({database!r}) as store:\n"
            "        def choose(page, left, more):\n"
            "            assert len(page) == 50\n"
            "            os.kill(os.getpid(), signal.SIGKILL)\n"
            "        room = Room(100, 1e9, 100)\n"
            "        epoch = await claimed(store, 'dies')\n"
            "        await store.turn(MODEL, epoch=epoch, room=room, ahead=0, terms=TERMS, choose=choose)\n"
            "asyncio.run(main())\n"
        )
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", dies)
        assert await owner.wait() == -signal.SIGKILL
        assert set((await states(database)).values()) == {"waiting"}
        assert await turn(store, await claimed(store, "next")) == Turn(granted=50, unused=0, expired=0)


async def test_a_row_that_is_refused_leaves_nothing_of_its_batch(database: str) -> None:
    async with opened(database) as store:
        with pytest.raises(RowsRefusedError):
            await store.write([ticket("r"), ticket("bad", attempt=2**40)], wall_s=NOW_S)
        assert await states(database) == {}


async def test_another_sites_tickets_are_its_own(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r"), ticket("theirs", site="c")], wall_s=NOW_S)
        await turn(store, await claimed(store, "one"))
        assert await states(database) == {"r": "granted", "theirs": "waiting"}
        assert await store.granted() == [("acme", "r", 0)]


async def test_the_auditors_role_reads_tickets_and_changes_none(database: str) -> None:
    async with opened(database) as store:
        await store.write([ticket("r")], wall_s=NOW_S)
    connection = await asyncpg.connect(database)
    try:
        await connection.execute("set role tokenfleet_audit")
        assert await connection.fetchval("select sum(tickets) from batch_backlog") == 1
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("update batch_tickets set state = 'done'")
    finally:
        await connection.close()


async def test_the_deciders_role_is_enough_and_reads_no_decision(database: str) -> None:
    await migrate(database)
    name = f"decides_{uuid4().hex}"
    await execute(database, f"create role {name} login in role tokenfleet_decide")
    try:
        dsn = urlsplit(database)._replace(netloc=f"{name}@{urlsplit(database).netloc.rpartition('@')[2]}").geturl()
        async with Postgres(dsn) as postgres:
            store = BatchStore(postgres, "b")
            await store.write([ticket("r"), used("r"), ended("r"), ticket("s")], wall_s=NOW_S)
            assert await turn(store, await claimed(store, "one")) == Turn(granted=1, unused=0, expired=0)
            with pytest.raises(PostgresAwayError, match="permission denied"):
                await postgres.fetch("select from decisions")
    finally:
        await execute(database, f"drop role {name}")
