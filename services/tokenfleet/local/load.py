"""Load: replays a recorded trace through the fleet as gateways would.

    python -m tokenfleet.local.load --config load.json

It begins when every origin has a decision replica that serves. For each row: build the prompt, ask TokenFleet at the
row's origin, stream from the engine that was chosen, report each step. SIGTERM ends it when the open requests have
ended, SIGINT at once.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import grpc.aio
import msgspec
import uvloop

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.client.coming_again import come_again, wait_s
from tokenfleet.client.gateway import Answer, Gateway
from tokenfleet.local.attempt import Attempt
from tokenfleet.local.load_books import LoadBooks
from tokenfleet.local.load_config import LoadConfig
from tokenfleet.local.load_requests import laid_rows, numbered, request_of
from tokenfleet.local.serving import until_engines_known, until_serving
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.wire.v1 import decision_pb2

log = logging.getLogger(__name__)

OPEN_MAX: Final = 2_000  # requests in flight; a row that finds it full is not sent and counted as `shed`
SAVE_PERIOD_S: Final = 1.0
DRAIN_MAX_S: Final = 30.0  # for open requests, after SIGTERM
REPORTS_DRAIN_MAX_S: Final = 2.0
RETRIES_MAX: Final = 2


class Load:
    """Replays rows until `stop` is set; `now` set as well cuts the open requests off."""

    def __init__(self, config: LoadConfig) -> None:
        self.stop = asyncio.Event()
        self.now = asyncio.Event()
        self._config = config
        self._life = f"{round(wall_s() * 1000):x}"  # a load that was killed and restarted asks under other ids
        self._books = LoadBooks(Path(config.folder))
        self._rows = laid_rows(config)
        self._open: set[asyncio.Task[None]] = set()
        self._gateways: dict[str, Gateway] = {}

    async def run(self) -> None:
        """Replay, then drain."""
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._books)
            for origin, targets in self._config.origins.items():
                gateway = Gateway(targets, on_acknowledged=self._books.acknowledged)
                self._gateways[origin] = await stack.enter_async_context(gateway)
            connector = aiohttp.TCPConnector(limit=0)
            session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, auto_decompress=False))
            saving = asyncio.create_task(self._save_always())
            try:
                if await self._all_serve():
                    await self._replay(session)
                    await self._drain()
            finally:
                saving.cancel()
                self._save(last=True)

    async def _all_serve(self) -> bool:
        """Wait until the origins answer and know engines; False when the end came first."""
        serving = asyncio.gather(*(self._serves(targets) for targets in self._config.origins.values()))
        stopped = asyncio.create_task(self.stop.wait())
        await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not serving.done():
            serving.cancel()
            return False
        return True

    async def _serves(self, targets: Sequence[str]) -> None:
        await until_serving(targets)
        await until_engines_known(targets, {*self._config.models, *self._config.model_of.values()})

    async def _replay(self, session: aiohttp.ClientSession) -> None:
        began_s = monotonic_s()
        self._books.began(now_s=began_s)
        for number, row in numbered(self._rows):
            if await is_set_within(self.stop, began_s + row.at_s - monotonic_s()):
                return
            if len(self._open) >= OPEN_MAX:
                self._books.stats.shed += 1
                continue
            task = asyncio.create_task(self._serve(session, row, number))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request of the load failed unforeseen", exc_info=error)

    async def _serve(self, session: aiohttp.ClientSession, row: TraceRow, number: int) -> None:
        """One logical request: ask, run, and ask again if it failed before its first token."""
        arrived_s = monotonic_s()
        request, tokens = request_of(self._config, row, id=f"{self._config.run}-{self._life}-{number}", number=number)
        gateway = self._gateways[request.origin]
        for _ in range(1 + RETRIES_MAX):
            request.elapsed_s = monotonic_s() - arrived_s
            if (answer := await self._admitted(gateway, request, arrived_s)) is None:
                return
            attempt = Attempt(request, answer.decision, reporter=self._life, arrived_s=arrived_s, sent_s=monotonic_s())
            failed_early = await attempt.run(
                session, tokens, row.output_tokens, report=lambda event, to=answer.gateways: gateway.report(event, to)
            )
            self._books.stats.finished += attempt.finished
            self._books.stats.engine_errors += attempt.engine_failed
            if not failed_early:
                return
            request.attempt = answer.decision.attempt + 1
            request.return_ticket = ""
            del request.sites_tried[:]

    async def _admitted(self, gateway: Gateway, request: decision_pb2.Request, arrived_s: float) -> Answer | None:
        """The answer that lets the request run. Of the mixed load, who finds no room comes again when told to."""
        while True:
            answer = await self._answer(gateway, request)
            if answer is None or answer.admitted:
                return answer
            again_s = wait_s(answer.decision)
            if self._config.mixed <= 0.0 or again_s is None or await is_set_within(self.stop, again_s):
                return None
            come_again(request, answer.decision, elapsed_s=monotonic_s() - arrived_s)

    async def _answer(self, gateway: Gateway, request: decision_pb2.Request) -> Answer | None:
        try:
            answer = await gateway.schedule(request)
        except grpc.aio.AioRpcError as error:
            self._books.stats.unanswered += 1
            log.warning("no answer for %s: %s %s", request.id, error.code().name, error.details())
            return None
        self._books.answered(answer, now_s=monotonic_s())
        return answer

    async def _drain(self) -> None:
        """Wait for open requests, or cut them off, and for every report to be taken."""
        if self._open:
            cut = asyncio.create_task(self.now.wait())
            ended = asyncio.gather(*self._open, return_exceptions=True)
            await asyncio.wait({cut, ended}, timeout=DRAIN_MAX_S, return_when=asyncio.FIRST_COMPLETED)
            cut.cancel()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORTS_DRAIN_MAX_S):
                await asyncio.gather(*(gateway.drained() for gateway in self._gateways.values()))

    async def _save_always(self) -> None:
        while True:
            self._save()
            await asyncio.sleep(SAVE_PERIOD_S)

    def _save(self, *, last: bool = False) -> None:
        lost = sum(gateway.reports_lost for gateway in self._gateways.values())
        self._books.save(open_requests=len(self._open), reports_lost=lost, last=last)


async def is_set_within(event: asyncio.Event, delay_s: float) -> bool:
    """Wait at most so long for the event; at once if the delay has passed."""
    if delay_s > 0.0:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), delay_s)
    return event.is_set()


async def replay(config: LoadConfig) -> None:
    """Run until SIGTERM or SIGINT."""
    load, loop = Load(config), asyncio.get_running_loop()

    def at_once() -> None:
        load.stop.set()
        load.now.set()

    loop.add_signal_handler(signal.SIGTERM, load.stop.set)
    loop.add_signal_handler(signal.SIGINT, at_once)
    await load.run()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(prog="tokenfleet.local.load", description="Replay a recorded trace.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a LoadConfig")
    uvloop.run(replay(msgspec.json.decode(parser.parse_args().config.read_bytes(), type=LoadConfig)))


if __name__ == "__main__":
    main()
