"""Sites: other sites' summaries and FleetMind's question in one line, for tests of dispatch."""

from collections.abc import Sequence
from random import Random
from typing import Any

from msgspec.structs import replace

from tests.core.pools import POLICY, request
from tokenfleet.core.decision import Request
from tokenfleet.core.fleetmind.dispatch import Dispatch, dispatch
from tokenfleet.core.fleetmind.sends import Sends
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import PoolSummary, SiteSummary, Vector
from tokenfleet.core.view import PeerView

RATE_TOKENS_PER_S = 23_000.0  # about large-chat's prefill rate on the policy's prior
KV_TOKENS = 1_000_000.0
SEATS = 256.0


def pool_summary(site: str, *, ready: int = 2, kv_used: float = 0.0, **facts: Any) -> PoolSummary:
    """An idle pool of `ready` instances; `kv_used` is a share of its KV."""
    known: dict[str, Any] = {
        "pool": f"large-chat@{site}",
        "model": "large-chat",
        "model_digest": "large-chat@2026-09",
        "endpoints": ready,
        "prefill": Vector(capacity=RATE_TOKENS_PER_S * ready, used=0.0),
        "kv": Vector(capacity=KV_TOKENS * ready, used=KV_TOKENS * ready * kv_used),
        "seats": Vector(capacity=SEATS * ready, used=0.0),
        "waits_s": (0.0,) * ready,
        "price_per_hour": 2.0,
    }
    return PoolSummary(ready=ready, **(known | facts))


def peer(site: str, *pools: PoolSummary, age_s: float | None = 0.2, **facts: Any) -> PeerView:
    """A site and its last summary; without pools, or with age_s=None, it has no endpoints or was never heard."""
    summary = SiteSummary(
        site=site, cluster="kafka-1", epoch=0, n=1, period_s=0.5, age_s=0.1, gateways=(f"gate-{site}",), pools=pools
    )
    return PeerView(site=site, summary=None if age_s is None else summary, age_s=age_s, **facts)


def send_to_site(
    peers: Sequence[PeerView],
    asked: Request | None = None,
    *,
    policy: Policy = POLICY,
    request_class: str = "chat",
    sends: Sends | None = None,
    seed: int = 0,
    **options: Any,
) -> Dispatch:
    """FleetMind's answer at home `b` at 1,000 s."""
    known: dict[str, Any] = {"home": "b", "output_q50": 256.0, "output_q90": 640.0, "now_s": 1000.0, "now_wall_s": 2e9}
    return dispatch(
        asked or request(),
        request_class,
        peers,
        policy,
        sends or Sends(kept_s=15.0),
        rng=Random(seed),
        **(known | options),
    )


def with_residency(**rule: Any) -> Policy:
    """The default policy with `eu-only` changed."""
    return replace(POLICY, residency={"eu-only": replace(POLICY.residency["eu-only"], **rule)})
