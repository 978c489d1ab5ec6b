"""Schedule: may this request run, at which site, on which instance? The three questions in their order, on one Site.

`decide` reads the site's tables and returns a value; it writes only what a decision is answerable for: the tenant's
quota, the send that FleetMind remembers. What must be placed and recorded comes back in `Decided`.
"""

from random import Random
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.decision import Admission, Decision, Mode, Reason, Request, SiteOption, Verdict
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.fleetmind.dispatch import Dispatch, dispatch
from tokenfleet.core.records import Entry, OutcomeEvent, PlacementEvent
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.admit import Ruling, admit, barred
from tokenfleet.core.slomax.classify import Classification, classify
from tokenfleet.core.slomax.quota import Charge, tenant_entry
from tokenfleet.core.summary import summarise
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.view import PeerView, PoolView


class Steps(Struct, frozen=True, kw_only=True):
    """Which of the three questions a call asks."""

    admission: bool = False
    dispatch: bool = False
    routing: bool = False


SCHEDULE: Final = Steps(admission=True, dispatch=True, routing=True)
ADMIT: Final = Steps(admission=True)
DISPATCH: Final = Steps(dispatch=True)
ROUTE: Final = Steps(routing=True)


class Ids(Struct, frozen=True, kw_only=True):
    """What names and labels a decision: its id, and the wall clock (a label, and when a residency rule expires)."""

    decision: str
    now_wall_s: float


class Decided(Struct, frozen=True, kw_only=True):
    """The decision, the placement to count if it placed something, and the outcome to report if it refused."""

    decision: Decision
    placement: PlacementEvent | None = None
    outcome: OutcomeEvent | None = None


class _Asked(Struct, frozen=True, kw_only=True):
    """One request with all that is looked up once."""

    request: Request
    steps: Steps
    ids: Ids
    pool: PoolView
    classified: Classification
    output_q50: float
    output_q90: float
    charge: Charge
    now_s: float
    rng: Random


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


def _asked(site: Site, request: Request, steps: Steps, ids: Ids, now_s: float) -> _Asked:
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
    return _Asked(
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


def _answer(site: Site, asked: _Asked) -> Decided:
    """The three questions in order; the first refusal is the answer."""
    if asked.steps.admission and (refused := _rights(site, asked)):
        return _refused(site, asked, "filtered_by_policy", refused)
    sent: Dispatch | None = None
    if asked.steps.dispatch and asked.request.hop == 0:
        sent = _dispatched(site, asked, without=())
        if sent.reason:
            return _refused(site, asked, sent.reason, sent.sentence, dispatch=sent, retry_after_s=sent.retry_after_s)
        if sent.site != site.name:
            return _elsewhere(site, asked, sent)
    ruling: Ruling | None = None
    if asked.steps.admission:
        ruling = _ruled(site, asked)
        if ruling.verdict != "admit":
            other = _second_choice(site, asked, ruling)
            return other if other is not None else _ruled_out(site, asked, ruling, sent)
    if not asked.steps.routing:
        return _stays(site, asked, ruling, sent)
    return _routed(site, asked, ruling, sent)


def _rights(site: Site, asked: _Asked) -> str:
    """Why the tenant may not ask this at all, whatever the load; empty if it may."""
    return barred(asked.request, asked.classified, site.policy)


def _dispatched(site: Site, asked: _Asked, *, without: tuple[str, ...]) -> Dispatch:
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


def _peers(site: Site, asked: _Asked) -> list[PeerView]:
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


def _second_choice(site: Site, asked: _Asked, ruling: Ruling) -> Decided | None:
    """Another site when this one has no room now, if the request may still leave."""
    if not asked.steps.dispatch or asked.request.hop or ruling.reason != "all_busy":
        return None
    elsewhere = _dispatched(site, asked, without=(site.name,))
    return None if elsewhere.reason else _elsewhere(site, asked, elsewhere)


def _elsewhere(site: Site, asked: _Asked, sent: Dispatch) -> Decided:
    """A redirect to the site that FleetMind chose; there TokenPilot picks."""
    if asked.charge.refused:
        return _refused(
            site, asked, "quota", asked.charge.refused, dispatch=sent, retry_after_s=asked.charge.retry_after_s
        )
    if sent.send is not None and not asked.request.dry_run:
        site.sends.sent(sent.send)
    option = next(option for option in sent.options if option.site == sent.site)
    age_s = _telemetry_age_s(site, sent.site, option)
    decision = _decision(
        site,
        asked,
        verdict="redirect",
        site_name=sent.site,
        gateways=sent.gateways,
        sites=sent.options,
        hit_tokens=option.hit_tokens,
        predicted_ttft_s=option.ttft_s,
        mode="stale" if sent.stale else _mode(site, age_s),
        age_s=age_s,
        sentence=sent.sentence,
        admission=_evidence(asked),
    )
    return Decided(decision=decision)


def _telemetry_age_s(site: Site, other: str, option: SiteOption) -> float | None:
    """Age of the youngest telemetry behind another site's summary."""
    summary = site.peers.summary(other)
    if summary is None or summary.age_s is None or option.summary_age_s is None:
        return None
    return summary.age_s + option.summary_age_s


def _ruled(site: Site, asked: _Asked) -> Ruling:
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


def _ruled_out(site: Site, asked: _Asked, ruling: Ruling, sent: Dispatch | None) -> Decided:
    decision = _decision(
        site,
        asked,
        verdict=ruling.verdict,
        reason=ruling.reason,
        site_name=site.name,
        sites=sent.options if sent else (),
        admission=ruling.admission,
        detail=ruling.detail,
        sentence=f"{ruling.verdict} ({ruling.reason}): {ruling.detail}",
        considered=len(asked.pool.instances),
        mode=_mode(site, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision, outcome=_rejected(site, asked, decision))


def _refused(
    site: Site,
    asked: _Asked,
    reason: Reason,
    detail: str,
    *,
    dispatch: Dispatch | None = None,
    retry_after_s: float | None = None,
) -> Decided:
    decision = _decision(
        site,
        asked,
        verdict="reject",
        reason=reason,
        site_name=site.name,
        sites=dispatch.options if dispatch else (),
        admission=replace(_evidence(asked), retry_after_s=retry_after_s),
        detail=detail,
        sentence=f"reject ({reason}): {detail}",
        considered=len(asked.pool.instances),
        mode=_mode(site, asked.pool.age_s) if asked.pool.instances else "fresh",
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision, outcome=_rejected(site, asked, decision))


def _stays(site: Site, asked: _Asked, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
    """Admitted, or dispatched to this very site, without a choice of instance."""
    sentence = sent.sentence if sent else f"admitted as {asked.classified.request_class}: {asked.classified.rule}"
    decision = _decision(
        site,
        asked,
        verdict="admit",
        site_name=site.name,
        sites=sent.options if sent else (),
        admission=ruling.admission if ruling else _evidence(asked),
        sentence=sentence,
        considered=len(asked.pool.instances),
        mode=_mode(site, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision)


def _routed(site: Site, asked: _Asked, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
    request = asked.request
    terms = site.policy.site(site.name)
    network_s = 0.0 if request.origin == site.name else terms.rtt_s.get(request.origin, terms.rtt_default_s)
    routing = choose(
        request,
        asked.pool,
        site.policy,
        request_class=asked.classified.request_class,
        output_q50=asked.output_q50,
        output_q90=asked.output_q90,
        rng=asked.rng,
        network_s=network_s,
        last_instance=site.last_instance(request.session),
    )
    head = f"{sent.sentence}; " if sent and len(sent.options) > 1 else ""
    decision = _decision(
        site,
        asked,
        verdict="reject" if routing.reason else "admit",
        reason=routing.reason,
        site_name=site.name,
        target=routing.target,
        address=routing.address,
        sites=sent.options if sent else (),
        candidates=routing.candidates,
        hit_tokens=routing.placed.hit_tokens if routing.placed else 0,
        predicted_ttft_s=routing.predicted_ttft_s,
        considered=routing.considered,
        excluded=routing.excluded,
        relaxed=routing.relaxed,
        runner_up=routing.runner_up,
        gap_s=routing.gap_s,
        admission=ruling.admission if ruling else _evidence(asked),
        detail=routing.detail,
        sentence=head + routing.sentence,
        mode="stale" if routing.suspect_only else _mode(site, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    if routing.reason:
        return Decided(decision=decision, outcome=_rejected(site, asked, decision))
    return Decided(decision=decision, placement=_placement(site, asked, routing))


def _placement(site: Site, asked: _Asked, routing: Routing) -> PlacementEvent:
    request = asked.request
    chosen = routing.candidates[0]
    entry = Entry(
        decision=asked.ids.decision,
        request=request.id,
        attempt=request.attempt,
        instance=routing.target,
        model=request.model,
        request_class=asked.classified.request_class,
        work_s=chosen.work_s,
        uncached_tokens=chosen.uncached_tokens,
        kv_tokens=request.prompt_tokens + round(asked.output_q90),
        replica=site.replica,
        tenant=request.tenant,
        predicted_ttft_s=routing.predicted_ttft_s,
        placed=routing.placed,
    )
    return PlacementEvent(
        kind="placed",
        decision=entry.decision,
        request=entry.request,
        attempt=entry.attempt,
        instance=entry.instance,
        entry=entry,
    )


def _decision(
    site: Site,
    asked: _Asked,
    *,
    verdict: Verdict,
    site_name: str,
    mode: Mode,
    age_s: float | None,
    sentence: str,
    reason: Reason = "",
    **evidence: Any,
) -> Decision:
    request = asked.request
    products = site.policy.products
    return Decision(
        id=asked.ids.decision,
        request=request.id,
        attempt=request.attempt,
        verdict=verdict,
        reason=reason,
        mode=mode,
        age_s=age_s,
        tenant=request.tenant,
        model=request.model,
        request_class=asked.classified.request_class,
        origin=request.origin,
        site=site_name,
        pool=f"{request.model}@{site_name}",
        prompt_tokens=request.prompt_tokens,
        sentence=sentence,
        replica=f"{site.name}/{site.replica}",
        policy_revision=site.policy.revision,
        calibration_revision=site.calibration_revision,
        products=tuple(name for name in products.__struct_fields__ if getattr(products, name)),
        tables=site.versions(),
        at_wall_s=asked.ids.now_wall_s,
        dry_run=request.dry_run,
        **evidence,
    )


def _rejected(site: Site, asked: _Asked, decision: Decision) -> OutcomeEvent | None:
    """The outcome that a refusal is, so that goodput counts it as offered whoever forgets to report it."""
    request = asked.request
    if decision.verdict != "reject" or request.dry_run:
        return None
    return OutcomeEvent(
        request=request.id,
        attempt=request.attempt,
        kind="rejected",
        decision=decision.id,
        tenant=request.tenant,
        request_class=decision.request_class,
        model=request.model,
        origin=request.origin,
        site=site.name,
        pool=decision.pool,
        at_wall_s=asked.ids.now_wall_s,
        elapsed_s=request.elapsed_s,
        stop=decision.reason,
    )


def _evidence(asked: _Asked) -> Admission:
    return Admission(
        request_class=asked.classified.request_class,
        rule=asked.classified.rule,
        output_q50_tokens=asked.output_q50,
        output_q90_tokens=asked.output_q90,
    )


def _mode(site: Site, age_s: float | None) -> Mode:
    return "fresh" if age_s is not None and age_s <= site.policy.liveness.fresh_max_s else "stale"
