"""Demand: one request as the sites are asked for it."""

from msgspec import Struct

from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Model, Policy, RequestClass, Tenant
from tokenfleet.core.records import PoolSummary
from tokenfleet.core.view import PeerView


class Demand(Struct, frozen=True, kw_only=True):
    """The request with the policy's terms for it. `home` is the site that asks; estimates are of output tokens.

    `now_s` is the monotonic clock, `now_wall_s` Unix time, used only to tell whether a residency rule has expired.
    `blind`: no site has been heard lately, so it is we who hear nothing, and old summaries must do.
    """

    request: Request
    home: str
    request_class: str
    terms: RequestClass
    tenant: Tenant
    model: Model
    policy: Policy
    output_q50: float
    output_q90: float
    now_s: float
    now_wall_s: float
    blind: bool = False

    @property
    def kv_need_tokens(self) -> float:
        """What the request will hold in KV: prompt and the cautious output estimate."""
        return self.request.prompt_tokens + self.output_q90

    @property
    def context_need_tokens(self) -> int:
        """What engines check against their context: prompt and budget; without a budget one token must fit."""
        return self.request.prompt_tokens + max(self.request.max_tokens, 1)

    @property
    def upload_bytes(self) -> float:
        """Bytes of the prompt: as told, else estimated from its tokens."""
        return self.request.upload_bytes or self.request.prompt_tokens * self.policy.fleetmind.bytes_per_prompt_token

    @property
    def ttft_max_s(self) -> float | None:
        """What the service level leaves of the time to first token, below 0 when it has passed; None if not agreed."""
        agreed_s = self.terms.ttft_max_s(self.request.prompt_tokens)
        return None if agreed_s is None else agreed_s - self.request.elapsed_s

    @property
    def end_max_s(self) -> float | None:
        """Seconds until the request's own deadline, or its class's; None without one."""
        deadline_s = self.request.deadline_s if self.request.deadline_s is not None else self.terms.deadline_s
        return None if deadline_s is None else deadline_s - self.request.elapsed_s


def pool_at(demand: Demand, peer: PeerView) -> PoolSummary | None:
    """The pool that would serve the demand at a site, None when there is none.

    Of the revisions that the policy lets serve, the one with the most ready instances.
    """
    pools = [pool for pool in pools_of_model(demand, peer) if may_serve(pool, demand, home=peer.site == demand.home)]
    return max(pools, key=lambda pool: (pool.ready, pool.suspect, pool.model_digest), default=None)


def pools_of_model(demand: Demand, peer: PeerView) -> list[PoolSummary]:
    """The site's pools of the demanded model that have any instance, whatever their revision."""
    pools = peer.summary.pools if peer.summary is not None else ()
    return [pool for pool in pools if pool.model == demand.request.model and pool.endpoints > 0]


def may_serve(pool: PoolSummary, demand: Demand, *, home: bool) -> bool:
    """Whether a revision is one of those listed. At home the site's own pilot filters instance by instance."""
    return home or not demand.model.digests or pool.model_digest in demand.model.digests
