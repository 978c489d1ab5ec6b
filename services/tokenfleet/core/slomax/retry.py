"""Retry: when may a refused request come again?"""

from random import Random

from tokenfleet.core.policy import Policy


def retry_after_s(wait_s: float, policy: Policy, rng: Random) -> float:
    """The wait within the policy's limits, × U(1 ± spread) so that the refused don't come back together."""
    terms = policy.slomax
    bounded_s = min(max(wait_s, terms.retry_after_min_s), terms.retry_after_max_s)
    return bounded_s * rng.uniform(1.0 - terms.retry_after_spread, 1.0 + terms.retry_after_spread)
