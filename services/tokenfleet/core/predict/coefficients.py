"""Coefficients: what an engine's time model is worth on this pool, learned from first tokens.

Recursive least squares on *relative* errors: theta multiplies the prior's (c0, a, b, d). An engine is late for reasons
that no first token tells (no KV memory free, a preemption), so errors are clipped at their median and count by it.
"""

from collections import deque
from statistics import median

import numpy as np
import numpy.typing as npt

from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.predict.sample import Span

FORGETTING = 0.9998  # a sample weighs 1/e after 5,000 more; 15 minutes of overload drift 2 %, and 4 % at .999
RESIDUAL_MAX = 3.0  # relative; bounds the first samples, when no median is known
RESIDUALS_KEPT = 64  # of each kind of span
MEDIAN_MIN = 0.003  # below, differences between kinds of spans are chance
CHANGED_MIN = 0.15  # half of the last residuals from rest beyond this on one side: these are other engines by now
THETA_MIN, THETA_MAX = 0.1, 10.0
TRACE_MAX = 32.0  # of P: forgetting without excitation must not wind it up
EXPLAINS_MIN = 0.02  # a regressor that explains less of a sample teaches nothing about its coefficient
EXPLAINED_SAMPLES_MIN = 50
WORK = 1  # index of `a`; its regressor explains most of nearly every sample, so it is learned from the first

Vector = npt.NDArray[np.float64]


class CoefficientLearner:
    """theta of one pool. Starts at `start_factor` × prior, the safe side.

    A coefficient is held until its regressor has explained > 2 % of 50 samples: it keeps the prior's proportion to a,
    for a prior is wrong as a whole more often than in its parts.
    """

    def __init__(self, prior: Coefficients, *, start_factor: float) -> None:
        self._prior = prior
        self._theta: Vector = np.full(4, start_factor)
        self._p: Vector = np.eye(4)
        self._explained: Vector = np.zeros(4)
        self._residuals = {from_rest: deque[float](maxlen=RESIDUALS_KEPT) for from_rest in (False, True)}
        self._samples = 0

    def observe(self, span: Span, *, seconds: float) -> None:
        """One span that took `seconds` of computing."""
        self._purge_if_changed()
        terms = self._prior_terms_s(span)
        predicted_s = float(self._theta @ terms)
        if not (seconds > 0.0 and predicted_s > 0.0 and np.isfinite(seconds) and np.isfinite(predicted_s)):
            return
        self._samples += 1
        self._explained += self._theta * terms > EXPLAINS_MIN * predicted_s
        held = self._explained < EXPLAINED_SAMPLES_MIN
        held[WORK] = False
        x = np.where(held, 0.0, terms / predicted_s)
        x[WORK] += float(terms[held].sum()) / predicted_s
        residual = min(seconds / predicted_s - 1.0, RESIDUAL_MAX)
        self._residuals[span.from_rest].append(residual)
        off, other = self._median_off(span.from_rest), self._median_off(not span.from_rest)
        self._learn(x, min(max(residual, -off), off), weight=min(1.0, other / off))
        self._theta[held] = self._theta[WORK]

    def coefficients(self) -> Coefficients:
        """theta × prior. w_min, the floor of the same computation, goes with a."""
        c0, a, b, d = (float(theta) for theta in self._theta)
        return Coefficients(
            c0_s=c0 * self._prior.c0_s,
            w_min_s=a * self._prior.w_min_s,
            a_s=a * self._prior.a_s,
            b_s=b * self._prior.b_s,
            d_s=d * self._prior.d_s,
            samples=float(self._samples),
        )

    def _median_off(self, from_rest: bool) -> float:
        """Median of |residual| of the recent spans of a kind, infinite without any.

        Spans of a queue are as precise as those from rest until KV memory runs short. Then they hold waits for it, and
        teach by so much less.
        """
        recent = self._residuals[from_rest]
        return max(median(map(abs, recent)), MEDIAN_MIN) if recent else np.inf

    def _purge_if_changed(self) -> None:
        """Purge what was learned, but the scale, when the engines have become others.

        By evidence and not by boot: a boot on the same accelerator computes as before, and first tokens name no boot.
        By spans from rest: an engine that comes back comes back idle, and these hold no waits for memory.
        """
        recent = self._residuals[True]
        if len(recent) == RESIDUALS_KEPT and abs(median(recent)) > CHANGED_MIN:
            for residuals in self._residuals.values():
                residuals.clear()
            self._theta = np.full(4, self._theta[WORK])
            self._p, self._explained = np.eye(4), np.zeros(4)

    def _learn(self, x: Vector, residual: float, *, weight: float) -> None:
        x, residual = x * weight, residual * weight
        px = self._p @ x
        gain = px / (FORGETTING + float(x @ px))
        self._theta = np.clip(self._theta + gain * residual, THETA_MIN, THETA_MAX)
        self._p = (self._p - np.outer(gain, px)) / FORGETTING
        trace = float(np.trace(self._p))
        if trace > TRACE_MAX:
            self._p *= TRACE_MAX / trace

    def _prior_terms_s(self, span: Span) -> Vector:
        prior = self._prior
        return np.array(
            [
                prior.c0_s * span.iterations,
                prior.a_s * (span.tokens + span.iterations * span.decoding),
                prior.b_s * span.pairs,
                prior.d_s * span.iterations * span.context_tokens,
            ]
        )
