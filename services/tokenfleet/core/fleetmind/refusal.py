"""Refusal: one typed reason for the whole, from why each site refused. No reason stands for another."""

from collections.abc import Collection

from tokenfleet.core.decision import Reason

LOAD_KINDS = frozenset({"ceiling", "wait"})
RIGHTS_KINDS = frozenset({"entitlement", "residency"})
EMPTY_KINDS = frozenset({"endpoints", "ready"})


def reason_of(kinds: Collection[str]) -> Reason:
    """The reason when every site refused, `kinds` being theirs.

    Load speaks first, for it passes; then what no site can do. Sites that the request may not reach say nothing about
    those that it may: with all permitted sites empty it is no_instances, however many forbidden ones have room.
    """
    if LOAD_KINDS.intersection(kinds):
        return "all_busy"
    if "infeasible" in kinds:
        return "infeasible"
    reachable = {kind for kind in kinds if kind not in RIGHTS_KINDS and kind != "crossing"}
    if not reachable:
        return "not_permitted" if RIGHTS_KINDS.intersection(kinds) else "no_site"
    if reachable <= EMPTY_KINDS:
        return "no_instances"
    for kind, reason in ONLY_KINDS.items():
        if kind in reachable and reachable <= EMPTY_KINDS | {kind}:
            return reason
    return "no_site"


ONLY_KINDS: dict[str, Reason] = {"context": "context_too_long", "revision": "filtered_by_policy"}
