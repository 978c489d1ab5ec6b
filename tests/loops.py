"""A loop for fixtures that are not coroutines."""

import asyncio
from collections.abc import Coroutine


def run_apart(work: Coroutine[object, object, None]) -> None:
    """Run to the end on a loop of its own.

    Not `asyncio.run`: that forgets the thread's current loop, which pytest-asyncio then leaves unclosed.
    """
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(work)
    finally:
        loop.close()
