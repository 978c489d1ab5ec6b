"""Bench server: the decision service on a bench site, with its spool and without Kafka, and an empty echo beside it.

    python -m tokenfleet.local.bench.server INSTANCES FOLDER

Prints its port once it serves, and ends when its standard input does. `/tokenfleet.bench/Echo` returns what it gets, by
way of the same server; `/tokenfleet.bench/Cpu` returns the CPU time of this process in nanoseconds.
"""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from time import process_time_ns
from typing import Any, Final

import grpc
import grpc.aio
import uvloop

from tokenfleet.adapters import grpc_server
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.desk import Desk
from tokenfleet.adapters.grpc_server import GrpcServer
from tokenfleet.adapters.sender import Sender
from tokenfleet.adapters.services import SERVICE_NAMES, registers
from tokenfleet.adapters.spool import Spool
from tokenfleet.adapters.topics import Topic
from tokenfleet.core.compiled import COMPILED_FROM, load
from tokenfleet.core.site import Site
from tokenfleet.local.bench.site import BenchSite

ECHO: Final = "tokenfleet.bench"
SPOOL_BYTES: Final = 256 << 20
REFRESH_S: Final = 1.0
PARTITIONS: Final = 16


class Nowhere:
    """Stands for Kafka: takes everything at once, so that only this process's own work is measured."""

    async def partitions(self, topic: Topic[Any], site: str) -> int:
        return PARTITIONS

    async def send_values(
        self, topic: Topic[Any], site: str, values: Sequence[bytes], *, partition: int | None = None
    ) -> int:
        return len(values)


async def serve(instances: int, folder: Path) -> None:
    """Serve until standard input ends."""
    if instances >= COMPILED_FROM:
        load()
    bench = BenchSite(instances, now_s=monotonic_s())
    with Spool(folder, bytes_max=SPOOL_BYTES) as spool:
        sender = Sender(spool, Nowhere())
        desk = Desk(bench.site, sender, start=spool.start_count, partitions=lambda _: PARTITIONS, ready=lambda: True)
        server = GrpcServer("127.0.0.1:0", registers=(*registers(desk), _add_echo), names=SERVICE_NAMES, reflect=False)
        async with server, asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(sender.run()), tasks.create_task(_refresh(bench))]
            print(server.port, flush=True)
            await asyncio.to_thread(sys.stdin.read)
            for task in running:
                task.cancel()


async def _refresh(bench: BenchSite) -> None:
    """Keeps the telemetry fresh and lets silent placements end, as followers of the topics would."""
    while True:
        await asyncio.sleep(REFRESH_S)
        now_s = monotonic_s()
        bench.hears_telemetry(now_s)
        _advance(bench.site, now_s)


def _advance(site: Site, now_s: float) -> None:
    for partition in range(PARTITIONS):
        site.advance(partition, now_s, live=True)


def _add_echo(server: grpc.aio.Server) -> None:
    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(_echo, _same, _same),
        "Cpu": grpc.unary_unary_rpc_method_handler(_cpu, _same, _same),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(ECHO, handlers),))


async def _echo(value: bytes, context: object) -> bytes:
    return value


async def _cpu(value: bytes, context: object) -> bytes:
    return str(process_time_ns()).encode()


def _same(value: bytes) -> bytes:
    return value


if __name__ == "__main__":
    logging.getLogger(grpc_server.__name__).setLevel(logging.ERROR)  # that all is open is no news for a measurement
    uvloop.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
