"""Quota: has this tenant used up its requests per minute, or its concurrent requests?

One counter an entry of the policy, whichever path asks and whether as tenant or as team, so that N per minute admits N.
A replica counts what it admitted itself:
with R replicas a tenant may get up to R · N a minute, unless a book counts for all of them (core/shard/quota.py).
"""

from msgspec import Struct

from tokenfleet.core.policy import Policy, Tenant
from tokenfleet.core.shard.leases import Credit
from tokenfleet.core.shard.purse import Purse
from tokenfleet.core.shard.quota import ahead_of
from tokenfleet.core.shard.records import quota_book

WINDOW_S = 60.0
BUCKETS = 60  # a charge counts for 60 to 61 s: never more than N in any minute, with at most 61 integers a tenant


class Charge(Struct, frozen=True, kw_only=True):
    """What a request took from its tenant's quota, to be given back by `Quotas.refund` if it is not admitted.

    `refused` says why nothing was taken, empty if it was; `retry_after_s` then tells when there is room again, None
    when that depends on running requests. `bucket` is the counter that was raised, None if none was, and `entries` are
    those whose counters were; `credits` is what was taken of their books instead, where replicas share them.
    """

    tenant: str
    refused: str = ""
    retry_after_s: float | None = None
    bucket: int | None = None
    entries: tuple[str, ...] = ()
    credits: tuple[tuple[str, Credit], ...] = ()


class Quotas:
    """Requests of each tenant in the last minute, as counts in one-second buckets; or by `purse`, while it rules."""

    def __init__(self) -> None:
        self.purse: Purse | None = None
        self._counts: dict[str, dict[int, int]] = {}

    def charge(
        self,
        tenant: str,
        terms: Tenant,
        *,
        running: int,
        now_s: float,
        team: tuple[str, Tenant] | None = None,
        team_running: int = 0,
    ) -> Charge:
        """Takes one request from the quota of `tenant`, the name of the policy's entry that binds the caller, and from
        that of its `team`; from both or from none, and from one that is both once.

        Callers that share an entry (unknown names under the default tenant) share its quota. `running` counts the
        tenant's unfinished requests at this site, `team_running` those of its team. A limit of 0 is no limit.
        """
        if terms.running_max and running >= terms.running_max:
            return Charge(tenant=tenant, refused=f"{running} requests running, {terms.running_max} allowed at once")
        if team is not None and 0 < team[1].running_max <= team_running:
            problem = f"{team_running} requests of the team {team[0]} running, {team[1].running_max} allowed at once"
            return Charge(tenant=tenant, refused=problem)
        binding = {tenant: terms} | ({} if team is None else {team[0]: team[1]})
        limits = {name: each.requests_per_minute_max for name, each in binding.items() if each.requests_per_minute_max}
        if limits and self.purse is not None and self.purse.rules_quotas():
            return _credited(self.purse, tenant, limits, now_s)
        bucket = _bucket(now_s)
        windows = {name: self._window(name, bucket) for name in limits}
        full = [name for name, counts in windows.items() if sum(counts.values()) >= limits[name]]
        if full:
            oldest = max(min(windows[name]) for name in full)
            return _refused(tenant, full[0], limits, (oldest + BUCKETS + 1) * WINDOW_S / BUCKETS - now_s)
        for counts in windows.values():
            counts[bucket] = counts.get(bucket, 0) + 1
        return Charge(tenant=tenant, bucket=bucket if windows else None, entries=tuple(windows))

    def refund(self, charge: Charge) -> None:
        """Takes back from the counters what was not admitted; once a charge, and harmless when its minute is over."""
        for entry in charge.entries:
            counts = self._counts.get(entry, {})
            if charge.bucket is None or charge.bucket not in counts:
                continue
            counts[charge.bucket] -= 1
            if not counts[charge.bucket]:
                del counts[charge.bucket]

    def used(self, tenant: str, *, now_s: float) -> int:
        """Requests of `tenant` that count at `now_s`."""
        oldest = _bucket(now_s) - BUCKETS
        return sum(count for bucket, count in self._counts.get(tenant, {}).items() if bucket >= oldest)

    def retain(self, tenants: frozenset[str]) -> None:
        """Forgets tenants that a new policy revision no longer names: memory is bounded by the policy."""
        self._counts = {name: counts for name, counts in self._counts.items() if name in tenants}

    def _window(self, tenant: str, bucket: int) -> dict[int, int]:
        kept = {b: count for b, count in self._counts.get(tenant, {}).items() if b >= bucket - BUCKETS}
        self._counts[tenant] = kept
        return kept


def _credited(purse: Purse, tenant: str, limits: dict[str, int], now_s: float) -> Charge:
    """One request of the books of all `limits`, or of none."""
    taken = list[tuple[str, Credit]]()
    for name, limit in limits.items():
        book = quota_book(name)
        credit = purse.spend_quota(book, ahead=ahead_of(limit), now_s=now_s)
        if credit is None:
            for other, given in taken:
                purse.refund(other, given, now_s=now_s)
            return _refused(tenant, name, limits, WINDOW_S / limit)
        taken.append((book, credit))
    return Charge(tenant=tenant, credits=tuple(taken))


def _refused(tenant: str, full: str, limits: dict[str, int], retry_after_s: float) -> Charge:
    whose = "" if full == tenant else f" to the team {full}"
    refused = f"{limits[full]} requests a minute allowed{whose}, all used"
    return Charge(tenant=tenant, refused=refused, retry_after_s=retry_after_s)


def tenant_entry(name: str, *, tenants: dict[str, Tenant], default_tenant: str) -> str:
    """The name under which `name` is counted: itself if the policy knows it, else the default tenant's."""
    return name if name in tenants else default_tenant


def entry_of(name: str, policy: Policy) -> str:
    """The same under a policy."""
    return tenant_entry(name, tenants=policy.tenants, default_tenant=policy.default_tenant)


def _bucket(now_s: float) -> int:
    return int(now_s * BUCKETS // WINDOW_S)
