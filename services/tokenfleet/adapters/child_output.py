"""What a short-lived child process says."""

import asyncio
from asyncio.subprocess import Process


async def output_of(process: Process) -> bytes:
    """All that it says until it ends. Who waits no longer, cancelled or out of time, kills it: nothing is left open."""
    try:
        said, _ = await process.communicate()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
        await process.communicate()  # not wait(): its pipe would stay open until somebody collects it
        raise
    return said
