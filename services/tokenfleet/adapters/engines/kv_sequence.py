"""KvSequence: what a batch's number says about the stream it came from."""

from typing import Literal

U64 = 2**64
RECENT_KEPT = 256  # batches whose content is remembered, beside those replayed and not yet passed
Verdict = Literal["next", "again", "gap", "back"]


class KvSequence:
    """One engine rank's numbering; `expected` is the next number, None before the stream's place is known.

    Numbers wrap at 2^64. A repeated number with the same content is the same batch; with other content, or too old to
    be remembered, it is the engine's next life.
    """

    def __init__(self) -> None:
        self.expected: int | None = None
        self._recent: dict[int, int] = {}  # number → hash of the batch, in the order of arrival

    def judge(self, number: int, payload: bytes) -> Verdict:
        """Whether the batch is the next one, was had before, is ahead of the next one, or belongs to another life."""
        if self.expected is None:
            return "gap"
        if (ahead := (number - self.expected) % U64) == 0:
            return "next"
        if ahead < U64 // 2:
            return "gap"
        return "again" if self._recent.get(number) == hash(payload) else "back"

    def took(self, number: int, payload: bytes, *, replayed: bool) -> None:
        """The batch was applied; the one after it is expected."""
        self._recent[number] = hash(payload)
        self.expected = (number + 1) % U64
        # a live one has passed what was replayed: no more copies of that will come
        while not replayed and len(self._recent) > RECENT_KEPT:
            del self._recent[next(iter(self._recent))]

    def restart(self, expected: int | None) -> None:
        """Forget the stream; the next number is `expected`."""
        self.expected = expected
        self._recent.clear()
