"""Rate: how many prompt tokens a second does an instance compute when nothing else runs?"""

from tokenfleet.core.accounts import Coefficients
from tokenfleet.core.predict.work import prefill_work_s


def prefill_tokens_per_s(coefficients: Coefficients, *, budget_tokens: int) -> float:
    """Uncached tokens a second in full iterations: budget / time of one full iteration of a first chunk."""
    return budget_tokens / prefill_work_s(
        budget_tokens, 0, decoding=0, context_tokens=0.0, coefficients=coefficients, budget_tokens=budget_tokens
    )
