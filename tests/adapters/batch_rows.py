"""Batch rows: tickets and turns at a store of tests in one line, and the rows as anybody reads them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from tokenfleet.adapters.batch_store import BatchStore, Turn
from tokenfleet.adapters.postgres import Postgres, migrate
from tokenfleet.core.slomax.grants import Room, next_grants
from tokenfleet.core.slomax.terms import BatchPolicy
from tokenfleet.core.slomax.tickets import Ended, HandedIn, Used

NOW_S = 1.8e9  # what this host's clock says
MODEL = "small-chat"
TERMS = BatchPolicy(enabled=True)


@asynccontextmanager
async def opened(database: str) -> AsyncGenerator[BatchStore]:
    await migrate(database)
    async with Postgres(database) as postgres:
        yield BatchStore(postgres, "b")


def ticket(request: str, *, left_s: float = 3_600.0, at_wall_s: float = NOW_S, **facts: Any) -> HandedIn:
    known: dict[str, Any] = {
        "tenant": "acme",
        "attempt": 0,
        "site": "b",
        "model": MODEL,
        "kv_tokens": 100,
        "gpu_s": 1.0,
    }
    return HandedIn(request=request, left_s=left_s, at_wall_s=at_wall_s, **(known | facts))


def used(request: str, *, attempt: int = 0) -> Used:
    return Used(tenant="acme", request=request, attempt=attempt, decision=f"d-{request}")


def ended(request: str, how: str = "finished", *, attempt: int = 0) -> Ended:
    return Ended(tenant="acme", request=request, attempt=attempt, how=how)


async def turn(
    store: BatchStore,
    epoch: int,
    *,
    tickets: int = 1_000,
    kv_tokens: float = 1e9,
    rate: float | None = None,
    terms: BatchPolicy = TERMS,
) -> Turn | None:
    """A turn of the owner of `epoch` with so much room."""
    return await store.turn(
        MODEL,
        epoch=epoch,
        room=Room(tickets, kv_tokens, tickets),
        ahead=0,
        terms=terms,
        choose=lambda page, left, more: next_grants(page, left, rate=rate, more=more),
    )


async def claimed(store: BatchStore, owner: str, *, by_right: bool = True) -> int:
    epoch = await store.claim(MODEL, owner, by_right=by_right)
    assert epoch is not None
    return epoch


async def rows(database: str, query: str) -> list[tuple[Any, ...]]:
    connection = await asyncpg.connect(database)
    try:
        return [tuple(row) for row in await connection.fetch(query)]
    finally:
        await connection.close()


async def states(database: str) -> dict[str, str]:
    """The state of each ticket by its request."""
    return {request: state for request, state in await rows(database, "select request, state from batch_tickets")}
