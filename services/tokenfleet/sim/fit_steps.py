"""Fit steps: what an engine must have done, step by step, for its requests to end as they were measured.

An engine tells neither its steps nor its batch. Both follow from its requests' times: a request decodes from its first
token to its end, and prompts are prefilled first come first served in chunks that fill the token budget. Every first
token is the end of a known step, so an error in a step's assumed length ends there.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from tokenfleet.sim.profiles import Profile

Floats = NDArray[np.float64]

SAMPLES = 16  # moments at which a request's decode looks at the batch around it
TOKENS_DECODED_MIN = 8  # below, the steps at both ends of a decode weigh too much


class Measured(Struct, frozen=True, kw_only=True):
    """One request of one engine: arrival, first token and end in seconds of one clock, and its tokens."""

    arrived_s: float
    first_token_s: float
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Equation(Struct, frozen=True, kw_only=True):
    """Seconds that passed, and the steps that took them.

    `prefill_steps` hold `tokens` in all (their decodes among them), `pairs` token pairs. `decoding` weighs the other
    steps by the decodes in each: (decodes, steps). `context_tokens` are summed over all steps. `noise_s` is how far
    off the steps at the ends may be.
    """

    seconds: float
    prefill_steps: float
    tokens: float
    pairs: float
    context_tokens: float
    decoding: tuple[tuple[float, float], ...]
    noise_s: float
    of_prefill: bool


class _Batch:
    """The decodes of one engine at any moment, and the context they read."""

    def __init__(self, requests: Sequence[Measured]) -> None:
        decoding = [r for r in requests if r.ended_s > r.first_token_s]
        self._begins, self._begun = _running(decoding, [r.first_token_s for r in decoding])
        self._ends, self._ended = _running(decoding, [r.ended_s for r in decoding])

    def at(self, moment_s: float) -> tuple[int, float]:
        """Decodes and their summed context."""
        begun = bisect_right(self._begins, moment_s)
        ended = bisect_right(self._ends, moment_s)
        before, after = self._begun[begun], self._ended[ended]
        context = before[0] - after[0] + (before[1] - after[1]) * moment_s
        return begun - ended, max(0.0, context)


def _running(decoding: Sequence[Measured], moments_s: list[float]) -> tuple[list[float], list[tuple[float, float]]]:
    """The moments in order; after as many of them, the sums of a and b where a request's context is a + b·t."""
    order = sorted(range(len(decoding)), key=moments_s.__getitem__)
    sums = [(0.0, 0.0)]
    for i in order:
        r = decoding[i]
        tokens_per_s = (r.output_tokens - 1) / (r.ended_s - r.first_token_s)
        a, b = sums[-1]
        sums.append((a + r.prompt_tokens - tokens_per_s * r.first_token_s, b + tokens_per_s))
    return [moments_s[i] for i in order], sums


def equations_of(requests: Sequence[Measured], profile: Profile) -> list[Equation]:
    """What one engine's requests say of its steps, when these take about as long as `profile`'s."""
    batch = _Batch(requests)
    steps = _Steps()
    prefills = _prefills(requests, batch, profile, steps)
    return prefills + _decodes(requests, batch, profile, steps)


class _Steps:
    """The prefill steps, by their ends, with sums up to each."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.sums: list[tuple[float, float, float, float]] = [(0.0, 0.0, 0.0, 0.0)]

    def add(self, end_s: float, *, steps: int, tokens: float, pairs: float, context: float) -> None:
        all_steps, all_tokens, all_pairs, all_context = self.sums[-1]
        self.ends_s.append(end_s)
        self.sums.append((all_steps + steps, all_tokens + tokens, all_pairs + pairs, all_context + context))

    def between(self, after_s: float, until_s: float) -> tuple[float, float, float, float]:
        """Steps that ended after one moment up to another: how many, and their tokens, pairs and context."""
        first, last = self.sums[bisect_right(self.ends_s, after_s)], self.sums[bisect_right(self.ends_s, until_s)]
        return (last[0] - first[0], last[1] - first[1], last[2] - first[2], last[3] - first[3])


def _prefills(requests: Sequence[Measured], batch: _Batch, profile: Profile, steps: _Steps) -> list[Equation]:
    """One equation for each step that ended in a first token: from the one before, or from an arrival at rest."""
    queue = sorted(requests, key=lambda r: (r.first_token_s, r.arrived_s))
    left = [max(1, r.prompt_tokens - r.cached_tokens) for r in queue]
    equations: list[Equation] = []
    head, now_s, span = 0, -1.0, _Span(at_s=-1.0, sums=steps.sums[-1])
    while head < len(queue):
        if queue[head].arrived_s >= now_s:
            now_s = queue[head].arrived_s
            span = _Span(at_s=now_s, sums=steps.sums[-1])
            span.meets(batch.at(now_s), profile)
        decodes, context = batch.at(now_s)
        room = max(1, profile.token_budget - decodes)
        tokens = pairs = 0.0
        through = head
        while through < len(queue) and queue[through].arrived_s <= now_s:
            together = through > head and queue[through].first_token_s <= queue[through - 1].first_token_s
            chunk = left[through] if together else min(room, left[through])
            computed = queue[through].prompt_tokens - left[through]
            pairs += chunk * (computed + chunk / 2)
            tokens += chunk
            room -= chunk
            left[through] -= chunk
            if left[through]:
                break
            through += 1
        step_s = profile.step_s(prefill_tokens=int(tokens), pairs=pairs, decodes=decodes, context_tokens=int(context))
        if through == head:  # not through yet: its end is assumed, and comes before the first token
            now_s = min(now_s + step_s, (now_s + queue[head].first_token_s) / 2)
        else:
            now_s = max(now_s, max(r.first_token_s for r in queue[head:through]))
        if _floored(tokens + decodes, profile):
            span.decoding.append((tokens + decodes, 1.0))
            span.context += context
            steps.add(now_s, steps=0, tokens=0.0, pairs=pairs, context=0.0)
        else:
            steps.add(now_s, steps=1, tokens=tokens + decodes, pairs=pairs, context=context)
        if through > head:
            equations += span.equation(now_s, steps.sums[-1])
            head, span = through, _Span(at_s=now_s, sums=steps.sums[-1])
    return equations


def _floored(tokens: float, profile: Profile) -> bool:
    """Whether a step of so few tokens takes as long as any: as a decode step of as many."""
    linear_s = profile.prefill_base_s + profile.token_s * tokens
    return profile.step_s(prefill_tokens=int(tokens), pairs=0.0, decodes=0, context_tokens=0) > linear_s * (1 + 1e-9)


class _Span:
    """The time from one known moment to the next, while its steps are found."""

    def __init__(self, *, at_s: float, sums: tuple[float, float, float, float]) -> None:
        self._at_s = at_s
        self._sums = sums
        self._noise_s = 0.0
        self.decoding: list[tuple[float, float]] = []
        self.context = 0.0

    def meets(self, running: tuple[int, float], profile: Profile) -> None:
        """A prompt that comes to no other waits for the end of the decode step it meets: half of one on average."""
        decodes, context = running
        if not decodes:
            return
        step_s = profile.step_s(prefill_tokens=0, pairs=0.0, decodes=decodes, context_tokens=int(context))
        self._noise_s = 0.3 * step_s  # any share from 0 to 1 is as likely
        self.decoding.append((float(decodes), 0.5))
        self.context += 0.5 * context

    def equation(self, until_s: float, sums: tuple[float, float, float, float]) -> list[Equation]:
        """What the span's steps took; none when the clock can't tell its ends apart."""
        if until_s <= self._at_s:
            return []
        count, tokens, pairs, context = (after - before for after, before in zip(sums, self._sums, strict=True))
        told = Equation(
            seconds=until_s - self._at_s,
            prefill_steps=count,
            tokens=tokens,
            pairs=pairs,
            context_tokens=context + self.context,
            decoding=tuple(self.decoding),
            noise_s=self._noise_s,
            of_prefill=True,
        )
        return [told]


def _decodes(requests: Sequence[Measured], batch: _Batch, profile: Profile, steps: _Steps) -> list[Equation]:
    """One equation for each request's decode: a step a token, with the prefill steps that fell in between."""
    equations: list[Equation] = []
    for r in requests:
        took_s = r.ended_s - r.first_token_s
        if r.output_tokens <= TOKENS_DECODED_MIN or took_s <= 0.0:
            continue
        count, tokens, pairs, context = steps.between(r.first_token_s, r.ended_s)
        alone = r.output_tokens - 1 - count
        if alone < 0:
            continue  # some step's end was assumed on the wrong side
        seen = [batch.at(r.first_token_s + took_s * (i + 0.5) / SAMPLES) for i in range(SAMPLES)]
        equations.append(
            Equation(
                seconds=took_s,
                prefill_steps=count,
                tokens=tokens,
                pairs=pairs,
                context_tokens=context + alone * sum(read for _, read in seen) / SAMPLES,
                decoding=tuple((float(decodes), alone / SAMPLES) for decodes, _ in seen),
                noise_s=profile.step_s(prefill_tokens=0, pairs=0.0, decodes=1, context_tokens=0),
                of_prefill=False,
            )
        )
    return equations
