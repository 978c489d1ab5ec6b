"""Service levels: what chat, long and batch are promised on one cluster, as a policy that judges and admits by it."""

from collections.abc import Iterable

from msgspec.structs import replace

from tokenfleet.core.policy import ClassQueue, GoodputPolicy, PacingPolicy, Policy, RequestClass, SloMaxPolicy, Tenant
from tokenfleet.sim.pilot import policy_of
from tokenfleet.sim.profiles import Profile

WINDOW_S = 10.0  # of the accounts

# As the shipped policy has them, but for long's service level (core/default_policy.toml).
QUEUES = {
    "chat": ClassQueue(
        role="guarded", backlog_max_s=0.6, steer_from_share=0.58, per_decode_s=0.001, per_prefill_s=0.05
    ),
    "long": ClassQueue(role="reserving", backlog_max_s=0.3, prefills_max=1, gate_share=0.90, per_guarded_s=0.01),
    "batch": ClassQueue(role="filling", backlog_max_s=0.05, gate_share=0.92, per_guarded_s=0.001),
}
CLASSES = {
    "chat": RequestClass(
        ttft_s=2.0,
        tpot_s=0.060,
        backlog_max_s=0.6,
        running_max_per_instance=200,
        kv_share_max=0.97,
        rank=0,
        queue=QUEUES["chat"],
    ),
    "long": RequestClass(
        ttft_s=15.0,
        tpot_s=0.150,
        backlog_max_s=0.3,
        running_max_per_instance=6,
        kv_share_max=0.90,
        rank=1,
        queue=QUEUES["long"],
    ),
    "batch": RequestClass(
        deadline_s=240.0,
        backlog_max_s=0.05,
        running_max_per_instance=96,
        kv_share_max=0.85,
        rank=2,
        queue=QUEUES["batch"],
    ),
}
PACING = PacingPolicy(enabled=True, window_s=1.0)  # scrapes each 250 ms
BATCH_DEADLINE_S = 240.0


def mixed_policy(
    profile: Profile, *, prior_factor: float = 1.0, learning: bool = False, tenants: Iterable[str] = ()
) -> Policy:
    """The policy of a fleet of one pool that three classes share (pilot.policy_of), as do these tenants."""
    base = policy_of(profile, prior_factor=prior_factor, learning=learning)
    return replace(
        base,
        tenants=base.tenants | {name: Tenant() for name in tenants},
        classes=CLASSES,
        slomax=SloMaxPolicy(pacing=PACING),
        goodput=GoodputPolicy(windows_s=(WINDOW_S,)),
    )
