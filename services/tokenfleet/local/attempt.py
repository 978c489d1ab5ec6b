"""Attempt: one execution of a request on the engine that was chosen, reported step by step as a gateway would."""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.local.generation import Generation, GenerationError, generate
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2

PROGRESS_PERIOD_S: Final = 10.0  # a placement that is silent for 60 s ends
TIMEOUT_S: Final = 300.0

Report = Callable[[outcomes_pb2.OutcomeEvent], None]


class Attempt:
    """`arrived_s` is when the logical request arrived, `sent_s` when this attempt goes; `reporter` names the clock."""

    def __init__(
        self,
        request: decision_pb2.Request,
        decision: decision_pb2.Decision,
        *,
        reporter: str,
        arrived_s: float,
        sent_s: float,
    ) -> None:
        self.finished = False
        self.engine_failed = False
        self._request = request
        self._decision = decision
        self._clock = f"load-{reporter}"
        self._arrived_s = arrived_s
        self._sent_s = sent_s
        self._generation = Generation()

    async def run(
        self, session: aiohttp.ClientSession, prompt: NDArray[np.uint32], output_tokens: int, *, report: Report
    ) -> bool:
        """Stream and report. True when the engine failed before the first token, so that another may be asked."""
        report(self._event(outcomes_pb2.OUTCOME_KIND_STARTED))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._stream(session, prompt, output_tokens, report)
        except TimeoutError:
            report(self._event(outcomes_pb2.OUTCOME_KIND_TIMED_OUT, "timeout"))
        except GenerationError as error:
            self.engine_failed = True
            report(self._event(outcomes_pb2.OUTCOME_KIND_FAILED, error.kind))
            return self._generation.first_token_s is None
        except asyncio.CancelledError:
            report(self._event(outcomes_pb2.OUTCOME_KIND_CANCELLED, "load stopped"))
            raise
        else:
            self.finished = True
            report(self._event(outcomes_pb2.OUTCOME_KIND_FINISHED, self._generation.stop))
        return False

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: NDArray[np.uint32], output_tokens: int, report: Report
    ) -> None:
        told_first, told_s = False, self._sent_s
        async for so_far in generate(
            session,
            self._decision.address,
            self._request.model,
            prompt,
            output_tokens,
            self._generation,
            now=monotonic_s,
        ):
            if not told_first and so_far.first_token_s is not None:
                told_first, told_s = True, monotonic_s()
                report(self._event(outcomes_pb2.OUTCOME_KIND_FIRST_TOKEN))
            elif monotonic_s() - told_s > PROGRESS_PERIOD_S:
                told_s = monotonic_s()
                report(self._event(outcomes_pb2.OUTCOME_KIND_PROGRESS))

    def _event(self, kind: outcomes_pb2.OutcomeKind, stop: str = "") -> outcomes_pb2.OutcomeEvent:
        request, decision, generation, now_s = self._request, self._decision, self._generation, monotonic_s()
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
            elapsed_s=now_s - self._arrived_s,
            attempt_s=now_s - self._sent_s,
            stop=stop,
            at_wall_s=wall_s(),
            clock=self._clock,
            clock_s=now_s,
        )
        if generation.first_token_s is not None:
            event.ttft_s = generation.first_token_s - self._arrived_s
        if generation.tpot_s is not None:
            event.tpot_s = generation.tpot_s
        if generation.prompt_tokens is not None:
            event.prompt_tokens = generation.prompt_tokens
        if generation.cached_tokens is not None:
            event.cached_tokens = generation.cached_tokens
        if generation.tokens or kind == outcomes_pb2.OUTCOME_KIND_FINISHED:
            event.output_tokens = generation.tokens
        return event
