"""Coalesce: many callers, each with one question, share one RouteStream; a batch costs little more than a request.

A question waits at most GATHER_S for company, and not at all when nothing is on its way. A stream that fails, or says
nothing for TRY_TIMEOUT_S, is left for the next replica, which is asked what is unanswered: a decision that comes twice
is void the second time, for the outcome names the one that was used.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

Targets = tuple[str, ...]

GATHER_S: Final = 0.001
BATCH_MAX: Final = 32  # requests a message; the service takes 64
BATCHES_UNANSWERED_MAX: Final = 16  # what comes then waits here, where it can still be withdrawn
BATCH_BYTES_MAX: Final = 1 << 20  # the service takes messages of 2 MiB
REQUEST_BYTES_MAX: Final = 256 << 10  # 16,384 block keys are 128 KiB
STREAM_AGE_MAX_S: Final = 60.0  # then a new one, so that replicas that came back get their share
TRY_TIMEOUT_S: Final = 1.0
SILENT_CODES: Final = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class RouteError(grpc.aio.AioRpcError):
    """One request got no decision. `reason` and `field` are those of the service's Problem, empty if it said none."""

    def __init__(self, code: grpc.StatusCode, details: str, *, reason: str = "", field: str = "") -> None:
        super().__init__(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
        self.reason = reason
        self.field = field


class Coalescer:
    """Routes by the replicas at `targets` of one site; `channel` gives the channel to some of them."""

    def __init__(self, channel: Callable[[Targets], grpc.aio.Channel], targets: Targets) -> None:
        self._channel = channel
        # Whichever replica's turn it is; when it fails, each by name: a frozen one would get its turn again.
        self._lanes: tuple[Targets, ...] = (targets, *((target,) for target in targets))
        self._lane = 0
        self._waiting: deque[_Question] = deque()
        self._unanswered: deque[_Batch] = deque()
        self._gathered = asyncio.Event()
        self._room = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    async def route(self, request: decision_pb2.Request, *, dry_run: bool, timeout_s: float) -> decision_pb2.Decision:
        """The decision on `request`. Raises RouteError: the service's own, or DEADLINE_EXCEEDED after `timeout_s`."""
        loop = asyncio.get_running_loop()
        question = _Question(
            message=scheduler_pb2.RouteRequest(request=request, dry_run=dry_run), answer=loop.create_future()
        )
        if (size := question.message.ByteSize()) > REQUEST_BYTES_MAX:
            raise RouteError(
                grpc.StatusCode.INVALID_ARGUMENT, f"{size:,} bytes, at most {REQUEST_BYTES_MAX:,} are taken"
            )
        self._ask(question, loop)
        late = loop.call_later(timeout_s, _give_up, question, timeout_s)
        try:
            return await question.answer  # a caller that is cancelled takes only its own question back
        finally:
            late.cancel()

    async def close(self) -> None:
        """Ends the stream; who still waits is told so."""
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    def _ask(self, question: "_Question", loop: asyncio.AbstractEventLoop) -> None:
        self._waiting.append(question)
        if len(self._waiting) >= BATCH_MAX:
            self._gathered.set()
        elif len(self._waiting) == 1:
            if self._unanswered:
                loop.call_later(GATHER_S, self._gathered.set)
            else:
                loop.call_soon(self._gathered.set)  # with those that ask in this turn of the loop
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._converse())
            self._asking.add_done_callback(self._ended)

    async def _converse(self) -> None:
        """One stream after another, each opened when there is something to ask."""
        while True:
            await self._gathered.wait()
            stub: Any = scheduler_pb2_grpc.TokenPilotStub(self._channel(self._lanes[self._lane]))
            call = stub.RouteStream()
            writing = asyncio.create_task(self._write(call))
            try:
                await self._read(call)
                self._lane = 0
            except grpc.aio.AioRpcError as error:
                self._failed(error)
            finally:
                writing.cancel()
                call.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing

    async def _write(self, call: Any) -> None:
        """Sends what was gathered until the stream is old. A failure is told by the reader."""
        old_at_s = monotonic_s() + STREAM_AGE_MAX_S
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.UsageError):
            while (left_s := old_at_s - monotonic_s()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._gathered.wait()
                self._gathered.clear()
                while True:
                    while len(self._unanswered) >= BATCHES_UNANSWERED_MAX:
                        self._room.clear()
                        await self._room.wait()
                    if not (questions := self._batch()):
                        break
                    self._unanswered.append(_Batch(questions=questions, sent_at_s=monotonic_s()))
                    messages = [question.message for question in questions]
                    await call.write(scheduler_pb2.RouteStreamRequest(requests=messages))
            await call.done_writing()

    async def _read(self, call: Any) -> None:
        """Hands each answer to its caller until the stream ends. Raises AioRpcError when it fails or falls silent."""
        while True:
            reading = asyncio.ensure_future(call.read())
            try:
                while not reading.done():
                    await asyncio.wait((reading,), timeout=self._patience_s())
            finally:
                reading.cancel()
            try:
                response = reading.result()
            except asyncio.CancelledError as error:  # gRPC's own: nobody of us has cancelled the call
                raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream was cut") from error
            if response is grpc.aio.EOF:
                if self._unanswered:
                    raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream ended before its last answer")
                return
            self._answer(response.answers)

    def _patience_s(self) -> float:
        """How long the oldest batch may still wait. Raises RouteError when it has waited for too long."""
        if not self._unanswered:
            return TRY_TIMEOUT_S
        left_s = self._unanswered[0].sent_at_s + TRY_TIMEOUT_S - monotonic_s()
        if left_s <= 0:
            raise RouteError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {TRY_TIMEOUT_S:g} s")
        return left_s

    def _answer(self, answers: Sequence[scheduler_pb2.RouteAnswer]) -> None:
        batch = self._unanswered.popleft()
        self._room.set()
        again: RouteError | None = None
        left: list[_Question] = []
        for question, answer in zip(batch.questions, answers, strict=True):
            if question.answer.done():
                continue
            if answer.HasField("decision"):
                question.answer.set_result(answer.decision)
                continue
            problem = answer.error
            error = RouteError(
                _CODES.get(problem.code, grpc.StatusCode.UNKNOWN),
                problem.message,
                reason=problem.reason,
                field=problem.field,
            )
            if error.code() in SILENT_CODES:  # this replica can't; another may
                again = error
                left.append(question)
            else:
                question.answer.set_exception(error)
        if again is not None:
            self._unanswered.appendleft(_Batch(questions=left, sent_at_s=batch.sent_at_s))
            raise again

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        """Puts what is unanswered back to the front for the next replica, unless each has been asked."""
        silent = error.code() in SILENT_CODES
        self._lane = (self._lane + 1) % len(self._lanes)
        back: list[_Question] = []
        for batch in self._unanswered:
            for question in batch.questions:
                question.tries += 1
                if question.answer.done():
                    continue
                if silent and question.tries < len(self._lanes):
                    back.append(question)
                else:
                    question.answer.set_exception(error)
        self._unanswered.clear()
        self._waiting.extendleft(reversed(back))
        if self._waiting:
            self._gathered.set()
        else:
            self._gathered.clear()

    def _batch(self) -> "list[_Question]":
        """The next questions that still have somebody who waits, within the bounds of one message."""
        questions: list[_Question] = []
        size = 0
        while self._waiting and len(questions) < BATCH_MAX:
            question = self._waiting[0]
            if not question.answer.done():
                size += question.message.ByteSize()
                if questions and size > BATCH_BYTES_MAX:
                    break
                questions.append(question)
            self._waiting.popleft()
        return questions

    def _ended(self, asking: asyncio.Task[None]) -> None:
        """Nobody waits for ever: neither after `close` nor after a failure that nobody foresaw."""
        code, details = grpc.StatusCode.CANCELLED, "the client was closed"
        if not asking.cancelled() and (error := asking.exception()) is not None:
            log.error("asking for routes failed unforeseen; the next request begins anew", exc_info=error)
            code, details = grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"
        for question in (*(q for batch in self._unanswered for q in batch.questions), *self._waiting):
            if not question.answer.done():
                question.answer.set_exception(RouteError(code, details))
        self._unanswered.clear()
        self._waiting.clear()
        self._gathered.clear()


class _Question(Struct, kw_only=True):
    """One caller's request, and the future on which that caller waits."""

    message: scheduler_pb2.RouteRequest
    answer: "asyncio.Future[decision_pb2.Decision]"
    tries: int = 0


class _Batch(Struct, frozen=True, kw_only=True):
    questions: list[_Question]
    sent_at_s: float


_CODES: Final[dict[int, grpc.StatusCode]] = {code.value[0]: code for code in grpc.StatusCode}


def _give_up(question: _Question, timeout_s: float) -> None:
    if not question.answer.done():
        question.answer.set_exception(
            RouteError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no decision within {timeout_s:g} s")
        )
