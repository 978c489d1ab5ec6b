"""Coalesce: many callers, each with one question, share one RouteStream; a batch costs little more than a request.

A question waits at most GATHER_S for company, and not at all when nothing is on its way. A stream that fails, or says
nothing for TRY_TIMEOUT_S, is left for the next replica, which is asked what is unanswered: a decision that comes twice
is void the second time, for the outcome names the one that was used. A held question gives way to those behind it: it
waits for its final answer on the stream that holds it, also when that one has given way to a new one, and is withdrawn
there when its caller leaves.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import grpc
import grpc.aio
from msgspec import Struct

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.client.questions import HeldQuestions, Question
from tokenfleet.client.route_error import SILENT_CODES, RouteError, error_of
from tokenfleet.client.token import Shown
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


class Coalescer:
    """Routes by the replicas at `targets` of one site; `channel` gives the channel to some of them, `shown` says who
    asks (client/token.py)."""

    def __init__(
        self, channel: Callable[[Targets], grpc.aio.Channel], targets: Targets, *, shown: Shown = None
    ) -> None:
        self._channel = channel
        self._shown = shown
        # Whichever replica's turn it is; when it fails, each by name: a frozen one would get its turn again.
        self._lanes: tuple[Targets, ...] = (targets, *((target,) for target in targets))
        self._lane = 0
        self._waiting: deque[Question] = deque()
        self._unanswered: deque[_Batch] = deque()
        self._held = HeldQuestions()  # by the present stream
        self._old: set[asyncio.Task[None]] = set()  # readers of old streams that still hold something
        self._gathered = asyncio.Event()
        self._room = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    async def route(self, request: decision_pb2.Request, *, dry_run: bool, timeout_s: float) -> decision_pb2.Decision:
        """The decision on `request`. Raises RouteError: the service's own, or DEADLINE_EXCEEDED after `timeout_s`."""
        loop = asyncio.get_running_loop()
        question = Question(
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
            self._withdraw(question)

    async def close(self) -> None:
        """Ends the stream; who still waits is told so."""
        for task in self._old:
            task.cancel()
        await asyncio.gather(*self._old, return_exceptions=True)
        if self._asking is not None:
            self._asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._asking

    def _ask(self, question: Question, loop: asyncio.AbstractEventLoop) -> None:
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
            self._held = HeldQuestions()
            stub: Any = scheduler_pb2_grpc.TokenPilotStub(self._channel(self._lanes[self._lane]))
            call = stub.RouteStream(metadata=self._shown)
            writing = asyncio.create_task(self._write(call))
            reading: asyncio.Future[Any] | None = None
            try:
                reading = await self._read(call, writing)
                self._lane = 0
            except grpc.aio.AioRpcError as error:
                self._failed(error)
            finally:
                writing.cancel()
                if reading is not None:
                    held, self._held = self._held, HeldQuestions()
                    self._old.add(old := asyncio.create_task(self._read_out(call, reading, held)))
                    old.add_done_callback(self._old.discard)
                else:
                    call.cancel()
                await asyncio.wait((writing,))  # awaiting it would take our own cancellation for its
                if not writing.cancelled():
                    writing.result()

    async def _write(self, call: Any) -> None:
        """Sends what was gathered until the stream is old, and leaves it open for what is withdrawn later. A failure is
        told by the reader."""
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
                    questions, withdrawn = self._batch(), self._held.take_withdrawn()
                    if not questions and not withdrawn:
                        break
                    self._unanswered.append(_Batch(questions=questions, sent_at_s=monotonic_s()))
                    messages = [question.message for question in questions]
                    await call.write(scheduler_pb2.RouteStreamRequest(requests=messages, withdrawn=withdrawn))

    async def _read(self, call: Any, writing: "asyncio.Task[None]") -> "asyncio.Future[Any] | None":
        """Hands each answer to its caller until the stream ends, or until an old one has only held questions left: then
        the read that waits for their final answers is given back.

        Raises AioRpcError when the stream fails or falls silent.
        """
        while True:
            reading = asyncio.ensure_future(call.read())
            try:
                while not reading.done():
                    if writing.done() and not self._unanswered:
                        if self._held:
                            old, reading = reading, _nothing()
                            return old
                        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                            await call.done_writing()
                    waited_for = (reading,) if writing.done() else (reading, writing)
                    await asyncio.wait(waited_for, timeout=self._patience_s(), return_when=asyncio.FIRST_COMPLETED)
            finally:
                reading.cancel()
            if (response := _told(reading)) is None:
                if self._unanswered or self._held:
                    raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream ended before its last answer")
                return None
            self._answer(response.answers)

    def _patience_s(self) -> float:
        """How long the oldest batch and the question held for longest may still wait. Raises RouteError when it was too
        long."""
        limits_s = [batch.sent_at_s + TRY_TIMEOUT_S for batch in islice(self._unanswered, 1)]
        limits_s += [question.held_until_s for question in islice(self._held.questions(), 1)]
        if not limits_s:
            return TRY_TIMEOUT_S
        left_s = min(limits_s) - monotonic_s()
        if left_s <= 0:
            raise RouteError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {TRY_TIMEOUT_S:g} s")
        return left_s

    async def _read_out(self, call: Any, reading: "asyncio.Future[Any]", held: HeldQuestions) -> None:
        """The final answers of a stream that gave way to a new one; who gets none there is asked again."""
        try:
            while held:
                limit_s = max(question.held_until_s for question in held.questions())
                async with asyncio.timeout(limit_s - monotonic_s()):
                    await _first_of(reading, held)
                if withdrawn := held.take_withdrawn():
                    await call.write(scheduler_pb2.RouteStreamRequest(withdrawn=withdrawn))
                if not reading.done():
                    continue
                if (response := _told(reading)) is None:
                    return
                held.finish(response.answers)
                reading = asyncio.ensure_future(call.read())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            log.warning("a stream that held %d requests failed (%s); they are asked again", len(held), error)
        finally:
            reading.cancel()
            call.cancel()  # so the service holds nothing of it any more
            self._again(list(held.questions()))

    def _answer(self, answers: Sequence[scheduler_pb2.RouteAnswer]) -> None:
        if answers and answers[0].held:
            self._held.finish(answers)
            return
        batch = self._unanswered.popleft()
        self._room.set()
        again: RouteError | None = None
        left: list[Question] = []
        for question, answer in zip(batch.questions, answers, strict=True):
            if question.answer.done():
                if answer.decision.verdict == decision_pb2.VERDICT_QUEUE and not question.message.dry_run:
                    self._held.withdraw(answer.decision.id)
                    self._gathered.set()
                continue
            if answer.HasField("decision"):
                self._take(question, answer.decision)
                continue
            error = error_of(answer.error)
            if error.code() in SILENT_CODES:  # this replica can't; another may
                again = error
                left.append(question)
            else:
                question.answer.set_exception(error)
        if again is not None:
            self._unanswered.appendleft(_Batch(questions=left, sent_at_s=batch.sent_at_s))
            raise again

    def _take(self, question: Question, decision: decision_pb2.Decision) -> None:
        """The service's decision, or its word that the final one comes later."""
        if decision.verdict != decision_pb2.VERDICT_QUEUE or question.message.dry_run:
            question.answer.set_result(decision)
            return
        question.held_until_s = monotonic_s() + question.message.request.wait_max_s + TRY_TIMEOUT_S
        self._held.put(question, decision.id)

    def _withdraw(self, question: Question) -> None:
        """Its caller has an answer or has left; if it is still held, the service need not go on holding it."""
        held = question.held_by
        if held is not None and held.leaves(question) and held is self._held:
            self._gathered.set()

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        """Puts what is unanswered back to the front for the next replica, unless each has been asked."""
        silent = error.code() in SILENT_CODES
        self._lane = (self._lane + 1) % len(self._lanes)
        back: list[Question] = []
        for question in self._open():
            question.tries += 1
            if question.answer.done():
                continue
            if silent and question.tries < len(self._lanes):
                back.append(question)
            else:
                question.answer.set_exception(error)
        self._unanswered.clear()
        self._held.clear()
        self._again(back)

    def _open(self) -> list[Question]:
        """All that is asked on the present stream, held ones first: they have waited for longest."""
        return [*self._held.questions()] + [question for batch in self._unanswered for question in batch.questions]

    def _again(self, questions: list[Question]) -> None:
        """Puts questions to the front of those that wait."""
        for question in questions:
            question.held_by, question.held = None, ""
        self._waiting.extendleft(reversed(questions))
        if self._waiting:
            self._gathered.set()
        else:
            self._gathered.clear()

    def _batch(self) -> list[Question]:
        """The next questions that still have somebody who waits, within the bounds of one message."""
        questions: list[Question] = []
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
        for question in (*self._open(), *self._waiting):
            if not question.answer.done():
                question.answer.set_exception(RouteError(code, details))
        self._unanswered.clear()
        self._held.clear()
        self._waiting.clear()
        self._gathered.clear()


class _Batch(Struct, frozen=True, kw_only=True):
    questions: list[Question]
    sent_at_s: float


def _nothing() -> "asyncio.Future[Any]":
    """A read that was given to somebody else."""
    return asyncio.get_running_loop().create_future()


def _told(reading: "asyncio.Future[Any]") -> scheduler_pb2.RouteStreamResponse | None:
    """What was read, None at the end of the stream."""
    try:
        response = reading.result()
    except asyncio.CancelledError as error:  # gRPC's own: nobody of us has cancelled the call
        raise RouteError(grpc.StatusCode.UNAVAILABLE, "the stream was cut") from error
    return None if response is grpc.aio.EOF else response


async def _first_of(reading: "asyncio.Future[Any]", held: HeldQuestions) -> None:
    """Returns when something was read, or when somebody has left."""
    left = asyncio.ensure_future(held.left.wait())
    try:
        await asyncio.wait((reading, left), return_when=asyncio.FIRST_COMPLETED)
    finally:
        left.cancel()


def _give_up(question: Question, timeout_s: float) -> None:
    if not question.answer.done():
        question.answer.set_exception(
            RouteError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no decision within {timeout_s:g} s")
        )
