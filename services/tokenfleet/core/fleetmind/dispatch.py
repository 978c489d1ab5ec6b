"""FleetMind: at which site does this request run?

Constraints first, then money. Home keeps the request unless moving gains enough; the same tenant's prefix goes to the
same site among those that cost nearly the same. The site's own TokenPilot picks the instance.
Failure mode: closed for remote sites (a rule, region, link or summary that can't be told closes them), open for home's
load: there SLOMax decides.
"""

import math
from collections.abc import Sequence
from random import Random

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.decision import Reason, Request, SiteOption
from tokenfleet.core.fleetmind.constraints import Refusal, barred, is_stale, late, overloaded
from tokenfleet.core.fleetmind.cost import SiteCost, cost
from tokenfleet.core.fleetmind.demand import Demand, pool_at
from tokenfleet.core.fleetmind.forecast import Forecast, forecast
from tokenfleet.core.fleetmind.refusal import reason_of
from tokenfleet.core.fleetmind.residency import residency_refusal
from tokenfleet.core.fleetmind.sends import Send, Sends
from tokenfleet.core.known import known
from tokenfleet.core.policy import Policy
from tokenfleet.core.slomax.retry import retry_after_s
from tokenfleet.core.view import PeerView


class Dispatch(Struct, frozen=True, kw_only=True):
    """Where the request goes, or why nowhere: `site` is empty iff `reason` is not.

    `options` are all sites in the order of their names, each with its cost or its refusal. `retry_after_s` comes with
    all_busy: the least wait found, within limits and spread. `stale`: the chosen site's summary is old, no fresher one
    passed. `send` is to be remembered with `Sends.sent` if the request goes there; a send to home only where home's
    summary is a past one.
    """

    site: str
    gateways: tuple[str, ...] = ()
    reason: Reason = ""
    retry_after_s: float | None = None
    stale: bool = False
    options: tuple[SiteOption, ...] = ()
    sentence: str
    send: Send | None = None


class Eligible(Struct, frozen=True, kw_only=True):
    """A site that passed all constraints, with what was seen and what it costs."""

    peer: PeerView
    forecast: Forecast
    cost: SiteCost
    stale: bool

    @property
    def site(self) -> str:
        return self.peer.site


class Refused(Struct, frozen=True, kw_only=True):
    """A site that did not; `forecast` only when load was the cause."""

    peer: PeerView
    refusal: Refusal
    forecast: Forecast | None = None


def dispatch(
    request: Request,
    request_class: str,
    peers: Sequence[PeerView],
    policy: Policy,
    sends: Sends,
    *,
    home: str,
    output_q50: float,
    output_q90: float,
    now_s: float,
    now_wall_s: float,
    rng: Random,
) -> Dispatch:
    """The site for one request that arrived at `home`; `peers` are all known sites, home with its own summary included.

    Output estimates are in tokens, bounded by the caller's budget. `rng` spreads Retry-After, and requests with neither
    blocks nor session. With the product off home takes all that it may. Raises UnknownModelError and
    UnknownTenantError for names that the policy lacks.
    """
    if not policy.products.fleetmind:
        return _unmoved(request, policy, home=home, now_wall_s=now_wall_s)
    demand = Demand(
        request=request,
        home=home,
        request_class=request_class,
        terms=policy.classes[request_class],
        tenant=policy.tenant(request.tenant),
        model=policy.model(request.model),
        policy=policy,
        output_q50=output_q50,
        output_q90=output_q90,
        now_s=now_s,
        now_wall_s=now_wall_s,
    )
    ordered = sorted(peers, key=lambda peer: peer.site)
    judged = [_judged(demand, peer, sends) for peer in ordered]
    if not any(isinstance(each, Eligible) for each in judged) and _hears_nobody(demand, ordered):
        blind = replace(demand, blind=True)
        judged = [_judged(blind, peer, sends) for peer in ordered]
    options = tuple(_option(each) for each in judged)
    eligible = [each for each in judged if isinstance(each, Eligible)]
    refused = [each for each in judged if isinstance(each, Refused)]
    if not eligible:
        return _nowhere(refused, policy, options, rng)
    chosen, why = _chosen(demand, [e for e in eligible if not e.stale] or eligible, rng)
    return Dispatch(
        site=chosen.site,
        gateways=chosen.peer.summary.gateways if chosen.peer.summary is not None else (),
        stale=chosen.stale,
        options=options,
        sentence=why + (f" (its summary is {_old(chosen.peer.age_s)})" if chosen.stale else ""),
        send=Send(
            request=request.id,
            attempt=request.attempt,
            site=chosen.site,
            model=request.model,
            at_s=now_s,
            work_s=chosen.forecast.work_s,
            uncached_tokens=chosen.forecast.uncached_tokens,
            kv_tokens=math.ceil(demand.kv_need_tokens),
        ),
    )


def _old(age_s: float | None) -> str:
    """An age in words; one that was read while catching up is of unknown age."""
    return "of unknown age" if known(age_s) is None else f"{age_s:.1f} s old"


def _hears_nobody(demand: Demand, peers: Sequence[PeerView]) -> bool:
    """Whether no other site's summary is young enough: then our own Kafka is away, not all of them.

    The site that a request is sent to decides on its own tables, so an old summary can't overcommit it.
    """
    most_s = demand.policy.fleetmind.summary_age_max_s
    ages_s = [known(peer.age_s) for peer in peers if peer.site != demand.home and peer.summary is not None]
    return bool(ages_s) and not any(age_s is not None and age_s <= most_s for age_s in ages_s)


def _unmoved(request: Request, policy: Policy, *, home: str, now_wall_s: float) -> Dispatch:
    """Home, with no look at others: rights hold all the same."""
    problem = residency_refusal(request, home, policy, now_wall_s=now_wall_s)
    if not problem and (models := policy.tenant(request.tenant).models) and request.model not in models:
        problem = f"the tenant may not use {request.model}"
    if problem:
        option = SiteOption(site=home, refused=problem)
        return Dispatch(site="", reason="not_permitted", options=(option,), sentence=f"{home} may not: {problem}")
    return Dispatch(site=home, options=(SiteOption(site=home),), sentence=f"fleetmind is off: stays at {home}")


def _judged(demand: Demand, peer: PeerView, sends: Sends) -> Eligible | Refused:
    refusal, pool = barred(demand, peer), pool_at(demand, peer)
    if refusal is not None or pool is None:
        return Refused(peer=peer, refusal=refusal or Refusal(kind="endpoints", text="no endpoints"))
    seen = forecast(demand, peer, pool, sends)
    if (refusal := overloaded(demand, peer, seen)) is not None:
        return Refused(peer=peer, refusal=refusal, forecast=seen)
    price = cost(demand, peer.site, pool, seen)
    return Eligible(peer=peer, forecast=seen, cost=price, stale=is_stale(demand, peer))


def _chosen(demand: Demand, eligible: Sequence[Eligible], rng: Random) -> tuple[Eligible, str]:
    """The site and the words for it."""
    home = next((e for e in eligible if e.site == demand.home), None)
    if home is not None and len(eligible) > 1 and late(demand, home.forecast) is not None:
        eligible = [e for e in eligible if e is not home]  # the others would be in time, or they had been refused
        home = None
    best = min(eligible, key=lambda e: (e.cost.total, e.site))
    stayer, least_gain = _stayer(demand, home, eligible)
    if stayer is not None and stayer.cost.total - best.cost.total <= least_gain:
        return stayer, _words(demand, stayer, best, eligible, least_gain=least_gain)
    most = best.cost.total * (1.0 + demand.policy.fleetmind.near_best_share)
    near = [e for e in eligible if e.cost.total <= most and e is not stayer] or [best]
    chosen = _by_prefix(demand, near, rng)
    return chosen, _words(demand, chosen, best, eligible, least_gain=least_gain)


def _stayer(demand: Demand, home: Eligible | None, eligible: Sequence[Eligible]) -> tuple[Eligible | None, float]:
    """The site that keeps the request unless another is cheaper by more than the second value.

    Home; where home can't, the site with the longest cached prefix, None when nothing is cached anywhere.
    """
    terms, value_per_s = demand.policy.fleetmind, demand.terms.value_per_s
    if home is not None:
        return home, max(terms.stay_gain_min_s * value_per_s, terms.stay_gain_min_share * home.cost.total)
    longest = max(eligible, key=lambda e: (e.forecast.hit_tokens, -e.cost.total, e.site))
    if longest.forecast.hit_tokens == 0:
        return None, 0.0
    return longest, max(terms.match_gain_min_s * value_per_s, terms.stay_gain_min_share * longest.cost.total)


def _by_prefix(demand: Demand, near: Sequence[Eligible], rng: Random) -> Eligible:
    """Weighted rendezvous hash of (tenant, first block) over headroom.

    Distinct prefixes spread in proportion to it; one prefix meets the same site while the same sites are near.
    """
    request = demand.request
    prefix = request.block_keys[:KEY_BYTES] or request.session.encode() or rng.randbytes(KEY_BYTES)

    def score(option: Eligible) -> float:
        name = b"\0".join((request.tenant.encode(), option.site.encode(), prefix))
        drawn = (xxhash.xxh3_64_intdigest(name) + 1) / (2**64 + 1)  # in (0, 1)
        return max(option.forecast.headroom_tokens_per_s, 1.0) / -math.log(drawn)

    return max(near, key=score)


def _nowhere(refused: Sequence[Refused], policy: Policy, options: tuple[SiteOption, ...], rng: Random) -> Dispatch:
    reason = reason_of([each.refusal.kind for each in refused])
    waits_s = [each.forecast.wait_s for each in refused if each.forecast is not None]
    listed = "; ".join(f"{each.peer.site}: {each.refusal.text}" for each in refused) or "no site is known"
    return Dispatch(
        site="",
        reason=reason,
        retry_after_s=retry_after_s(min(waits_s), policy, rng) if reason == "all_busy" and waits_s else None,
        options=options,
        sentence=f"no site takes it. {listed}",
    )


def _words(demand: Demand, chosen: Eligible, best: Eligible, eligible: Sequence[Eligible], *, least_gain: float) -> str:
    """The choice against its nearest rival: `stays at b …` or `goes to c …`, costs in the policy's currency."""
    verb = "stays at" if chosen.site == demand.home else "goes to"
    head = f"{verb} {chosen.site} at a cost of {_money(chosen.cost.total)}"
    rivals = [e for e in eligible if e.site != chosen.site]
    if not rivals:
        return f"{head}, the only site that passes"
    rival = min(rivals, key=lambda e: (e.cost.total, e.site))
    gap = rival.cost.total - chosen.cost.total
    told = f"{head}, runner-up {rival.site} at {_money(rival.cost.total)}"
    if gap >= 0.0:
        return told
    if best is not chosen and chosen.site == demand.home:
        return f"{told}: the gain of {_money(-gap)} is below the {_money(least_gain)} that a move must bring"
    return f"{told}: near enough to keep the prefix together"


def _money(amount: float) -> str:
    """To the millionth: one request costs thousandths."""
    return f"{amount:.6f}"


def _option(judged: Eligible | Refused) -> SiteOption:
    peer = judged.peer
    if isinstance(judged, Refused):
        return SiteOption(
            site=peer.site,
            refused=str(judged.refusal),
            wait_s=judged.forecast.wait_s if judged.forecast is not None else None,
            summary_age_s=peer.age_s,
        )
    seen, price = judged.forecast, judged.cost
    return SiteOption(
        site=peer.site,
        cost=price.total,
        ttft_s=seen.ttft_s,
        wait_s=seen.wait_s,
        network_s=seen.network_s,
        hit_tokens=seen.hit_tokens,
        summary_age_s=peer.age_s,
        work_s=seen.work_s,
        crowding_s=seen.crowding_s,
        tpot_excess_s=price.tpot_excess_s,
        latency_cost=price.latency,
        gpu_cost=price.gpu,
        egress_cost=price.egress,
        stale=judged.stale,
    )
