"""Feasible: can this request still meet its service level, or is it kinder to refuse it now?

The chance is read off outcomes: the share of this pool's last RESIDUALS_KEPT first tokens whose actual time over the
predicted would have been in time. It passes when in time is likelier than not, is refused early only when that is
improbable, and queues between. A gate that refuses on a wrong estimate never learns that it is wrong, so a share of
those to be refused run as probes, and the gate watches how they end. When too many were in time it refuses nobody and
only queues. Then all that it would have refused are probes; once hardly any of them is in time, and not before
`again_after_s`, it refuses again by itself: whoever changed the pool need not know of the gate.

One `Gate` a pool. `judge` each request that is asked for; `first_token` with each first token's predicted and actual
time; `ended` with how each request fared that the gate has judged (others are ignored).
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import Literal

import xxhash
from msgspec import Struct

from tokenfleet.core.slomax.terms import GatePolicy

RESIDUALS_KEPT = 500
RESIDUALS_MIN = 30  # below, chances are too coarse to refuse on
RATIO_MAX = 100.0
PROBES_KEPT = 200
WATCHED_MAX = 10_000  # requests judged and not ended; the oldest goes first

Answer = Literal["pass", "queue", "reject", "probe"]


class Ahead(Struct, frozen=True, kw_only=True):
    """What lies ahead of a request's first token, and what is agreed.

    `wait_s` + `prefill_s` is the predicted time from now, `elapsed_s` has passed since the logical request arrived, and
    `rtt_s` is the way to its client and back. `tpot_s` is the predicted time per output token once its KV is there too.
    None: nothing is agreed.
    """

    wait_s: float
    prefill_s: float
    elapsed_s: float = 0.0
    rtt_s: float = 0.0
    tpot_s: float = 0.0
    output_q50_tokens: float = 0.0
    output_q90_tokens: float = 0.0
    ttft_max_s: float | None = None
    tpot_max_s: float | None = None
    deadline_s: float | None = None

    def left_s(self, output_tokens: float) -> float | None:
        """Seconds that waiting and prefill may take, None for any: until the agreed first token, and early enough for
        that much output before the deadline, which counts from arrival as `elapsed_s` does."""
        spent_s = self.elapsed_s + self.rtt_s
        limits_s = [] if self.ttft_max_s is None else [self.ttft_max_s - spent_s]
        if self.deadline_s is not None:
            limits_s.append(self.deadline_s - spent_s - output_tokens * self.tpot_s)
        return min(limits_s, default=None)


class Feasibility(Struct, frozen=True, kw_only=True):
    """The gate's answer and why. `chance` is that of being in time with a long output (q90), None when nothing is
    agreed or too few outcomes are known."""

    answer: Answer
    chance: float | None
    why: str = ""


class Gate:
    """One pool's residuals, and what became of those that the gate would refuse.

    `queues_only` says why it refuses nobody at present, empty when it does refuse: to be raised as an alarm.
    """

    def __init__(self, pool: str, terms: GatePolicy) -> None:
        self.terms = terms
        self.queues_only = ""
        self._pool = pool
        self._switched_s = 0.0
        self._recent: deque[float] = deque(maxlen=RESIDUALS_KEPT)
        self._ordered: list[float] = []
        self._watched: OrderedDict[str, None] = OrderedDict()
        self._in_time: deque[bool] = deque(maxlen=PROBES_KEPT)

    def judge(self, request: str, ahead: Ahead) -> Feasibility:
        """`request` is the logical request's id: it decides alone whether this is a probe, at any replica and retry."""
        left_s = ahead.left_s(ahead.output_q90_tokens)
        chance = self._chance(ahead, left_s)
        # A deadline is judged on a short output before anybody is refused: most end before their q90.
        best = self._chance(ahead, ahead.left_s(ahead.output_q50_tokens))
        if best is not None and best < self.terms.reject_chance:
            return self._would_reject(request, ahead, chance, best)
        if chance is not None and chance < self.terms.pass_chance:
            return Feasibility(answer="queue", chance=chance, why=f"in time with a chance of {chance:.0%}")
        if chance is None and left_s is not None and left_s < ahead.wait_s + ahead.prefill_s:
            return Feasibility(answer="queue", chance=None, why="predicted late, with too few outcomes to be sure")
        if ahead.tpot_max_s is not None and ahead.tpot_s > ahead.tpot_max_s:
            why = f"{ahead.tpot_s * 1e3:.0f} ms a token with it, {ahead.tpot_max_s * 1e3:.0f} agreed"
            return Feasibility(answer="queue", chance=chance, why=why)
        return Feasibility(answer="pass", chance=chance)

    def first_token(self, *, predicted_s: float, actual_s: float) -> None:
        """A first token came `actual_s` after its dispatch, of which wait and prefill were predicted."""
        ratio = actual_s / predicted_s if predicted_s > 0.0 else -1.0
        if not ratio >= 0.0:
            return
        if len(self._recent) == RESIDUALS_KEPT:
            del self._ordered[bisect_right(self._ordered, self._recent[0]) - 1]
        self._recent.append(min(ratio, RATIO_MAX))
        insort(self._ordered, self._recent[-1])

    def ended(self, request: str, *, in_time: bool, now_s: float) -> None:
        """The request ended, its service level met or not. Once a request; later ones say nothing."""
        if request not in self._watched:
            return
        del self._watched[request]
        self._in_time.append(in_time)
        known, share = len(self._in_time), self.false_reject_share or 0.0
        if known < self.terms.probes_min:
            return
        if not self.queues_only and share > self.terms.false_rejects_max:
            self._switch(f"{share:.0%} of {known} that it would have refused were in time", now_s)
        elif (
            self.queues_only
            and share <= self.terms.again_share
            and now_s - self._switched_s >= self.terms.again_after_s
        ):
            self._switch("", now_s)

    def __contains__(self, request: str) -> bool:
        """Whether the end of the request would say something."""
        return request in self._watched

    @property
    def false_reject_share(self) -> float | None:
        """Share of the probes that were in time, None before any ended."""
        return sum(self._in_time) / len(self._in_time) if self._in_time else None

    def _chance(self, ahead: Ahead, left_s: float | None) -> float | None:
        """(k + 1)/(n + 1) with k of n residual ratios in time: on the good side by one, as a conformal rank is."""
        if left_s is not None and left_s <= 0.0:
            return 0.0
        if left_s is None or len(self._ordered) < RESIDUALS_MIN:
            return None
        predicted_s = ahead.wait_s + ahead.prefill_s
        in_time = bisect_right(self._ordered, left_s / predicted_s) if predicted_s > 0.0 else len(self._ordered)
        return (in_time + 1) / (len(self._ordered) + 1)

    def _would_reject(self, request: str, ahead: Ahead, chance: float | None, best: float) -> Feasibility:
        why = f"{ahead.wait_s + ahead.prefill_s:.1f} s to its first token: in time with a chance of {best:.0%}"
        if self.queues_only:
            self._watch(request)
            return Feasibility(answer="queue", chance=chance, why=f"{why}; refuses nobody: {self.queues_only}")
        if _drawn(self._pool, request) < self.terms.probe_share:
            self._watch(request)
            return Feasibility(answer="probe", chance=chance, why=f"{why}; runs all the same, to see")
        return Feasibility(answer="reject", chance=chance, why=why)

    def _watch(self, request: str) -> None:
        self._watched[request] = None
        if len(self._watched) > WATCHED_MAX:
            self._watched.popitem(last=False)

    def _switch(self, why: str, now_s: float) -> None:
        """What was seen of the other state is no evidence of this one."""
        self.queues_only, self._switched_s = why, now_s
        self._in_time.clear()


def _drawn(pool: str, request: str) -> float:
    """In [0, 1), by a hash: the same whoever asks, however often."""
    return xxhash.xxh3_64_intdigest(f"probe/{pool}/{request}".encode()) / 2.0**64
