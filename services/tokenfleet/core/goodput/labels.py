"""Labels: under which names of the policy an outcome is accounted.

Callers write names; rows, and whoever draws them, have as many as the policy. What it doesn't know is added up under
OTHER, tenants under the default tenant where there is one.
"""

from tokenfleet.core.goodput.judge import NO_SLO, terms_of
from tokenfleet.core.policy import Policy
from tokenfleet.core.site import pool_name
from tokenfleet.core.slomax.quota import entry_of

OTHER = "other"


def class_label(name: str, policy: Policy) -> str:
    """The class, or that no service level was agreed."""
    return name if terms_of(policy, name) else NO_SLO


def tenant_label(name: str, policy: Policy) -> str:
    """The tenant's entry."""
    return entry_of(name, policy) or OTHER


def pool_label(name: str, policy: Policy) -> str:
    """The pool, empty for none."""
    return name if not name or is_pool(name, policy) else OTHER


def is_pool(name: str, policy: Policy) -> bool:
    """Whether it is a model of the policy at a site of the policy."""
    model, _, site = name.rpartition("@")
    return model in policy.models and site in policy.sites and name == pool_name(model, site)
