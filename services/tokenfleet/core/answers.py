"""Answers: each end that the three questions can come to, as a decision with its evidence."""

from typing import Any

from msgspec.structs import replace

from tokenfleet.core.asked import Asked, Decided, chance_of
from tokenfleet.core.blocks import KEY_BYTES
from tokenfleet.core.decision import (
    BLOCKS_TOLD_MAX,
    Admission,
    BatchTicket,
    Decision,
    Mode,
    Reason,
    SiteOption,
    Verdict,
)
from tokenfleet.core.fleetmind.dispatch import Dispatch
from tokenfleet.core.records import Entry, OutcomeEvent, PlacementEvent
from tokenfleet.core.site import Site, pool_name
from tokenfleet.core.slomax.admit import Ruling
from tokenfleet.core.slomax.retry import retry_after_s
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.tokenpilot.explain import ms
from tokenfleet.core.tokenpilot.routing import Routing
from tokenfleet.core.tokenpilot.shadow import watched


def elsewhere(site: Site, asked: Asked, sent: Dispatch) -> Decided:
    """A redirect to the site that FleetMind chose; there TokenPilot picks."""
    if asked.charge.refused:
        wait_s = retry_after_s(asked.charge.retry_after_s or 0.0, asked.policy, asked.rng)
        return refused_for(site, asked, "quota", asked.charge.refused, dispatch=sent, retry_after_s=wait_s)
    counted = sent.send if not asked.request.dry_run else None
    if counted is not None:
        site.sends.sent(counted)
    option = next(option for option in sent.options if option.site == sent.site)
    age_s = _telemetry_age_s(site, option)
    decision = _decision(
        site,
        asked,
        verdict="redirect",
        site_name=sent.site,
        gateways=sent.gateways,
        sites=sent.options,
        hit_tokens=option.hit_tokens,
        predicted_ttft_s=option.ttft_s,
        mode="stale" if sent.stale else _mode(asked, age_s),
        age_s=age_s,
        sentence=sent.sentence,
        admission=_evidence(asked),
    )
    return Decided(decision=decision, sent=None if counted is None else counted.event())


def ruled_out(site: Site, asked: Asked, ruling: Ruling, sent: Dispatch | None) -> Decided:
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
        considered=len(asked.pool),
        mode=_mode(asked, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision, outcome=_rejected(site, asked, decision))


def busy(site: Site, asked: Asked, ruling: Ruling | None, sent: Dispatch | None, why: str) -> Decided:
    """Refused for want of room, to come again when the calmest instance has drained."""
    wait_s = retry_after_s(asked.pool.columns.least_backlog_s, asked.policy, asked.rng)
    if ruling is None:
        return refused_for(site, asked, "all_busy", why, dispatch=sent, retry_after_s=wait_s)
    admission = replace(ruling.admission, retry_after_s=wait_s)
    refused = replace(ruling, verdict="reject", reason="all_busy", admission=admission, detail=why)
    return ruled_out(site, asked, refused, sent)


def refused_for(
    site: Site,
    asked: Asked,
    reason: Reason,
    detail: str,
    *,
    dispatch: Dispatch | None = None,
    retry_after_s: float | None = None,
) -> Decided:
    """A refusal by right, by quota or by every site. Only the last rests on telemetry that can be old."""
    age_s = _youngest_s(site, asked, dispatch)
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
        considered=len(asked.pool),
        mode=_mode(asked, age_s) if dispatch else "fresh",
        age_s=age_s,
    )
    return Decided(decision=decision, outcome=_rejected(site, asked, decision))


def _youngest_s(site: Site, asked: Asked, dispatch: Dispatch | None) -> float | None:
    """Age of the youngest telemetry that was looked at, None if there was none."""
    options = dispatch.options if dispatch else ()
    ages_s = [asked.pool.age_s, *(_telemetry_age_s(site, option) for option in options if option.site != site.name)]
    return min((age_s for age_s in ages_s if age_s is not None), default=None)


def _telemetry_age_s(site: Site, option: SiteOption) -> float | None:
    """Age of the youngest telemetry behind another site's summary."""
    summary = site.peers.summary(option.site)
    if summary is None or summary.age_s is None or option.summary_age_s is None:
        return None
    return summary.age_s + option.summary_age_s


def deferred(site: Site, asked: Asked, admission: Admission, ticket: BatchTicket, why: str) -> Decided:
    """It is to come again, by its ticket."""
    decision = _decision(
        site,
        asked,
        verdict="defer",
        site_name=site.name,
        admission=admission,
        ticket=ticket,
        sentence=f"defer: {why}",
        considered=len(asked.pool),
        mode=_mode(asked, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision)


def stays(site: Site, asked: Asked, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
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
        considered=len(asked.pool),
        mode=_mode(asked, asked.pool.age_s),
        age_s=asked.pool.age_s,
    )
    return Decided(decision=decision)


def waits(here: Decided, why: str = "") -> Decided:
    """Held at its gateway: where it would go now, and what it waits for there."""
    decision = here.decision
    why = why or f"{decision.target} is the cheapest and has {ms(decision.candidates[0].wait_s)} of work before it"
    waiting = replace(decision, verdict="queue", reason="", target="", address="", detail="", sentence=f"held: {why}")
    return Decided(decision=waiting)


def routed(site: Site, asked: Asked, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
    request = asked.request
    terms = asked.policy.site(site.name)
    network_s = 0.0 if request.origin == site.name else terms.rtt_s.get(request.origin, terms.rtt_default_s)
    terms_asked: dict[str, Any] = {
        "request_class": asked.classified.request_class,
        "output_q50": asked.output_q50,
        "output_q90": asked.output_q90,
        "network_s": network_s,
        "last_instance": site.sessions.last(request.tenant, request.session),
        "ahead_s": asked.turn.ahead_s if asked.turn else None,
        "held_s": asked.turn.held_s if asked.turn else 0.0,
        "allowed": asked.turn.allowed if asked.turn else None,
        "pace_s": asked.turn.pace_s if asked.turn else None,
    }
    routing = choose(request, asked.pool, asked.policy, rng=asked.rng, **terms_asked)
    attempt = (request.id, request.attempt, request.hop)
    beside = watched(
        request,
        asked.pool,
        asked.policy,
        routing,
        lambda policy: choose(request, asked.pool, policy, rng=chance_of(*attempt), **terms_asked),
        **terms_asked,
    )
    admission = ruling.admission if ruling else _evidence(asked)
    if routing.reason == "all_busy":
        least_s = asked.pool.columns.least_backlog_s
        admission = replace(admission, retry_after_s=retry_after_s(least_s, asked.policy, asked.rng))
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
        how=routing.how,
        near_ties=routing.near_ties,
        drawn=routing.drawn,
        admission=admission,
        detail=routing.detail,
        sentence=head + routing.sentence,
        mode="stale" if routing.suspect_only else _mode(asked, asked.pool.age_s),
        age_s=asked.pool.age_s,
        shadows=beside.shadows,
        regret=beside.regret,
    )
    if routing.reason:
        return Decided(decision=decision, outcome=_rejected(site, asked, decision))
    return Decided(decision=decision, placement=_placement(site, asked, routing))


def _placement(site: Site, asked: Asked, routing: Routing) -> PlacementEvent:
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
        kv_tokens=asked.kv_tokens,
        replica=site.replica,
        tenant=request.tenant,
        predicted_ttft_s=routing.predicted_ttft_s,
        placed=routing.placed,
        policy_revision=asked.policy.revision,
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
    asked: Asked,
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
    products = asked.policy.products
    terms = asked.policy.classes[asked.classified.request_class]
    evidence["admission"] = replace(
        evidence["admission"],
        ttft_max_s=terms.ttft_max_s(request.prompt_tokens),
        tpot_max_s=terms.tpot_s,
        end_max_s=request.deadline_s if request.deadline_s is not None else terms.deadline_s,
    )
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
        pool=pool_name(request.model, site_name),
        prompt_tokens=request.prompt_tokens,
        block_keys=request.block_keys[: BLOCKS_TOLD_MAX * KEY_BYTES],
        block_tokens=request.block_tokens,
        session=request.session,
        sentence=sentence,
        replica=f"{site.name}/{site.replica}",
        policy_revision=asked.policy.revision,
        canary=asked.policy is not site.policy,
        calibration_revision=site.calibration_revision,
        products=tuple(name for name in products.__struct_fields__ if getattr(products, name)),
        tables=site.versions(asked.policy_hash),
        at_wall_s=asked.ids.now_wall_s,
        dry_run=request.dry_run,
        idempotency_key=request.idempotency_key,
        body_hash=request.body_hash,
        **evidence,
    )


def _rejected(site: Site, asked: Asked, decision: Decision) -> OutcomeEvent | None:
    """The outcome that a refusal is, so that goodput counts it as offered whoever forgets to report it. A key that is
    known brings no work that could be served: what it stands for is counted once, where it runs."""
    request = asked.request
    if decision.verdict != "reject" or request.dry_run or decision.reason in ("key_conflict", "duplicate_done"):
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
        policy_revision=decision.policy_revision,
    )


def _evidence(asked: Asked) -> Admission:
    return Admission(
        request_class=asked.classified.request_class,
        rule=asked.classified.rule,
        output_q50_tokens=asked.output_q50,
        output_q90_tokens=asked.output_q90,
    )


def _mode(asked: Asked, age_s: float | None) -> Mode:
    return "fresh" if age_s is not None and age_s <= asked.policy.liveness.fresh_max_s else "stale"
