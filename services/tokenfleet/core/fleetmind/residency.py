"""Residency: may this request be processed, cached and logged at that site?

Permit-only. What is not listed is forbidden, and so is what can't be told: a rule that is missing or has expired, a
site or origin without a known jurisdiction. No product switch, load, age or fallback lifts it.
"""

from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy, Residency


def residency_refusal(request: Request, site: str, policy: Policy, *, now_wall_s: float) -> str:
    """Why the request may not run at `site`; empty when it may.

    `now_wall_s` is Unix time, for the rule's expiry only. The origin must be permitted as well: its gateway handles
    the prompt. Raises UnknownTenantError for a tenant that the policy lacks.
    """
    if site not in policy.sites:
        return f"site {site!r} is not in the policy, its jurisdiction is unknown"
    name = policy.tenant(request.tenant).residency
    if not name:
        return ""
    rule = policy.residency.get(name)
    if rule is None:
        return f"rule {name!r} is missing"
    if not _binds(rule, request.data_class):
        return ""
    if rule.expires_wall_s is not None and not now_wall_s < rule.expires_wall_s:
        return f"rule {name!r} has expired"
    lists = {"processing": rule.processing, "cache": rule.cache, "logs": rule.logs}
    for place, uses in ((site, lists), (request.origin, {k: lists[k] for k in ("processing", "logs")})):
        jurisdiction = policy.sites[place].jurisdiction if place in policy.sites else ""
        for use, permitted in uses.items():
            if not jurisdiction or jurisdiction not in permitted:
                return f"rule {name!r} does not permit {use} in {jurisdiction or 'an unknown place'} ({place})"
    return ""


def _binds(rule: Residency, data_class: str) -> bool:
    """A rule for certain data classes binds a request that names none: what it carries can't be told."""
    return not rule.data_classes or not data_class or data_class in rule.data_classes
