"""Sample: one first token with what was believed at its placement, and which of them tell how long a prefill takes."""

from bisect import bisect_right
from collections import deque

from msgspec import Struct

from tokenfleet.core.records import OutcomeEvent, PlacedOn

SHARED_CHUNK_S = 0.001  # two first tokens this close came from one iteration: one sample gets 0, the other the sum
FIRST_TOKENS_KEPT = 512  # twice the sequences of an engine; bounds how far back a sample looks


class Sample(Struct, frozen=True, kw_only=True):
    """One first token: what was believed at placement, and when it was dispatched and came.

    `dispatched_s` and `first_token_s` are times of the clock that `clock` names (empty: no clock but their own, only
    the difference counts). `cached_tokens` is what the engine reported, None if it reports none.
    """

    instance: str
    clock: str
    dispatched_s: float
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int | None
    placed: PlacedOn


def sample_of(event: OutcomeEvent) -> Sample | None:
    """The sample in a first-token event; None for other events, and without `placed` or an instance.

    `attempt_s` runs from this attempt's dispatch, on the clock that `clock_s` is read from.
    """
    placed = event.placed
    if event.kind != "first_token" or placed is None or not event.instance:
        return None
    known = bool(event.clock) and event.clock_s is not None
    first_token_s = event.clock_s if known and event.clock_s is not None else event.attempt_s
    return Sample(
        instance=event.instance,
        clock=event.clock if known else "",
        dispatched_s=first_token_s - event.attempt_s,
        first_token_s=first_token_s,
        prompt_tokens=placed.hit_tokens + placed.uncached_tokens
        if event.prompt_tokens is None
        else event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        placed=placed,
    )


class FirstTokens:
    """First tokens of one instance on one clock, in their order: tells which prefills ran alone, and since when.

    A prefill runs from its dispatch, or from the first token before it when that came later. It is clean if no other
    first token comes within 1 ms, and if all sequences that were ahead of it have been seen: those of other reporters
    are not, and their work would count as this one's.
    """

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=FIRST_TOKENS_KEPT)
        self._newest: tuple[Sample, float] | None = None  # held until the next shows that it was alone

    def add(self, sample: Sample) -> tuple[Sample, float] | None:
        """The sample before this one and the time since which it was computed, if it was clean.

        One that comes out of order is left out.
        """
        previous_s = self._times_s[-1] if self._times_s else sample.dispatched_s
        if sample.first_token_s < previous_s:
            return None
        shared = bool(self._times_s) and sample.first_token_s - previous_s < SHARED_CHUNK_S
        released = None if shared else self._newest
        unseen = sample.placed.queued > self._seen_since(sample.dispatched_s)
        self._newest = None if shared or unseen else (sample, max(sample.dispatched_s, previous_s))
        self._times_s.append(sample.first_token_s)
        return released

    def _seen_since(self, dispatched_s: float) -> int:
        return len(self._times_s) - bisect_right(self._times_s, dispatched_s)
