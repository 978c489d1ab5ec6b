"""Revisions: the records of the `policy` topic, and which requests a revision on trial (a canary) decides, how long.

A canary decides its share of the logical requests and ends by itself; nothing else of a site follows it. The worker
that adds up goodput judges it (core.canary) and publishes what becomes of it as the next record.
"""

import json
import re
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import xxhash
from msgspec import Meta, Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy, newer_policy, parse_policy, policy_hash
from tokenfleet.core.records import Count
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import Setting

FILE_KEY, CANARY_KEY, REPORT_KEY = "policy", "canary", "report"  # the compacted topic keeps the last of each
CANARY_FOR_MAX_S = 86400.0
MARGIN_S = 60.0  # so long after its time a canary waits for its judgement; then it ends by itself


class PolicyRevision(Struct, frozen=True, kw_only=True, tag="policy"):
    """A whole policy file under one number; the greatest number is in force.

    With `canary_share` below 1 it is a canary: on trial for that share of requests, for `canary_for_s`. The same number
    with the share 1 is its promotion, a greater one ends it. `reason` says in words why it was published, `shares` what
    of pools' shares and ceilings the controller changed by it.
    """

    revision: Count
    toml: str
    sha256: str
    by: str = ""
    at_wall_s: float = 0.0
    canary_share: Annotated[float, Meta(ge=0.0, le=1.0)] = 1.0
    canary_for_s: Annotated[float, Meta(ge=0.0, le=CANARY_FOR_MAX_S)] = 0.0
    reason: str = ""
    shares: tuple[ShareRevision, ...] = ()

    @property
    def is_canary(self) -> bool:
        return self.canary_share < 1.0


class ClassShare(Struct, frozen=True, kw_only=True):
    """Requests of one class that were offered, and those that met its service level; a rejected one did not."""

    met: Count
    offered: Count


class ArmFigures(Struct, frozen=True, kw_only=True):
    """How the requests of one arm of a trial went, as far as that is known; quantiles are None without a first token.

    `failed` ended without success: failed, timed out or lost. `open` have not ended and missed their service level.
    """

    revision: Count
    requests: Count = 0
    failed: Count = 0
    open: Count = 0
    classes: dict[str, ClassShare] = {}
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None


class CanaryReport(Struct, frozen=True, kw_only=True, tag="canary"):
    """A trial as its judge sees it: both arms over the same requests, those that arrived since it began.

    `elapsed_s` is event time since the canary was published.
    """

    base: ArmFigures
    canary: ArmFigures
    elapsed_s: float
    for_s: float
    verdict: Literal["running", "promoted", "rolled_back"]
    reason: str
    at_wall_s: float = 0.0


PolicyRecord = PolicyRevision | CanaryReport


class Trial(Struct, frozen=True, kw_only=True):
    """A canary at one replica: it decides `share` of the requests until `until_s`, by the replica's own clock."""

    policy: Policy
    policy_hash: str
    share: float
    until_s: float

    def takes(self, request: str, now_s: float) -> bool:
        """Whether the logical request is decided by it now."""
        return now_s < self.until_s and falls_to_canary(request, self.policy.revision, self.share)


def falls_to_canary(request: str, revision: int, share: float) -> bool:
    """By a hash of the logical request's id: the same at all replicas and sites and for all attempts.

    The revision is part of it, so that two trials don't meet the same callers.
    """
    return xxhash.xxh3_64_intdigest(f"canary/{revision}/{request}".encode()) < share * 2.0**64


def trial_of(heard: PolicyRevision, in_force: Policy, *, now_s: float, age_s: float) -> Trial | None:
    """The canary as a replica holds it, None if it is not newer than what is in force, or over.

    `age_s` is the time since it was published, 0 when it was heard live. Raises PolicyError if it can't be used in the
    place of `in_force`.
    """
    until_s = now_s - age_s + heard.canary_for_s + MARGIN_S
    if until_s <= now_s or (policy := newer_policy(in_force, revision=heard.revision, toml=heard.toml)) is None:
        return None
    check_covers(policy, in_force)
    return Trial(policy=policy, policy_hash=heard.sha256, share=heard.canary_share, until_s=until_s)


def check_covers(policy: Policy, in_force: Policy) -> None:
    """Raises PolicyError if requests that `in_force` serves name what the canary `policy` lacks."""
    for kind in ("sites", "models", "classes", "tenants"):
        if lacking := getattr(in_force, kind).keys() - getattr(policy, kind).keys():
            raise PolicyError(f"canary revision {policy.revision}: its {kind} lack {min(lacking)!r}, which is in use")
    if in_force.default_tenant and not policy.default_tenant:
        raise PolicyError(f"canary revision {policy.revision}: it has no default_tenant, which is in use")


REVISIONS_KEPT = 20  # of the history, each with its file


class Published(NamedTuple):
    """A revision that came into force or on trial, and when the log took it (Unix seconds of the broker)."""

    revision: PolicyRevision
    at_s: float


class PolicyLog:
    """What the `policy` topic says, read from its beginning: the file in force, the canary, its judge's last report.

    `canary_at_s` is when the log took the canary (Unix seconds of the broker). `published` are the last of both kinds,
    oldest first, as far as the compacted topic still has them.
    """

    def __init__(self) -> None:
        self.in_force: PolicyRevision | None = None
        self.canary: PolicyRevision | None = None
        self.canary_at_s = 0.0
        self.report: CanaryReport | None = None
        self.published: deque[Published] = deque(maxlen=REVISIONS_KEPT)

    @property
    def greatest(self) -> int:
        """The greatest number given out on the topic, 0 for none."""
        return max((each.revision for each in (self.in_force, self.canary) if each is not None), default=0)

    def hear(self, record: PolicyRecord, *, at_s: float) -> None:
        """Records may come again; a canary that comes again began when it first did."""
        match record:
            case CanaryReport():
                self.report = record
            case PolicyRevision() if record.is_canary:
                if record.revision > self.greatest:
                    self.canary, self.canary_at_s = record, at_s
                    self.published.append(Published(record, at_s))
            case PolicyRevision():
                if self.in_force is None or record.revision > self.in_force.revision:
                    self.in_force = record
                    self.published.append(Published(record, at_s))
                if self.canary is not None and self.canary.revision <= record.revision:
                    self.canary = None


_NUMBER = re.compile(r"(?m)^[ \t]*revision[ \t]*=[ \t]*[0-9_]+")


def renumbered(toml: str, revision: int) -> str:
    """The same policy file under another number. Raises PolicyError for a file that says its number in a way that can't
    be found."""
    line = f"revision = {revision}"
    text = _NUMBER.sub(line, toml, count=1) if _NUMBER.search(toml) else f"{line}\n{toml}"
    before, after = parse_policy(toml, source="the old policy"), parse_policy(text, source=f"revision {revision}")
    if replace(before, revision=revision) != after:
        raise PolicyError(f"revision {revision}: no line `revision = {before.revision}` to put it in")
    return text


POOLS_BEGIN = "# What follows is the controller's of shares: written anew with each change, gone in a file without it."


def with_pools(toml: str, revision: int, pools: Mapping[str, Setting]) -> str:
    """The same policy file under another number, with these settings of pools and no others.

    Raises PolicyError as `renumbered` does, and for a file in which these can't be written, or people set them.
    """
    others = toml.partition(POOLS_BEGIN)[0].rstrip() + "\n"
    if parse_policy(others, source="the policy in force").slomax.controller.pools:
        raise PolicyError(f"revision {revision}: slomax.controller.pools is set by hand, and so left alone")
    told = [POOLS_BEGIN]
    for pool, setting in sorted(pools.items()):
        shares = ", ".join(f"{json.dumps(name)} = {share!r}" for name, share in setting.shares.items())
        told += [
            f"[slomax.controller.pools.{json.dumps(pool)}]",
            f"ceiling = {setting.ceiling!r}",
            f"shares = {{ {shares} }}",
        ]
    text = renumbered(others, revision)
    text += "\n" + "\n".join(told) + "\n" if pools else ""
    parse_policy(text, source=f"revision {revision}")
    return text


def rollback_to(toml: str, canary: PolicyRevision, *, by: str, reason: str, at_wall_s: float) -> PolicyRevision:
    """The revision that ends `canary`: the file from before it, under the next number. Raises PolicyError."""
    text = renumbered(toml, canary.revision + 1)
    return PolicyRevision(
        revision=canary.revision + 1,
        toml=text,
        sha256=policy_hash(text),
        by=by,
        at_wall_s=at_wall_s,
        reason=f"canary revision {canary.revision} rolled back: {reason}",
    )


def promotion_of(canary: PolicyRevision, *, by: str, reason: str, at_wall_s: float) -> PolicyRevision:
    """The canary's file in force for all, under its own number."""
    return PolicyRevision(
        revision=canary.revision,
        toml=canary.toml,
        sha256=canary.sha256,
        by=by,
        at_wall_s=at_wall_s,
        reason=f"canary revision {canary.revision} promoted: {reason}",
    )
