"""Serving: when the decision service of a site answers, by gRPC's own health protocol, and when it knows engines."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenfleet.client import calls
from tokenfleet.core.errors import TokenFleetError

ASK_AGAIN_S = 0.1
ENGINES_WAIT_MAX_S = 15.0  # then the load begins anyway, and shows the refusals
ASK_TIMEOUT_S = 2.0


async def until_serving(targets: Sequence[str]) -> None:
    """Return when one of the replicas at `targets` (HOST:PORT) is SERVING."""
    asking = [asyncio.create_task(_until_one_serves(target)) for target in targets]
    try:
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def until_engines_known(targets: Sequence[str], models: Collection[str]) -> None:
    """Return when a replica at `targets` knows a ready instance of each model at some site, or after a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ENGINES_WAIT_MAX_S):
            while not await _ready_models(targets) >= set(models):
                await asyncio.sleep(ASK_AGAIN_S)


async def _ready_models(targets: Sequence[str]) -> set[str]:
    try:
        seen = await calls.sites(targets)
    except TokenFleetError:
        return set()
    return {pool.model for site in seen.sites for pool in site.pools if pool.ready}


async def _until_one_serves(target: str) -> None:
    async with grpc.aio.insecure_channel(target, options=(("grpc.max_reconnect_backoff_ms", 500),)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ASK_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(ASK_AGAIN_S)
