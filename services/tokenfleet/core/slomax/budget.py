"""Budget: how many output tokens may, and how many will probably, this request produce?

The budget is a bound, never the estimate: reserving it as if it were used refuses short prompts for nothing.
"""

from collections.abc import Iterable

from tokenfleet.core.errors import BadRequestError

BUDGET_MAX_TOKENS = 2**31 - 1  # the contract's largest count; a larger cap bounds nothing


def output_budget(caps: Iterable[int | None]) -> int:
    """The caller's output budget in tokens from all fields that may hold one, 0 when none does.

    Conflicting caps: the larger, because a bound may be loose but must not cut an answer short. Raises
    BadRequestError for a cap below 1.
    """
    given = [cap for cap in caps if cap is not None]
    if any(cap < 1 for cap in given):
        raise BadRequestError("max_tokens", f"{min(given)} is not a budget; leave it out or give at least 1")
    return min(max(given, default=0), BUDGET_MAX_TOKENS)


def bounded_tokens(estimate_tokens: float, max_tokens: int) -> float:
    """The output estimate, cut at the caller's budget if there is one (0: absent)."""
    return min(estimate_tokens, float(max_tokens)) if max_tokens else estimate_tokens
