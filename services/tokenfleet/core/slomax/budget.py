"""Budget: what the caller's output budget says of how many tokens a request will produce.

The budget is a bound, never the estimate: reserving it as if it were used refuses short prompts for nothing.
"""


def bounded_tokens(estimate_tokens: float, max_tokens: int) -> float:
    """The output estimate, cut at the caller's budget if there is one (0: absent)."""
    return min(estimate_tokens, float(max_tokens)) if max_tokens else estimate_tokens
