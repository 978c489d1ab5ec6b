"""Repeats: which calls were answered here lately, and which logical requests were charged.

A repeated call must not place its request twice, and a retry must not be charged twice.
"""

from collections.abc import Callable

import xxhash
from msgspec import Struct

from tokenfleet.core.asked import Steps
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.remembered import Remembered

ANSWERS_KEPT_S = 10.0  # a client repeats a call within its deadline of 2 s; what was said earlier may be wrong by now
ANSWERS_MAX = 10_000  # about 70 MB, at 1,000 decisions a second
CHARGED_MAX = 100_000  # about 20 MB; logical requests that are not over yet

Call = tuple[str, str, int, int, Steps]  # tenant, request, attempt, hop, questions


class Repeats:
    """The answers of the last ten seconds, and the logical requests that a tenant's quota was charged for.

    `entry_of` gives the policy's entry that a tenant falls under.
    """

    def __init__(self, entry_of: Callable[[str], str] = str) -> None:
        self._entry_of = entry_of
        self._answers: Remembered[Call, _Answer] = Remembered(ANSWERS_MAX)
        self._waiting: dict[Call, _Answer] = {}  # bounded by the policy's held_max
        self._charged: Remembered[tuple[str, str], bool] = Remembered(CHARGED_MAX)

    def answered(self, request: Request, steps: Steps, *, now_s: float) -> Decision | None:
        """The answer that this call got before, None if it is new. Of a held one it is `queue`, as long as it is held.

        Raises BadRequestError when the same id and attempt asked for something else then.
        """
        call = _call(request, steps)
        if (known := self._waiting.get(call)) is None:
            known = self._answers.get(self._entry_of(request.tenant), call)
            if known is None or now_s - known.at_s > ANSWERS_KEPT_S:
                return None
        if known.body != _body(request):
            raise BadRequestError("id", f"attempt {request.attempt} of it asked for another prompt or model before")
        return known.decision

    def waits(self, request: Request, steps: Steps, decision: Decision, *, now_s: float) -> None:
        """The call is held, by the decision `queue`, until it `leaves`."""
        self._waiting[_call(request, steps)] = _Answer(at_s=now_s, body=_body(request), decision=decision)

    def leaves(self, request: Request, steps: Steps) -> None:
        """The call is held no longer."""
        self._waiting.pop(_call(request, steps), None)

    def answer(self, request: Request, steps: Steps, decision: Decision, *, now_s: float) -> None:
        """Keeps an answer that holds something. A refusal holds nothing: who comes again is asked anew."""
        if decision.verdict not in ("admit", "redirect"):
            return
        entry, answer = self._entry_of(request.tenant), _Answer(at_s=now_s, body=_body(request), decision=decision)
        self._answers.put(entry, _call(request, steps), answer)
        while (oldest := self._answers.oldest(entry)) is not None and now_s - oldest.at_s > ANSWERS_KEPT_S:
            self._answers.forget_oldest(entry)

    def was_charged(self, request: Request) -> bool:
        """Whether an earlier attempt of the logical request has been charged to its tenant's quota."""
        return self._charged.get(self._entry_of(request.tenant), (request.tenant, request.id)) is not None

    def charged(self, request: Request) -> None:
        """The logical request has been charged: its retries are free."""
        self._charged.put(self._entry_of(request.tenant), (request.tenant, request.id), True)

    def __len__(self) -> int:
        return len(self._answers)


class _Answer(Struct, frozen=True, kw_only=True):
    at_s: float
    body: tuple[str, int, int]
    decision: Decision


def _call(request: Request, steps: Steps) -> Call:
    return request.tenant, request.id, request.attempt, request.hop, steps


def _body(request: Request) -> tuple[str, int, int]:
    return request.model, request.prompt_tokens, xxhash.xxh3_64_intdigest(request.block_keys)
