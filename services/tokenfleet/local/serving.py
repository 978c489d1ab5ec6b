"""Serving: when the decision service of a site answers, by gRPC's own health protocol."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

ASK_AGAIN_S = 0.1
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
