"""Work: how long an engine computes until a prompt's first token, and how long one iteration takes."""

import math

from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.policy import Model

COMPUTED_TOKENS_MIN = 16  # an engine recomputes at least its last block, also of a prompt that is wholly cached


def uncached_tokens(prompt_tokens: int, hit_tokens: int) -> int:
    """Tokens to compute, ≥ 1: the prompt without its cached prefix, but never less than the engine's last block."""
    return max(prompt_tokens - hit_tokens, min(prompt_tokens, COMPUTED_TOKENS_MIN), 1)


def prefill_work_s(
    uncached: int,
    hit_tokens: float,
    *,
    decoding: float,
    context_tokens: float,
    coefficients: Coefficients,
    budget_tokens: int,
) -> float:
    """Seconds from the start of its prefill to its first token, on an instance that decodes meanwhile.

    ceil(u / (B − n_dec)) · (c0 + d·ctx) + max(w_min, a·u) + b·u·(hit + u/2), with u uncached tokens, B tokens an
    iteration, n_dec sequences of ctx summed context tokens decoding; a step of sim/profiles.toml, summed
    over the iterations. u ≥ 1 always.
    """
    iterations = prefill_iterations(uncached, decoding=decoding, budget_tokens=budget_tokens)
    c = coefficients
    return (
        iterations * (c.c0_s + c.d_s * context_tokens)
        + max(c.w_min_s, c.a_s * uncached)
        + c.b_s * uncached * (hit_tokens + uncached / 2)
    )


def request_work_s(uncached: int, prompt_tokens: int, output_tokens: float, model: Model) -> float:
    """GPU seconds of a request by the policy's coefficients: its prefill, and each token of its output at what a token
    of a full iteration takes."""
    c = prior_coefficients(model, factor=1.0)
    work_s = prefill_work_s(
        uncached,
        prompt_tokens - uncached,
        decoding=0.0,
        context_tokens=0.0,
        coefficients=c,
        budget_tokens=model.budget_tokens,
    )
    return work_s + output_tokens * (c.c0_s / model.budget_tokens + c.a_s + c.d_s * prompt_tokens)


def prefill_iterations(uncached: int, *, decoding: float, budget_tokens: int) -> int:
    """Iterations that a prefill takes: each leaves the budget less one token a decoding sequence, at least one."""
    return math.ceil(uncached / max(budget_tokens - decoding, 1.0))


def decode_iteration_s(*, decoding: float, context_tokens: float, coefficients: Coefficients) -> float:
    """Seconds of one iteration that only decodes; 0 when nothing does."""
    if decoding <= 0:
        return 0.0
    c = coefficients
    return c.c0_s + max(c.w_min_s, c.a_s * decoding) + c.d_s * context_tokens


def prior_coefficients(model: Model, *, factor: float) -> Coefficients:
    """The policy's coefficients × `factor`, for a pool whose outcomes have taught nothing yet.

    A factor above 1 is the safe side: twice too high costs nothing, half too low multiplies the median wait.
    """
    return Coefficients(
        c0_s=model.c0_s * factor,
        w_min_s=model.w_min_s * factor,
        a_s=model.a_s * factor,
        b_s=model.b_s * factor,
        d_s=model.d_s * factor,
    )
