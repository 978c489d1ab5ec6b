"""Loops for fixtures that are not coroutines, and work beside a test."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


def run_apart(work: Coroutine[object, object, None]) -> None:
    """Run to the end on a loop of its own.

    Not `asyncio.run`: that forgets the thread's current loop, which pytest-asyncio then leaves unclosed.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()


@asynccontextmanager
async def running(*works: Coroutine[Any, Any, Any]) -> AsyncGenerator[None]:
    """The work goes on until the block ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
