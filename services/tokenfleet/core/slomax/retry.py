"""Retry: when may a refused request come again, and may its tenant retry at all?

Who refuses for want of room works out `room_in_s` and spreads it with `retry_after_s`; whether the request keeps its
place meanwhile is a matter of returns.py. Before a repeated attempt is looked at, `RetryBudgets.retry` says whether its
tenant has any left; each fresh request is told to it by `fresh`.
"""

import math
from random import Random

from tokenfleet.core.policy import Policy
from tokenfleet.core.slomax.terms import RetryPolicy

MILLI = 1000  # budgets are whole thousandths of a retry: tenths would not add up to one


def retry_after_s(wait_s: float, policy: Policy, rng: Random) -> float:
    """The wait within the policy's limits, × U(1 ± spread) so that the refused don't come back together."""
    terms = policy.slomax
    bounded_s = min(max(wait_s, terms.retry_after_min_s), terms.retry_after_max_s)
    return bounded_s * rng.uniform(1.0 - terms.retry_after_spread, 1.0 + terms.retry_after_spread)


def room_in_s(*, ahead_s: float, work_s: float, free_s: float, drain_rate: float) -> float:
    """Seconds until there is room: (backlog ahead + ĉ − free) / drain rate, all in GPU seconds; ∞ if nothing drains.

    `free_s` is what could be taken on at once.
    """
    left_s = max(ahead_s + work_s - free_s, 0.0)
    if left_s == 0.0:
        return 0.0
    return left_s / drain_rate if drain_rate > 0.0 and not math.isnan(left_s) else math.inf


class RetryBudgets:
    """What each tenant of the policy may still retry, so that retries can't multiply an overload.

    Names are those of the policy's entries (quota.tenant_entry). A tenant that is new here has a full budget: a process
    that has just started refuses nobody for what it didn't see.
    """

    def __init__(self, terms: RetryPolicy) -> None:
        self.terms = terms
        self._left: dict[str, int] = {}

    def fresh(self, tenant: str) -> None:
        """A first attempt came."""
        most = round(self.terms.budget_max * MILLI)
        self._left[tenant] = min(self._of(tenant) + round(self.terms.budget_per_request * MILLI), most)

    def retry(self, tenant: str) -> bool:
        """Takes one retry from the tenant's budget; False if none is left."""
        if not self.has_left(tenant):
            return False
        self._left[tenant] = self._of(tenant) - MILLI
        return True

    def has_left(self, tenant: str) -> bool:
        """Whether the tenant may retry."""
        return self._of(tenant) >= MILLI

    def left(self, tenant: str) -> float:
        """Retries left."""
        return self._of(tenant) / MILLI

    def follow(self, policy: Policy) -> None:
        """Another policy is in force; tenants that it lacks are forgotten."""
        self.terms = policy.slomax.retry
        self._left = {name: left for name, left in self._left.items() if name in policy.tenants}

    def _of(self, tenant: str) -> int:
        return self._left.get(tenant, round(self.terms.budget_max * MILLI))
