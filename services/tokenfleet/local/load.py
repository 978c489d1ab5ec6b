"""Load: replays a recorded trace through the fleet as gateways would, and keeps the books on what was answered.

For each row: build the prompt, ask TokenFleet at the row's origin, stream from the engine that was chosen, report
each step. Two files in the state folder say what came of it: `load.json`, rewritten every second, and `answered.tsv`,
one line for each decision answered and each outcome event acknowledged, which `up` compares with PostgreSQL.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final, TextIO

import aiohttp
import grpc.aio
import msgspec
import uvloop
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.client.gateway import Answer, Gateway
from tokenfleet.core.blocks import block_keys, chain_seed
from tokenfleet.local.data_files import trace_rows
from tokenfleet.local.generation import Generation, GenerationError, generate
from tokenfleet.local.prompts import prompt_tokens
from tokenfleet.sim.traces import TraceRow
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2

log = logging.getLogger(__name__)

OPEN_MAX: Final = 2_000  # requests in flight; a row that finds it full is counted as `shed_by_load`
STATS_PERIOD_S: Final = 1.0
DRAIN_MAX_S: Final = 30.0
SAMPLES_KEPT: Final = 20_000
PROGRESS_PERIOD_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 300.0
RETRIES_MAX: Final = 2


class LoadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`origins` are the gateways of each ingress site with its share of the rows; so are `models`, `tenants`.

    `batch_share` of the conversations run as batch jobs. `block_tokens` and `site_secret` must be the agents' own.
    """

    origins: dict[str, tuple[str, ...]]
    origin_shares: dict[str, float]
    models: dict[str, float]
    tenants: dict[str, float]
    batch_tenants: tuple[str, ...] = ()
    batch_share: float = 0.08
    site_secret: str
    block_tokens: int = 256
    copies: int = 1
    seed: int = 1
    for_s: float | None = None
    state_dir: str
    prompt_tokens_max: int = 60_000


class ClassStats(Struct, kw_only=True):
    """What one class saw; `ttft_s` are samples of admitted requests, in order of arrival, the last SAMPLES_KEPT."""

    arrivals: int = 0
    admitted: int = 0
    finished: int = 0
    ttft_s: list[float] = []


class LoadStats(Struct, kw_only=True):
    """The whole of `load.json`. `decisions` counts answers; `unanswered` are calls that got none."""

    decisions: int = 0
    verdicts: dict[str, int] = {}
    modes: dict[str, int] = {}
    sites: dict[str, int] = {}
    outcomes: int = 0
    unanswered: int = 0
    engine_errors: int = 0
    shed_by_load: int = 0
    reports_lost: int = 0
    first_decision_s: float | None = None
    first_admitted_s: float | None = None
    stale_age_max_s: float = 0.0
    longest_gap_s: float = 0.0
    open: int = 0
    done: bool = False
    classes: dict[str, ClassStats] = {}


class Load:
    """Replays rows until stopped; `stats` says what came of it."""

    def __init__(self, config: LoadConfig) -> None:
        self.config = config
        self.stats = LoadStats()
        self._rng = Random(config.seed)
        self._began_s = monotonic_s()
        self._clock = f"load-{wall_s():.6f}"
        self._answered_at_s: float | None = None
        self._verdicts: Counter[str] = Counter()
        self._modes: Counter[str] = Counter()
        self._sites: Counter[str] = Counter()
        self._open: set[asyncio.Task[None]] = set()
        self._answered: TextIO | None = None
        self._gateways: dict[str, Gateway] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Replays until `stop` or `for_s`, then waits for open requests, DRAIN_MAX_S at most."""
        state = Path(self.config.state_dir)
        state.mkdir(parents=True, exist_ok=True)
        async with contextlib.AsyncExitStack() as stack:
            self._answered = stack.enter_context((state / "answered.tsv").open("a", buffering=1, encoding="utf-8"))
            for origin, targets in self.config.origins.items():
                gateway = Gateway(targets, on_acknowledged=self._acknowledged)
                self._gateways[origin] = await stack.enter_async_context(gateway)
            session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
            )
            writing = asyncio.create_task(self._write_stats(state / "load.json"))
            try:
                await self._replay(session, stop)
                await self._drain()
            finally:
                writing.cancel()
                for task in self._open:
                    task.cancel()
                await asyncio.gather(*self._open, return_exceptions=True)
                self.stats.done = True
                self._save(state / "load.json")

    async def _replay(self, session: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        began_s = self._began_s = monotonic_s()
        end_s = began_s + self.config.for_s if self.config.for_s is not None else float("inf")
        for row, index in self._rows():
            wait_s = began_s + row.at_s - monotonic_s()
            if began_s + row.at_s > end_s:
                wait_s = end_s - monotonic_s()
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), wait_s)
            if stop.is_set() or monotonic_s() >= end_s:
                return
            if len(self._open) >= OPEN_MAX:
                self.stats.shed_by_load += 1
                continue
            task = asyncio.create_task(self._serve(session, row, index))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request of the load failed unforeseen", exc_info=error)

    def _rows(self) -> Iterator[tuple[TraceRow, int]]:
        """The trace over and over; each round is other conversations."""
        rows = trace_rows(copies=self.config.copies, rng=self._rng, prompt_tokens_max=self.config.prompt_tokens_max)
        span_s = rows[-1].at_s
        index = 0
        round_number = 0
        while True:
            for row in rows:
                yield msgspec.structs.replace(row, at_s=row.at_s + round_number * span_s), index
                index += 1
            round_number += 1

    async def _serve(self, session: aiohttp.ClientSession, row: TraceRow, index: int) -> None:
        arrived_s = monotonic_s()
        request, tokens = self._request(row, index)
        gateway = self._gateways[request.origin]
        for _ in range(1 + RETRIES_MAX):
            request.elapsed_s = monotonic_s() - arrived_s
            try:
                answer = await gateway.schedule(request)
            except grpc.aio.AioRpcError as error:
                self.stats.unanswered += 1
                log.warning("no answer for %s: %s %s", request.id, error.code().name, error.details())
                return
            self._count(answer, first=request.attempt == 0)
            if not answer.admitted:
                return
            if await self._generate(session, row, request, answer, tokens, arrived_s):
                return
            request.attempt = answer.decision.attempt + 1
            request.sites_tried[:] = []

    async def _generate(
        self,
        session: aiohttp.ClientSession,
        row: TraceRow,
        request: decision_pb2.Request,
        answer: Answer,
        tokens: list[int],
        arrived_s: float,
    ) -> bool:
        """Streams from the engine and reports. False when it failed before the first token and may be tried again."""
        decision = answer.decision
        gateway = self._gateways[request.origin]
        sent_s = monotonic_s()
        generation = Generation()

        def report(kind: outcomes_pb2.OutcomeKind, stop: str = "") -> None:
            gateway.report(self._event(request, decision, generation, kind, arrived_s, sent_s, stop), answer.gateways)

        report(outcomes_pb2.OUTCOME_KIND_STARTED)
        reported_s = sent_s
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async for _ in generate(
                    session, decision.address, request.model, tokens, row.output_tokens, generation, now=monotonic_s
                ):
                    if generation.tokens and reported_s == sent_s:
                        report(outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN)
                        reported_s = monotonic_s()
                    elif monotonic_s() - reported_s > PROGRESS_PERIOD_S:
                        report(outcomes_pb2.OUTCOME_KIND_PROGRESS)
                        reported_s = monotonic_s()
        except TimeoutError:
            report(outcomes_pb2.OUTCOME_KIND_TIMED_OUT, "timeout")
            return True
        except GenerationError as error:
            self.stats.engine_errors += 1
            report(outcomes_pb2.OUTCOME_KIND_FAILED, error.kind)
            return generation.first_token_s is not None
        except asyncio.CancelledError:
            report(outcomes_pb2.OUTCOME_KIND_CANCELLED, "load stopped")
            raise
        report(outcomes_pb2.OUTCOME_KIND_FINISHED, generation.stop)
        stats = self._class(decision.request_class)
        stats.finished += 1
        if generation.first_token_s is not None:
            stats.ttft_s.append(generation.first_token_s - arrived_s)
            del stats.ttft_s[:-SAMPLES_KEPT]
        return True

    def _event(
        self,
        request: decision_pb2.Request,
        decision: decision_pb2.Decision,
        generation: Generation,
        kind: outcomes_pb2.OutcomeKind,
        arrived_s: float,
        sent_s: float,
        stop: str,
    ) -> outcomes_pb2.OutcomeEvent:
        now_s = monotonic_s()
        event = outcomes_pb2.OutcomeEvent(
            request=request.id,
            attempt=decision.attempt,
            kind=kind,
            decision=decision.id,
            tenant=request.tenant,
            request_class=decision.request_class,
            model=request.model,
            origin=request.origin,
            site=decision.site,
            instance=decision.target,
            elapsed_s=now_s - arrived_s,
            attempt_s=now_s - sent_s,
            stop=stop,
            at_wall_s=wall_s(),
            clock=self._clock,
            clock_s=now_s,
        )
        if generation.first_token_s is not None:
            event.ttft_s = generation.first_token_s - arrived_s
        if (tpot_s := generation.tpot_s) is not None:
            event.tpot_s = tpot_s
        if generation.prompt_tokens is not None:
            event.prompt_tokens = generation.prompt_tokens
        if generation.cached_tokens is not None:
            event.cached_tokens = generation.cached_tokens
        if kind in (outcomes_pb2.OUTCOME_KIND_FINISHED, outcomes_pb2.OUTCOME_KIND_PROGRESS) or generation.tokens:
            event.output_tokens = generation.tokens
        return event

    def _request(self, row: TraceRow, index: int) -> tuple[decision_pb2.Request, list[int]]:
        """The request of a row. Model, tenant and origin belong to the conversation."""
        conversation = Random(row.hash_ids[1] if len(row.hash_ids) > 1 else index)
        tenant = _drawn(conversation, self.config.tenants)
        batch = tenant in self.config.batch_tenants or conversation.random() < self.config.batch_share
        model = _drawn(conversation, self.config.models)
        tokens = prompt_tokens(row)
        seed = chain_seed(self.config.site_secret.encode(), model=model)
        return (
            decision_pb2.Request(
                id=f"load-{self.config.seed}-{index}",
                model=model,
                tenant=tenant,
                origin=_drawn(conversation, self.config.origin_shares),
                prompt_tokens=row.prompt_tokens,
                max_tokens=max(2 * row.output_tokens, 64),
                block_keys=block_keys(tokens, seed=seed, block_tokens=self.config.block_tokens),
                block_tokens=self.config.block_tokens,
                stream=not batch,
                task="batch" if batch else "",
                session=f"conversation-{row.hash_ids[1]}" if len(row.hash_ids) > 1 else "",
                upload_bytes=4 * row.prompt_tokens,
            ),
            tokens.tolist(),
        )

    def _count(self, answer: Answer, *, first: bool) -> None:
        now_s = monotonic_s()
        if self._answered_at_s is not None:
            self.stats.longest_gap_s = max(self.stats.longest_gap_s, now_s - self._answered_at_s)
        self._answered_at_s = now_s
        if self.stats.first_decision_s is None:
            self.stats.first_decision_s = now_s - self._began_s
        if answer.admitted and self.stats.first_admitted_s is None:
            self.stats.first_admitted_s = now_s - self._began_s
        for decision in answer.trail:
            verdict = decision_pb2.Verdict.Name(decision.verdict).removeprefix("VERDICT_").lower()
            self._verdicts[verdict] += 1
            self._modes[decision_pb2.Mode.Name(decision.mode).removeprefix("MODE_").lower()] += 1
            self.stats.stale_age_max_s = max(self.stats.stale_age_max_s, decision.age_s)
            self._write_answered("decision", decision.id)
            if decision.verdict == decision_pb2.VERDICT_REJECT:  # decide itself reports the outcome of a refusal
                self._write_answered("outcome", decision.request, str(decision.attempt), "rejected")
                self.stats.outcomes += 1
        stats = self._class(answer.decision.request_class)
        stats.arrivals += first
        if answer.admitted:
            stats.admitted += 1
            self._sites[answer.decision.site] += 1
        self.stats.decisions += len(answer.trail)

    def _acknowledged(self, event: outcomes_pb2.OutcomeEvent) -> None:
        kind = outcomes_pb2.OutcomeKind.Name(event.kind).removeprefix("OUTCOME_KIND_").lower()
        self._write_answered("outcome", event.request, str(event.attempt), kind)
        self.stats.outcomes += kind != "progress"

    def _write_answered(self, *columns: str) -> None:
        if self._answered is not None:
            self._answered.write("\t".join(columns) + "\n")

    def _class(self, name: str) -> ClassStats:
        return self.stats.classes.setdefault(name or "unknown", ClassStats())

    async def _drain(self) -> None:
        """Waits for open requests and for every report to be taken."""
        if self._open:
            await asyncio.wait(self._open, timeout=DRAIN_MAX_S)
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_MAX_S):
                for gateway in self._gateways.values():
                    await gateway.drained()

    async def _write_stats(self, path: Path) -> None:
        while True:
            self._save(path)
            await asyncio.sleep(STATS_PERIOD_S)

    def _save(self, path: Path) -> None:
        self.stats.verdicts = dict(self._verdicts)
        self.stats.modes = dict(self._modes)
        self.stats.sites = dict(self._sites)
        self.stats.open = len(self._open)
        self.stats.reports_lost = sum(gateway.reports_lost for gateway in self._gateways.values())
        written = path.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(self.stats))
        written.replace(path)


def _drawn(rng: Random, shares: dict[str, float]) -> str:
    return rng.choices(tuple(shares), weights=tuple(shares.values()))[0]


async def _main(config: LoadConfig) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await Load(config).run(stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a LoadConfig")
    uvloop.run(_main(msgspec.json.decode(parser.parse_args().config.read_bytes(), type=LoadConfig)))
