"""Answers: ask a running fleet for decisions all the while, and keep what each origin said."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import grpc.aio

from tests.e2e.running import Fleet
from tokenfleet.client.gateway import Answer, Gateway
from tokenfleet.wire.v1 import decision_pb2

SITES = ("a", "b", "c", "d")
ASK_PERIOD_S = 0.2
ANSWER_WAIT_MAX_S = 10.0  # longer than the client's own patience: what it gives up is its error


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one origin, or the error that a caller saw."""

    asked_s: float
    answered_s: float
    origin: str
    error: str = ""
    verdict: str = ""
    reason: str = ""
    mode: str = ""
    age_s: float | None = None
    site: str = ""
    target: str = ""
    considered: int = 0
    cached: int = 0


@dataclass(kw_only=True)
class Watch:
    """Everything that was answered since the start."""

    samples: list[Sample] = field(default_factory=lambda: [])

    def of(self, origin: str, *, since_s: float = 0.0, until_s: float = float("inf")) -> list[Sample]:
        """The answers whose question was put in this time, in the order of the answers."""
        return [s for s in self.samples if s.origin == origin and since_s <= s.asked_s <= until_s]

    def errors(self, since_s: float) -> list[Sample]:
        return [sample for sample in self.samples if sample.error and sample.asked_s >= since_s]

    def empty(self, since_s: float) -> list[Sample]:
        """Answers by a site with engines that saw none of them."""
        return [
            sample
            for sample in self.samples
            if sample.asked_s >= since_s and not sample.error and sample.origin != "a" and not sample.considered
        ]

    def longest_gap_s(self, since_s: float) -> float:
        """Between two answers of one origin."""
        return max(
            (later.answered_s - one.answered_s for site in SITES for one, later in self._pairs(site, since_s)),
            default=0.0,
        )

    def age_drift_s(self, origin: str, *, since_s: float, until_s: float) -> float:
        """How far the ages that were told grew faster or slower than time; infinite when one was not told."""
        told = [sample for sample in self.of(origin, since_s=since_s, until_s=until_s) if not sample.error]
        if not told or any(sample.age_s is None for sample in told):
            return float("inf")
        last_heard_s = [sample.answered_s - (sample.age_s or 0.0) for sample in told]
        return max(last_heard_s) - min(last_heard_s)

    def is_fresh(self, since_s: float) -> bool:
        """All origins were asked since, and all their answers are fresh."""
        return all(
            (samples := self.of(site, since_s=since_s)) and all(sample.mode == "fresh" for sample in samples)
            for site in SITES
        )

    def _pairs(self, site: str, since_s: float) -> Iterator[tuple[Sample, Sample]]:
        answers = [sample for sample in self.of(site, since_s=since_s) if not sample.error]
        yield from pairwise(answers)


@asynccontextmanager
async def watching(fleet: Fleet) -> AsyncGenerator[Watch]:
    """Ask every origin for a decision every ASK_PERIOD_S, open loop; questions place nothing."""
    watch = Watch()
    async with contextlib.AsyncExitStack() as stack:
        tasks = [
            asyncio.create_task(
                _ask_always(watch, site, await stack.enter_async_context(Gateway(fleet.gateways(site))))
            )
            for site in SITES
        ]
        try:
            yield watch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _ask_always(watch: Watch, site: str, gateway: Gateway) -> None:
    asking: set[asyncio.Task[None]] = set()
    number = 0
    try:
        while True:
            number += 1
            task = asyncio.create_task(ask(watch, site, gateway, f"watch-{site}-{number}"))
            asking.add(task)
            task.add_done_callback(asking.discard)
            await asyncio.sleep(ASK_PERIOD_S)
    finally:
        for task in asking:
            task.cancel()


async def ask(watch: Watch, site: str, gateway: Gateway, name: str) -> None:
    """One question; its answer, or the error that a caller sees, goes into `watch`."""
    request = question(name, site)
    asked_s = time.monotonic()
    try:
        answer = await asyncio.wait_for(gateway.schedule(request, dry_run=True), ANSWER_WAIT_MAX_S)
    except (grpc.aio.AioRpcError, TimeoutError) as error:
        word = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "TIMEOUT"
        watch.samples.append(Sample(asked_s=asked_s, answered_s=time.monotonic(), origin=site, error=word))
        return
    watch.samples.append(sample_of(answer, site, asked_s))


def question(name: str, site: str) -> decision_pb2.Request:
    """A small request that arrives at `site`; at a site with engines it stays there."""
    return decision_pb2.Request(
        id=name,
        model="large-chat" if site == "d" else "small-chat",
        tenant="acme",
        origin=site,
        prompt_tokens=64,
        max_tokens=16,
        local_only=site != "a",
    )


def sample_of(answer: Answer, site: str, asked_s: float) -> Sample:
    """What the origin itself said counts: its own tables are asked about."""
    first, last = answer.trail[0], answer.trail[-1]
    return Sample(
        asked_s=asked_s,
        answered_s=time.monotonic(),
        origin=site,
        verdict=decision_pb2.Verdict.Name(last.verdict).removeprefix("VERDICT_").lower(),
        reason=decision_pb2.Reason.Name(last.reason).removeprefix("REASON_").lower(),
        mode=decision_pb2.Mode.Name(first.mode).removeprefix("MODE_").lower(),
        age_s=first.age_s if first.HasField("age_s") else None,
        site=last.site,
        target=last.target,
        considered=last.considered + sum(last.excluded.values()),
        cached=last.hit_tokens,
    )
