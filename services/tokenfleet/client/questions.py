"""Questions: what callers ask one site's replicas, and those of them that a stream's replica holds."""

import asyncio
from collections.abc import Iterator, Sequence

from msgspec import Struct

from tokenfleet.client.route_error import error_of
from tokenfleet.wire.v1 import decision_pb2, scheduler_pb2


class Question(Struct, kw_only=True, eq=False):
    """One caller's request, and the future on which that caller waits; `held` is the `queue` decision it waits by, and
    `held_by` what holds it."""

    message: scheduler_pb2.RouteRequest
    answer: "asyncio.Future[decision_pb2.Decision]"
    tries: int = 0
    held: str = ""
    held_by: "HeldQuestions | None" = None
    held_until_s: float = 0.0


class HeldQuestions:
    """The questions that the replica behind one stream holds, and what it is to be told of those who left."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self._questions: dict[str, list[Question]] = {}
        self._withdrawn: list[str] = []

    def __len__(self) -> int:
        return len(self._questions)

    def questions(self) -> Iterator[Question]:
        """In the order in which they began to wait."""
        return (question for questions in self._questions.values() for question in questions)

    def put(self, question: Question, queue_id: str) -> None:
        question.held_by, question.held = self, queue_id
        self._questions.setdefault(queue_id, []).append(question)

    def leaves(self, question: Question) -> bool:
        """Nobody waits for it any more; whether it was still held."""
        questions = self._questions.get(question.held, [])
        if question not in questions:
            return False
        questions.remove(question)
        if not questions:
            del self._questions[question.held]
        self.withdraw(question.held)
        return True

    def withdraw(self, queue_id: str) -> None:
        """One caller fewer waits by that decision."""
        self._withdrawn.append(queue_id)
        self.left.set()

    def take_withdrawn(self) -> list[str]:
        """What is to be told, once."""
        self.left.clear()
        withdrawn, self._withdrawn = self._withdrawn, []
        return withdrawn

    def finish(self, answers: Sequence[scheduler_pb2.RouteAnswer]) -> None:
        """Hands final answers to those who waited for them; one whose caller has left is nobody's. Where a request
        stands in line meanwhile tells nobody here anything."""
        for answer in answers:
            if answer.decision.verdict == decision_pb2.VERDICT_QUEUE:
                continue
            for question in self._questions.pop(answer.held, ()):
                if question.answer.done():
                    continue
                if answer.HasField("decision"):
                    question.answer.set_result(answer.decision)
                else:
                    question.answer.set_exception(error_of(answer.error))

    def clear(self) -> None:
        self._questions.clear()
