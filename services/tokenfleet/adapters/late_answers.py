"""Late answers: what one stream holds, and its messages with the final answers between them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from tokenfleet.adapters.holding import Holding
from tokenfleet.core.decision import Decision

M = TypeVar("M")
Late = tuple[str, Decision | Exception]
"""The id of the `queue` decision, and what came of it: `queue` again where its place in line has changed."""


class LateAnswers:
    """The held calls of one stream."""

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._open: dict[asyncio.Future[Decision], str] = {}
        self._come: list[Late] = []
        self._changed = asyncio.Event()

    def __bool__(self) -> bool:
        """Whether a final answer is yet to come or to be taken."""
        return bool(self._open or self._come)

    def expect(self, said: Decision | Exception) -> None:
        """The stream was told so at once; if it was `queue`, it waits for what comes of that."""
        if not isinstance(said, Decision) or said.verdict != "queue" or said.dry_run:
            return
        answer = self._holding.answer_to(said, self._moved)
        self._open[answer] = said.id
        answer.add_done_callback(self._done)

    def withdraw(self, queue_id: str) -> None:
        """Nobody behind the stream waits for it any more."""
        for answer, name in self._open.items():
            if name == queue_id:
                answer.cancel()
                return

    def take(self) -> list[Late]:
        """Those that have come since the last time."""
        come, self._come = self._come, []
        return come

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._come)

    async def change(self) -> None:
        """Returns when an answer has come or a caller has left since the last time."""
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        """The stream has ended."""
        for answer in tuple(self._open):
            answer.cancel()

    def _moved(self, queue: Decision) -> None:
        self._come.append((queue.id, queue))
        self._changed.set()

    def _done(self, answer: "asyncio.Future[Decision]") -> None:
        queue_id = self._open.pop(answer)
        if not answer.cancelled():
            error = answer.exception()
            self._come.append((queue_id, answer.result() if error is None else _plain(error)))
        self._changed.set()


async def interleaved(messages: AsyncIterator[M], late: LateAnswers) -> AsyncGenerator[M | None]:
    """Each message; None each time that final answers have come, until the last one after the last message."""
    reading: asyncio.Future[M | None] | None = None
    try:
        while True:
            if late or reading is not None:
                reading = reading or asyncio.ensure_future(anext(messages, None))
                await _first_of(reading, late)
                if late.ready:
                    yield None
                if not reading.done():
                    continue
                message, reading = reading.result(), None
            else:  # nothing is held: no task, no second wait
                message = await anext(messages, None)
            if message is None:
                break
            yield message
        while late:
            if not late.ready:
                await late.change()
            if late.ready:
                yield None
    finally:
        if reading is not None:
            reading.cancel()


async def _first_of(reading: "asyncio.Future[M | None]", late: LateAnswers) -> None:
    if late.ready:
        return
    changed = asyncio.ensure_future(late.change())
    try:
        await asyncio.wait({reading, changed}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        changed.cancel()


def _plain(error: BaseException) -> Exception:
    """What a future failed with; it is given nothing else."""
    assert isinstance(error, Exception)
    return error
