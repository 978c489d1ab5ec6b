"""Sample: one first token with what was believed at its placement, and what an engine computed between two of them."""

import math
from bisect import bisect_right
from collections import deque

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.predict.work import uncached_tokens
from tokenfleet.core.records import OutcomeEvent, PlacedOn

SHARED_CHUNK_S = 0.001  # two first tokens this close came from one iteration
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

    @property
    def hit_tokens(self) -> int:
        """Tokens that the engine took from its cache: as reported, else as believed."""
        return self.placed.hit_tokens if self.cached_tokens is None else min(self.cached_tokens, self.prompt_tokens)

    @property
    def uncached_tokens(self) -> int:
        return uncached_tokens(self.prompt_tokens, self.hit_tokens)


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


class Span(Struct, frozen=True, kw_only=True):
    """What an engine computed in `seconds` until a first token, in the terms of its time model.

    `tokens` new ones of all prompts in these `iterations`, `pairs` of a token and one it attends to, while
    `decoding` sequences of `context_tokens` decoded. `from_rest`: nothing was prefilled when it began, so it began
    within an iteration of the decodes and waited for the end of that; else it began with the first token before it.
    """

    seconds: float
    iterations: int
    tokens: float
    pairs: float
    decoding: int
    context_tokens: float
    from_rest: bool


def span_alone(sample: Sample, *, budget_tokens: int) -> Span:
    """The span of a prompt that nothing was ahead of, from its dispatch to its first token."""
    return _Group.of(sample, since_s=sample.dispatched_s, begun_tokens=0.0, complete=True, from_rest=True).span(
        budget_tokens, next_tokens=0.0, next_pairs=0.0
    )


class FirstTokens:
    """First tokens of one instance on one clock, in their order: tells what was computed between two of them.

    An engine lays prompts into iterations of B − n_dec tokens in the order of their dispatch. So the iteration that
    ends one prompt begins the next, if that was dispatched before it began: its head is counted where it was computed.
    An iteration lasts as long as the mean of its span. Left out are prompts whose first tokens come within 1 ms, from
    one iteration, and those with sequences ahead that weren't seen here: the work of other reporters' would count as
    theirs.
    """

    def __init__(self, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens
        self._times_s: deque[float] = deque(maxlen=FIRST_TOKENS_KEPT)
        self._group: _Group | None = None  # held until the next shows what else its last iteration computed

    def add(self, sample: Sample) -> Span | None:
        """The span before this one, if it is known wholly. A first token out of order is left out."""
        last_s = self._times_s[-1] if self._times_s else -math.inf
        if sample.first_token_s < last_s:
            return None
        complete = sample.placed.queued <= self._seen_since(sample.dispatched_s)
        self._times_s.append(sample.first_token_s)
        group = self._group
        if group is not None and sample.first_token_s - last_s < SHARED_CHUNK_S:
            self._group = group.joined(sample)
            return None
        begun_tokens = 0.0 if group is None else group.begun_tokens(sample, self._budget_tokens)
        self._group = _Group.of(
            sample,
            since_s=max(sample.dispatched_s, last_s),
            begun_tokens=begun_tokens,
            complete=complete,
            from_rest=sample.dispatched_s >= last_s,
        )
        if group is None or not group.complete:
            return None
        return group.span(
            self._budget_tokens, next_tokens=begun_tokens, next_pairs=_pairs(begun_tokens, sample.hit_tokens)
        )

    def _seen_since(self, dispatched_s: float) -> int:
        return len(self._times_s) - bisect_right(self._times_s, dispatched_s)


class _Group(Struct, frozen=True, kw_only=True):
    """Prompts whose first tokens came from one iteration, and what of them was computed since `since_s`."""

    since_s: float
    first_token_s: float
    tokens: float
    pairs: float
    decoding: int
    context_tokens: float
    from_rest: bool
    complete: bool

    @classmethod
    def of(cls, sample: Sample, *, since_s: float, begun_tokens: float, complete: bool, from_rest: bool) -> "_Group":
        tokens, hit = sample.uncached_tokens, sample.hit_tokens
        return cls(
            since_s=since_s,
            first_token_s=sample.first_token_s,
            tokens=tokens - begun_tokens,
            pairs=_pairs(tokens, hit) - _pairs(begun_tokens, hit),
            decoding=sample.placed.decoding,
            context_tokens=sample.placed.context_tokens,
            from_rest=from_rest,
            complete=complete,
        )

    def joined(self, sample: Sample) -> "_Group":
        """This group and one prompt more. What it took is no sample; what it left of its last iteration counts."""
        return replace(self, tokens=self.tokens + sample.uncached_tokens, complete=False)

    def begun_tokens(self, after: Sample, budget_tokens: int) -> float:
        """Tokens of the next prompt in this group's last iteration: what that left, if it was there before it began."""
        iterations = self._iterations(budget_tokens)
        began_s = self.first_token_s - (self.first_token_s - self.since_s) / iterations
        left = iterations * self._room(budget_tokens) - self.tokens
        return min(left, after.uncached_tokens - 1.0) if after.dispatched_s < began_s else 0.0

    def span(self, budget_tokens: int, *, next_tokens: float, next_pairs: float) -> Span:
        return Span(
            seconds=self.first_token_s - self.since_s,
            iterations=self._iterations(budget_tokens),
            tokens=self.tokens + next_tokens,
            pairs=self.pairs + next_pairs,
            decoding=self.decoding,
            context_tokens=self.context_tokens,
            from_rest=self.from_rest,
        )

    def _iterations(self, budget_tokens: int) -> int:
        return math.ceil(self.tokens / self._room(budget_tokens))

    def _room(self, budget_tokens: int) -> float:
        """Prompt tokens that one iteration takes."""
        return max(budget_tokens - self.decoding, 1.0)


def _pairs(tokens: float, hit_tokens: int) -> float:
    return tokens * (hit_tokens + tokens / 2)
