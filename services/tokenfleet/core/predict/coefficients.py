"""Coefficients: what an engine's time model is worth on this pool, learned from first tokens.

Recursive least squares with forgetting on *relative* errors: theta multiplies the prior's (c0, a, b, d).
"""

import numpy as np
import numpy.typing as npt

from tokenfleet.core.accounts import Coefficients

FORGETTING = 0.999
RESIDUAL_MAX = 3.0  # relative; one stalled request must not move the model
THETA_MIN, THETA_MAX = 0.1, 10.0
TRACE_MAX = 32.0  # of P: forgetting without excitation must not wind it up
EXPLAINS_MIN = 0.02  # a regressor that explains less of a sample teaches nothing about its coefficient
EXPLAINED_SAMPLES_MIN = 50
WORK = 1  # index of `a`; its regressor explains most of nearly every sample, so it is learned from the first

Vector = npt.NDArray[np.float64]


class CoefficientLearner:
    """theta of one pool. Starts at `start_factor` × prior, the safe side; the held coefficients stay there."""

    def __init__(self, prior: Coefficients, *, start_factor: float) -> None:
        self._prior = prior
        self._theta: Vector = np.full(4, start_factor)
        self._p: Vector = np.eye(4)
        self._explained: Vector = np.zeros(4)
        self._samples = 0

    def observe(
        self, seconds: float, *, iterations: float, uncached: float, hit: float, decoding: float, context_tokens: float
    ) -> None:
        """One prefill that took `seconds` alone, of `uncached` new tokens behind `hit` cached ones, in `iterations`."""
        terms = self._prior_terms_s(iterations, uncached, hit, decoding, context_tokens)
        predicted_s = float(self._theta @ terms)
        if not (seconds > 0.0 and predicted_s > 0.0 and np.isfinite(seconds) and np.isfinite(predicted_s)):
            return
        self._samples += 1
        self._explained += self._theta * terms > EXPLAINS_MIN * predicted_s
        free = self._explained >= EXPLAINED_SAMPLES_MIN
        free[WORK] = True
        x = np.where(free, terms / predicted_s, 0.0)
        residual = float(np.clip(seconds / predicted_s - 1.0, -RESIDUAL_MAX, RESIDUAL_MAX))
        self._learn(x, residual)

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

    def _learn(self, x: Vector, residual: float) -> None:
        px = self._p @ x
        gain = px / (FORGETTING + float(x @ px))
        self._theta = np.clip(self._theta + gain * residual, THETA_MIN, THETA_MAX)
        self._p = (self._p - np.outer(gain, px)) / FORGETTING
        trace = float(np.trace(self._p))
        if trace > TRACE_MAX:
            self._p *= TRACE_MAX / trace

    def _prior_terms_s(
        self, iterations: float, uncached: float, hit: float, decoding: float, context_tokens: float
    ) -> Vector:
        prior = self._prior
        return np.array(
            [
                prior.c0_s * iterations,
                prior.a_s * (uncached + iterations * decoding),
                prior.b_s * uncached * (hit + uncached / 2),
                prior.d_s * iterations * context_tokens,
            ]
        )
