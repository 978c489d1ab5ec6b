"""Schedule: may this request run, at which site, on which instance? The three questions in their order, on one Site.

`decide` reads the site's tables and returns a value; it writes only what a decision is answerable for: the tenant's
quota, the send that FleetMind remembers. What must be placed and recorded comes back in `Decided`.
"""

from random import Random

from msgspec.structs import replace

from tokenfleet.core.answers import elsewhere, refused_for, routed, ruled_out, stays
from tokenfleet.core.asked import Asked, Decided, Ids, Steps
from tokenfleet.core.decision import Request
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.fleetmind.dispatch import Dispatch, dispatch
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.admit import Ruling, admit, barred
from tokenfleet.core.slomax.classify import classify
from tokenfleet.core.slomax.quota import Charge, tenant_entry
from tokenfleet.core.summary import summarise
from tokenfleet.core.view import PeerView


def decide(site: Site, request: Request, steps: Steps, ids: Ids, *, now_s: float) -> Decided:
    """The answer to `request` at `site`. Equal tables and requests give equal answers (chance is seeded).

    Raises UnknownModelError, UnknownTenantError, UnknownSiteError and BadRequestError for names that the policy lacks.
    """
    asked = _asked(site, request, steps, ids, now_s)
    decided = _answer(site, asked)
    if request.dry_run or decided.decision.verdict not in ("admit", "redirect"):
        site.quotas.refund(asked.charge)
    elif asked.charge.bucket is not None:
        site.charged(request.id)
    return decided


def _asked(site: Site, request: Request, steps: Steps, ids: Ids, now_s: float) -> Asked:
    policy = site.policy
    model = policy.model(request.model)
    tenant = policy.tenant(request.tenant)
    policy.site(request.origin)
    if request.hop == 0 and request.origin != site.name:
        raise BadRequestError("origin", f"{request.origin!r} asked {site.name!r} without a redirect (hop 1)")
    room = model.context_max_tokens - request.prompt_tokens
    if request.max_tokens > room > 0:  # a budget is a bound: what the context can't hold is never produced
        request = replace(request, max_tokens=room)
    q50, q90 = site.outputs.quantiles(
        tenant=request.tenant,
        model=request.model,
        prior=model,
        prompt_tokens=request.prompt_tokens,
        budget_tokens=request.max_tokens,
    )
    entry = tenant_entry(request.tenant, tenants=policy.tenants, default_tenant=policy.default_tenant)
    charge = Charge(tenant=entry)
    if steps.admission and request.hop == 0 and policy.products.slomax and not site.was_charged(request.id):
        running = site.running_of(request.tenant) if tenant.running_max else 0
        charge = site.quotas.charge(entry, tenant, running=running, now_s=now_s)
    pool = site.pool(request.model, now_s, request)
    return Asked(
        request=request,
        steps=steps,
        ids=ids,
        pool=pool,
        classified=classify(request, pool, policy, output_q90_tokens=q90),
        output_q50=q50,
        output_q90=q90,
        charge=charge,
        now_s=now_s,
        rng=Random(f"{request.id}/{request.attempt}/{request.hop}"),
    )


def _answer(site: Site, asked: Asked) -> Decided:
    """The three questions in order; the first refusal is the answer."""
    if asked.steps.admission and (refused := _rights(site, asked)):
        return refused_for(site, asked, "filtered_by_policy", refused)
    sent: Dispatch | None = None
    if asked.steps.dispatch and asked.request.hop == 0:
        sent = _dispatched(site, asked, without=())
        if sent.reason:
            return refused_for(site, asked, sent.reason, sent.sentence, dispatch=sent, retry_after_s=sent.retry_after_s)
        if sent.site != site.name:
            return elsewhere(site, asked, sent)
    ruling: Ruling | None = None
    if asked.steps.admission:
        ruling = _ruled(site, asked)
        if ruling.verdict != "admit":
            other = _second_choice(site, asked, ruling)
            return other if other is not None else ruled_out(site, asked, ruling, sent)
    if not asked.steps.routing:
        return stays(site, asked, ruling, sent)
    return routed(site, asked, ruling, sent)


def _rights(site: Site, asked: Asked) -> str:
    """Why the tenant may not ask this at all, whatever the load; empty if it may."""
    return barred(asked.request, asked.classified, site.policy)


def _dispatched(site: Site, asked: Asked, *, without: tuple[str, ...]) -> Dispatch:
    request = replace(asked.request, sites_tried=(*asked.request.sites_tried, *without))
    return dispatch(
        request,
        asked.classified.request_class,
        _peers(site, asked),
        site.policy,
        site.sends,
        home=site.name,
        output_q50=asked.output_q50,
        output_q90=asked.output_q90,
        now_s=asked.now_s,
        now_wall_s=asked.ids.now_wall_s,
        rng=asked.rng,
    )


def _peers(site: Site, asked: Asked) -> list[PeerView]:
    """All sites of the policy as seen from here; home from the tables at hand."""
    request = asked.request
    others = [
        site.peers.view(
            name,
            pool=f"{request.model}@{name}",
            block_keys=request.block_keys,
            block_tokens=request.block_tokens,
            now_s=asked.now_s,
        )
        for name in site.policy.sites
        if name != site.name
    ]
    own = summarise(
        site.name,
        (asked.pool,) if asked.pool.instances else (),
        site.policy,
        cluster="",
        epoch=0,
        n=0,
        period_s=0.0,
        gateways=(),
    )
    hit = max((i.hit_tokens for i in asked.pool.instances), default=0)
    return [PeerView(site=site.name, summary=own, age_s=0.0, hit_tokens=hit), *others]


def _second_choice(site: Site, asked: Asked, ruling: Ruling) -> Decided | None:
    """Another site when this one has no room now, if the request may still leave."""
    if not asked.steps.dispatch or asked.request.hop or ruling.reason != "all_busy":
        return None
    sent = _dispatched(site, asked, without=(site.name,))
    return None if sent.reason else elsewhere(site, asked, sent)


def _ruled(site: Site, asked: Asked) -> Ruling:
    return admit(
        asked.request,
        asked.classified,
        asked.pool,
        site.policy,
        charge=asked.charge,
        output_q50_tokens=asked.output_q50,
        output_q90_tokens=asked.output_q90,
        rng=asked.rng,
    )
