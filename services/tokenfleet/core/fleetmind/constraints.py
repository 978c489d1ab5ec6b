"""Constraints: may the request run at that site at all?

RIGHTS come first and need no load: nothing that scores, falls back or retries runs before them. LOAD is asked only of
sites that passed, with a forecast in hand. Within both the order is that of the tables; the first that fails speaks.
"""

from collections.abc import Callable

from msgspec import Struct

from tokenfleet.core.fleetmind.demand import Demand, pool_at, pools_of_model
from tokenfleet.core.fleetmind.forecast import Forecast
from tokenfleet.core.fleetmind.residency import residency_refusal
from tokenfleet.core.known import known
from tokenfleet.core.view import PeerView


class Refusal(Struct, frozen=True, kw_only=True):
    """Why a site can't take the request: `kind` for the reason of the whole, `text` for people."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def barred(demand: Demand, peer: PeerView) -> Refusal | None:
    """The first of RIGHTS that the site fails, None when it passes them all."""
    return next((refusal for check in RIGHTS if (refusal := check(demand, peer)) is not None), None)


def overloaded(demand: Demand, peer: PeerView, forecast: Forecast) -> Refusal | None:
    """The first of LOAD that the site fails, None when it passes them all."""
    return next((refusal for check in LOAD if (refusal := check(demand, peer, forecast)) is not None), None)


def is_stale(demand: Demand, peer: PeerView) -> bool:
    """Whether a remote summary is so old that it counts only when no fresher site passes."""
    age_s = known(peer.age_s)
    return peer.site != demand.home and (age_s is None or age_s > demand.policy.fleetmind.summary_age_fresh_s)


def crossing(demand: Demand, peer: PeerView) -> Refusal | None:
    """1. Request and tenant let it leave its origin, it has not been sent here before, and not been here already."""
    request = demand.request
    if peer.site in request.sites_tried:
        return Refusal(kind="tried", text="an earlier attempt was there")
    if peer.site == demand.home:
        return None
    if request.hop >= 1:
        return Refusal(kind="crossing", text="it was sent here by another site and goes no further")
    if not request.cross_site:
        return Refusal(kind="crossing", text="the request stays at its origin")
    if not demand.tenant.cross_site:
        return Refusal(kind="crossing", text="the tenant's requests stay at their origin")
    return None


def entitlement(demand: Demand, peer: PeerView) -> Refusal | None:
    """2. The tenant may use the model."""
    if demand.tenant.models and demand.request.model not in demand.tenant.models:
        return Refusal(kind="entitlement", text=f"the tenant may not use {demand.request.model}")
    return None


def residency(demand: Demand, peer: PeerView) -> Refusal | None:
    """3. The site and the origin are on the tenant's lists for processing, cache and logs."""
    text = residency_refusal(demand.request, peer.site, demand.policy, now_wall_s=demand.now_wall_s)
    return Refusal(kind="residency", text=text) if text else None


def match(demand: Demand, peer: PeerView) -> Refusal | None:
    """4. The site has the model in a permitted revision, with the adapter and enough context."""
    if peer.summary is None:
        return Refusal(kind="age", text="no summary was ever heard")
    if not pools_of_model(demand, peer):
        has = f"no engine of {demand.request.model}" if peer.summary.pools else "no engines"
        return Refusal(kind="endpoints", text=has)
    if (pool := pool_at(demand, peer)) is None:
        return Refusal(kind="revision", text=f"no permitted revision of {demand.request.model}")
    if demand.request.adapter and peer.site != demand.home:
        return Refusal(kind="adapter", text="summaries don't tell which adapters are loaded")
    holds = pool.context_max_tokens or demand.model.context_max_tokens
    if demand.context_need_tokens > holds:
        return Refusal(kind="context", text=f"{demand.context_need_tokens} tokens needed, context holds {holds}")
    return None


def ready(demand: Demand, peer: PeerView) -> Refusal | None:
    """5. Enough ready instances. At home one is enough, a suspect one too: silence never empties one's own pool."""
    pool = pool_at(demand, peer)
    if pool is None:
        return Refusal(kind="ready", text="no instance is ready")
    home = peer.site == demand.home
    have, least = (pool.ready + pool.suspect, 1) if home else (pool.ready, demand.policy.site(peer.site).ready_min)
    if have < least:
        return Refusal(kind="ready", text=f"{have} of {pool.endpoints} instances ready, {least} needed")
    return None


def age(demand: Demand, peer: PeerView) -> Refusal | None:
    """6. The summary is young enough; one's own is made from the tables at hand."""
    most_s = demand.policy.fleetmind.summary_age_max_s
    age_s = known(peer.age_s)
    if peer.site == demand.home or demand.blind or (age_s is not None and age_s <= most_s):
        return None
    told = "of unknown age" if age_s is None else f"{age_s:.1f} s old"
    return Refusal(kind="age", text=f"the summary is {told}, {most_s:.1f} s allowed")


def link(demand: Demand, peer: PeerView) -> Refusal | None:
    """7. The link is up and loses little; loss as measured, else as the policy has it."""
    if peer.site == demand.home:
        return None
    if not peer.link_up:
        return Refusal(kind="link", text="the link is down")
    measured = known(peer.loss)
    loss = measured if measured is not None else demand.policy.site(peer.site).loss.get(demand.home, 0.0)
    if loss >= demand.policy.fleetmind.loss_max:
        return Refusal(kind="link", text=f"{loss:.1%} lost, {demand.policy.fleetmind.loss_max:.1%} allowed")
    return None


def ceiling(demand: Demand, peer: PeerView, forecast: Forecast) -> Refusal | None:
    """8. Use with this request stays below the class's ceiling, lower for requests from elsewhere."""
    remote = peer.site != demand.home
    most = demand.terms.ceiling - (demand.policy.fleetmind.remote_ceiling_discount if remote else 0.0)
    if forecast.utilisation > most:
        return Refusal(
            kind="ceiling", text=f"{forecast.bottleneck} {forecast.utilisation:.0%} used, {most:.0%} allowed"
        )
    return None


def service_level(demand: Demand, peer: PeerView, forecast: Forecast) -> Refusal | None:
    """9. First token and end are predicted in time. One's own site is left to SLOMax, which knows its instances."""
    if peer.site == demand.home:
        return None
    return late(demand, forecast)


def late(demand: Demand, forecast: Forecast) -> Refusal | None:
    """What the forecast misses: kind `wait` when it would be in time without waiting, `infeasible` otherwise."""
    for name, predicted_s, most_s in (
        ("first token", forecast.ttft_s, demand.ttft_max_s),
        ("end", forecast.end_s, demand.end_max_s),
    ):
        if most_s is not None and predicted_s > most_s:
            kind = "wait" if predicted_s - forecast.wait_s <= most_s else "infeasible"
            return Refusal(kind=kind, text=f"{name} in {predicted_s:.2f} s, {most_s:.2f} s left")
    return None


RIGHTS: tuple[Callable[[Demand, PeerView], Refusal | None], ...] = (
    crossing,
    entitlement,
    residency,
    match,
    ready,
    age,
    link,
)
LOAD: tuple[Callable[[Demand, PeerView, Forecast], Refusal | None], ...] = (ceiling, service_level)
