"""Service levels: what chat, long and batch are promised on one cluster, as a policy that judges and admits by it."""

from msgspec.structs import replace

from tokenfleet.core.policy import GoodputPolicy, Policy, RequestClass
from tokenfleet.sim.pilot import policy_of
from tokenfleet.sim.profiles import Profile

WINDOW_S = 10.0  # of the accounts

CLASSES = {
    "chat": RequestClass(
        ttft_s=2.0, tpot_s=0.060, backlog_max_s=0.6, running_max_per_instance=200, kv_share_max=0.97, rank=0
    ),
    "long": RequestClass(
        ttft_s=15.0, tpot_s=0.150, backlog_max_s=0.3, running_max_per_instance=6, kv_share_max=0.90, rank=1
    ),
    "batch": RequestClass(deadline_s=240.0, backlog_max_s=0.05, running_max_per_instance=96, kv_share_max=0.85, rank=2),
}
BATCH_DEADLINE_S = 240.0


def mixed_policy(profile: Profile, *, prior_factor: float = 1.0, learning: bool = False) -> Policy:
    """The policy of a fleet of one pool that three classes share (pilot.policy_of)."""
    base = policy_of(profile, prior_factor=prior_factor, learning=learning)
    return replace(base, classes=CLASSES, goodput=GoodputPolicy(windows_s=(WINDOW_S,)))
