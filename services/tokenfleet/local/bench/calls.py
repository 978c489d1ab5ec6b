"""Bench calls: what a decision costs the server over gRPC, against an empty echo of the same server in the same run."""

import asyncio
import itertools
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any, Final

import grpc.aio
from msgspec import Struct

from tokenfleet.adapters.child_output import output_of
from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.client.gateway import Gateway
from tokenfleet.core.errors import SetupError
from tokenfleet.local.bench.server import ECHO
from tokenfleet.local.bench.site import BLOCK_TOKENS, BLOCKS, MODEL, NAME, PROMPT_TOKENS, PROMPTS
from tokenfleet.wire.v1 import (
    decision_pb2,
    outcomes_pb2,
    outcomes_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)

CONCURRENT: Final = 64
BATCH: Final = 16  # requests a message of the hand-batched stream
TIMEOUT_S: Final = 30.0


class Cost(Struct, frozen=True, kw_only=True):
    """Of one way to ask, medians over the rounds: server CPU and client CPU in µs a request, requests a second."""

    server_us: float
    client_us: float
    per_s: float


class Asking:
    """One server and the ways to ask it. Each way asks `requests` times and ends what it placed outside the clock."""

    def __init__(self, channel: grpc.aio.Channel, gateway: Gateway, prompts: tuple[bytes, ...]) -> None:
        self._gateway = gateway
        self._prompts = prompts
        self._scheduler: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        self._slomax: Any = scheduler_pb2_grpc.SLOMaxStub(channel)
        self._pilot: Any = scheduler_pb2_grpc.TokenPilotStub(channel)
        self._outcomes: Any = outcomes_pb2_grpc.OutcomesStub(channel)
        self._echo: Any = channel.unary_unary(f"/{ECHO}/Echo")
        self._cpu: Any = channel.unary_unary(f"/{ECHO}/Cpu")
        self._numbers = itertools.count()
        self._decided: list[decision_pb2.Decision] = []

    async def costs(self, *, rounds: int, requests: int) -> dict[str, Cost]:
        """Each way in turn, `rounds` times over; the first round warms up and doesn't count."""
        ways: dict[str, Callable[[int], Awaitable[None]]] = {
            "echo": self._ask_echo,
            "route": self._ask_route,
            "schedule": self._ask_schedule,
            "admit": self._ask_admit,
            "stream": self._ask_stream,
            "coalesced": self._ask_coalesced,
        }
        taken: dict[str, list[Cost]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                cost = await self._measured(way, requests)
                if turn:
                    taken[name].append(cost)
        return {
            name: Cost(
                server_us=median(each.server_us for each in costs),
                client_us=median(each.client_us for each in costs),
                per_s=median(each.per_s for each in costs),
            )
            for name, costs in taken.items()
        }

    async def _measured(self, way: Callable[[int], Awaitable[None]], requests: int) -> Cost:
        server_ns, client_s, began_s = int(await self._cpu(b"")), process_time(), monotonic_s()
        await way(requests)
        took_s = monotonic_s() - began_s
        server_us = (int(await self._cpu(b"")) - server_ns) / 1e3
        client_us = (process_time() - client_s) * 1e6
        await self._end_all()
        return Cost(server_us=server_us / requests, client_us=client_us / requests, per_s=requests / took_s)

    async def _ask_echo(self, requests: int) -> None:
        async def ask() -> None:
            await self._echo(b"", timeout=TIMEOUT_S)

        await _concurrently(ask, requests)

    async def _ask_route(self, requests: int) -> None:
        async def ask() -> None:
            answer = await self._pilot.Route(scheduler_pb2.RouteRequest(request=self._request()), timeout=TIMEOUT_S)
            self._decided.append(answer.decision)

        await _concurrently(ask, requests)

    async def _ask_schedule(self, requests: int) -> None:
        async def ask() -> None:
            message = scheduler_pb2.ScheduleRequest(request=self._request())
            self._decided.append((await self._scheduler.Schedule(message, timeout=TIMEOUT_S)).decision)

        await _concurrently(ask, requests)

    async def _ask_admit(self, requests: int) -> None:
        """Admission alone, as a gateway asks that has an instance already: nothing is placed."""

        async def ask() -> None:
            message = scheduler_pb2.AdmitRequest(request=self._request())
            async for answer in self._slomax.Admit(message, timeout=TIMEOUT_S):
                self._decided.append(answer.decision)

        await _concurrently(ask, requests)

    async def _ask_stream(self, requests: int) -> None:
        """Batches by hand: as many on the way as hold CONCURRENT requests."""
        call = self._pilot.RouteStream(timeout=TIMEOUT_S)
        unanswered: deque[int] = deque()
        for _ in range(requests // BATCH):
            batch = [scheduler_pb2.RouteRequest(request=self._request()) for _ in range(BATCH)]
            await call.write(scheduler_pb2.RouteStreamRequest(requests=batch))
            unanswered.append(BATCH)
            if len(unanswered) * BATCH >= CONCURRENT:
                await self._take(call, unanswered)
        while unanswered:
            await self._take(call, unanswered)
        await call.done_writing()

    async def _take(self, call: Any, unanswered: deque[int]) -> None:
        unanswered.popleft()
        response = await call.read()
        self._decided.extend(answer.decision for answer in response.answers)

    async def _ask_coalesced(self, requests: int) -> None:
        async def ask() -> None:
            self._decided.append(await self._gateway.route(self._request(), timeout_s=TIMEOUT_S))

        await _concurrently(ask, requests)

    async def _end_all(self) -> None:
        """Reports every placed request finished. Raises SetupError if something was not admitted: a wrong measure."""
        if refused := [each for each in self._decided if each.verdict == decision_pb2.VERDICT_REJECT]:
            raise SetupError(f"the bench site refused {len(refused)} requests, such as: {refused[0].sentence}")
        events = [
            outcomes_pb2.OutcomeEvent(
                request=each.request,
                decision=each.id,
                kind=outcomes_pb2.OUTCOME_KIND_FINISHED,
                tenant=each.tenant,
                request_class=each.request_class,
                model=each.model,
                origin=each.origin,
                site=each.site,
                instance=each.target,
                elapsed_s=1.0,
            )
            for each in self._decided
            if each.target
        ]
        self._decided.clear()
        if events:
            batches = [outcomes_pb2.ReportRequest(events=events[n : n + 256]) for n in range(0, len(events), 256)]
            await self._outcomes.Report(iter(batches), timeout=TIMEOUT_S)

    def _request(self) -> decision_pb2.Request:
        number = next(self._numbers)
        return decision_pb2.Request(
            id=f"bench-{number}",
            model=MODEL,
            tenant="acme",
            origin=NAME,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=256,
            block_keys=self._prompts[number % PROMPTS],
            block_tokens=BLOCK_TOKENS,
        )


@asynccontextmanager
async def asking(instances: int, prompts: tuple[bytes, ...]) -> AsyncGenerator[Asking]:
    """A server of its own process with so many instances, which ends with the block."""
    assert all(len(prompt) == 8 * BLOCKS for prompt in prompts)
    with tempfile.TemporaryDirectory(prefix="tokenfleet-bench-") as folder:
        command = (sys.executable, "-m", "tokenfleet.local.bench.server", str(instances), str(Path(folder) / "spool"))
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = (await process.stdout.readline()).decode().strip()
            if not port:
                raise SetupError(f"the bench server ended with {await process.wait()}; it says why above")
            target = f"127.0.0.1:{port}"
            async with grpc.aio.insecure_channel(target) as channel, Gateway([target]) as gateway:
                yield Asking(channel, gateway, prompts)
        finally:
            process.stdin.close()
            await output_of(process)


async def _concurrently(ask: Callable[[], Awaitable[None]], requests: int) -> None:
    """CONCURRENT callers, each asking again when it is answered."""
    left = iter(range(requests))

    async def caller() -> None:
        for _ in left:
            await ask()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENT):
            tasks.create_task(caller())
