"""Schedule: may this request run, at which site, on which instance? The three questions in their order, on one Site.

`decide` reads the site's tables and returns a value; it writes only what a decision is answerable for: the tenant's
quota, the send that FleetMind remembers. What must be placed and recorded comes back in `Decided`.
"""

from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from tokenfleet.core.answers import elsewhere, refused_for, routed, ruled_out, stays, waits
from tokenfleet.core.asked import Asked, Decided, Ids, Steps, Turn, chance_of, estimated
from tokenfleet.core.class_room import beyond_class_share
from tokenfleet.core.credit import (
    book_of,
    give_back,
    gone,
    granted_turns,
    has_credit,
    has_ticket,
    lent_out,
    lines_up_at_home,
    on_credit,
)
from tokenfleet.core.decision import Candidate, Decision, Reason, Request
from tokenfleet.core.dispatching import dispatched
from tokenfleet.core.errors import BadRequestError, TableNotReadyError
from tokenfleet.core.fleetmind.dispatch import Dispatch
from tokenfleet.core.fleetmind.residency import residency_refusal
from tokenfleet.core.paced import paced, stays_in_line
from tokenfleet.core.policy import Policy
from tokenfleet.core.reserving import kept_free
from tokenfleet.core.returning import kept_from, standing_of, stood_on, told_when
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.admit import Ruling, admit, barred
from tokenfleet.core.slomax.classify import classify
from tokenfleet.core.slomax.quota import Charge, entry_of
from tokenfleet.core.slomax.retry import retry_after_s
from tokenfleet.core.ticketed import by_its_ticket, in_its_turn, is_ticketed
from tokenfleet.core.tokenpilot.held import Call, Waiting, waiting_of

WANTS_ROOM: tuple[Reason, ...] = ("all_busy", "infeasible")  # the class was turned away for load

Released = Decided | BadRequestError | TableNotReadyError
"""What comes of a held request: its final answer, or why there can be none any more."""


def decide(site: Site, request: Request, steps: Steps, ids: Ids, *, now_s: float) -> Decided:
    """The answer to `request` at `site`. Equal tables and requests give equal answers (chance is seeded).

    Verdict `queue`: the request is held, and `released` or `let_go` gives its final answer; `withdrawn` takes it back.
    Raises UnknownModelError, UnknownTenantError, UnknownSiteError and BadRequestError for names that the policy lacks.
    """
    asked = _asked(site, request, steps, ids, now_s)
    if request.sites_tried and not request.dry_run:  # the last attempt never ran where it was sent
        site.sends.withdrawn(request.id, request.attempt - 1, site=request.sites_tried[-1], model=request.model)
    return _decided(site, asked)


def released(site: Site, model: str, now_s: float, next_ids: Callable[[], Ids]) -> Iterator[tuple[Waiting, Released]]:
    """The held requests of `model` whose turn it is, in order, with their final answers.

    Ask after each first token and every held.PERIOD_S. Each must be placed before the next is asked for: it is decided
    on what the one before has left. The answer to one that names what a newer policy lacks is the error that says so.
    """
    if model not in site.held.models():
        return
    policy = site.policy_of(model)
    if not policy.paces and book_of(site, policy, site.pool(model, now_s, policy=policy)) is not None:
        yield from _granted(site, model, now_s, next_ids)
        return
    short: set[str] = set()
    if policy.paces:
        queues = site.queues(model)
        queues.admit(site.held.of(model), policy, now_s)
        turns = queues.turns(partial(site.pool, model, now_s, policy=policy), site.hits, policy, now_s)
    else:
        turns = site.held.turns(site.pool(model, now_s, policy=policy), site.hits, policy.tokenpilot, now_s)
    for waiting, turn in turns:
        if waiting.request_class in short and not turn.overdue and not turn.late:
            continue  # a large one would wait for ever behind small ones
        answer = _in_turn(site, waiting, turn, next_ids(), now_s)
        if isinstance(answer, Decided) and answer.short:
            short.add(waiting.request_class)
        if isinstance(answer, Decided) and answer.decision.verdict == "queue":
            continue
        site.take(waiting.call)
        gone(site, waiting, now_s)
        if policy.paces and isinstance(answer, Decided) and answer.placement is not None:
            pool = site.pool(model, now_s, policy=policy)
            site.queues(model).went(waiting, answer.decision.id, pool, policy, now_s)
        yield waiting, answer


def _granted(site: Site, model: str, now_s: float, next_ids: Callable[[], Ids]) -> Iterator[tuple[Waiting, Released]]:
    """`released` for a pool whose book rules: its owner has one line for all replicas."""
    for waiting, turn in granted_turns(site, model, now_s):
        answer = _in_turn(site, waiting, turn, next_ids(), now_s)
        if isinstance(answer, Decided) and answer.decision.verdict == "queue":
            continue
        placed = isinstance(answer, Decided) and answer.placement is not None
        gone(site, waiting, now_s, placed=placed)
        site.take(waiting.call)
        yield waiting, answer


def let_go(site: Site, call: Call, ids: Ids, *, now_s: float) -> Released | None:
    """The final answer to a held request at once, whatever the backlog; None if it is not held."""
    if (waiting := site.take(call)) is None:
        return None
    if has_ticket(site, waiting) or stays_in_line(site, waiting.request.model, now_s):
        give_back(site, waiting.charge, now_s)
        site.duplicates.given_up(waiting.request)
        return TableNotReadyError("this replica holds nothing any more; another goes on where the request stands")
    return _in_turn(site, waiting, Turn(overdue=True), ids, now_s)


def withdrawn(site: Site, call: Call, now_s: float) -> None:
    """Nobody waits for the held request any more: what it took is given back."""
    if (waiting := site.take(call)) is not None:
        gone(site, waiting, now_s)
        give_back(site, waiting.charge, now_s)
        site.duplicates.given_up(waiting.request)


def _in_turn(site: Site, waiting: Waiting, turn: Turn, ids: Ids, now_s: float) -> Released:
    """Decided on the tables of now, with what the request took when it came: quota, and a place among those who run.
    Where nothing can be decided any more, the quota is given back."""
    waited_s = now_s - waiting.since_s
    request = replace(waiting.request, elapsed_s=waiting.request.elapsed_s + waited_s)
    try:
        asked = _asked(site, request, waiting.steps, ids, now_s, turn=turn, held=waiting)
    except BadRequestError as error:
        give_back(site, waiting.charge, now_s)
        site.duplicates.given_up(waiting.request)
        return error
    return _decided(site, asked)


def _decided(site: Site, asked: Asked) -> Decided:
    """The answer, with the quota kept by what was admitted and what waits, and given back by all else."""
    request = asked.request
    decided = _duplicate(site, asked) or told_when(site, asked, _answer(site, asked))
    verdict, duplicate = decided.decision.verdict, decided.decision.duplicate
    if request.idempotency_key and not request.dry_run and not duplicate:
        site.duplicates.answered(request, decided.decision, asked.policy, now_s=asked.now_s)
    if request.dry_run or duplicate or verdict in ("reject", "defer"):
        give_back(site, asked.charge, asked.now_s)
        if decided.decision.reason in WANTS_ROOM and not request.dry_run:
            site.wanting.turned_away(request.model, asked.classified.request_class, asked.now_s)
    elif verdict != "queue" and (asked.charge.bucket is not None or asked.charge.credits):
        site.repeats.charged(request)
    return by_its_ticket(site, request, decided)


def _asked(
    site: Site,
    request: Request,
    steps: Steps,
    ids: Ids,
    now_s: float,
    *,
    turn: Turn | None = None,
    held: Waiting | None = None,
) -> Asked:
    policy, policy_hash = site.rules(request.id, now_s)
    policy.model(request.model)
    policy.site(request.origin)
    if request.hop == 0 and request.origin != site.name:
        raise BadRequestError("origin", f"{request.origin!r} asked {site.name!r} without a redirect (hop 1)")
    request, q50, q90 = estimated(request, policy, site.outputs)
    pool = site.pool(request.model, now_s, request, policy=policy)
    classified = classify(request, pool, policy, output_q90_tokens=q90)
    if held is None:
        standing = standing_of(site, request, classified.request_class, policy, steps=steps, now_s=now_s)
        request = replace(request, elapsed_s=max(request.elapsed_s, standing.elapsed_s))
    else:
        standing = stood_on(held, now_s - held.since_s)
    return Asked(
        request=request,
        policy=policy,
        policy_hash=policy_hash,
        steps=steps,
        ids=ids,
        pool=pool,
        classified=classified,
        output_q50=q50,
        output_q90=q90,
        # Last: who can't be asked costs nothing.
        charge=_charge(site, policy, request, steps, now_s) if held is None else held.charge,
        now_s=now_s,
        rng=chance_of(request.id, request.attempt, request.hop),
        standing=standing,
        turn=turn,
    )


def _charge(site: Site, policy: Policy, request: Request, steps: Steps, now_s: float) -> Charge:
    """What the request takes from its tenant's quota: once a logical request, at its origin."""
    tenant = policy.tenant(request.tenant)
    entry = entry_of(request.tenant, policy)
    asked_here = steps.admission and request.hop == 0 and policy.products.slomax
    if not asked_here or site.repeats.was_charged(request):
        return Charge(tenant=entry)
    running = site.running_of(entry, policy) if tenant.running_max else 0
    team = (tenant.team, policy.tenants[tenant.team]) if tenant.team else None
    team_running = site.running_of(team[0], policy) if team and team[1].running_max else 0
    return site.quotas.charge(entry, tenant, running=running, now_s=now_s, team=team, team_running=team_running)


def _duplicate(site: Site, asked: Asked) -> Decided | None:
    """The answer to a request whose key is known; who has its turn came under it before."""
    if asked.turn is not None or not asked.policy.products.slomax:
        return None
    found = site.duplicates.find(asked.request, asked.policy, now_s=asked.now_s)
    key = asked.request.idempotency_key
    if found == "conflict":
        return refused_for(site, asked, "key_conflict", f"the key {key!r} stands for another request")
    if found == "done":
        return refused_for(site, asked, "duplicate_done", f"the request with the key {key!r} has completed")
    return Decided(decision=found) if isinstance(found, Decision) else None


def _answer(site: Site, asked: Asked) -> Decided:
    """The three questions in order; the first refusal is the answer."""
    if refused := _rights(site, asked):
        return refused_for(site, asked, *refused)
    ticketed = is_ticketed(site, asked)
    if not (ticketed and site.tickets.shown(asked.request)) and (refused := _retries_too_much(site, asked)):
        return refused
    if ticketed:
        return in_its_turn(site, asked, _ruled(site, asked), partial(_unticketed, site))
    return _unticketed(site, asked)


def _unticketed(site: Site, asked: Asked) -> Decided:
    """The answer to one that has no ticket to wait by, or its turn."""
    sent: Dispatch | None = None
    if asked.steps.dispatch and asked.request.hop == 0:
        sent = dispatched(site, asked, without=())
        if sent.reason and not lines_up_at_home(site, asked, sent):
            return refused_for(site, asked, sent.reason, sent.sentence, dispatch=sent, retry_after_s=sent.retry_after_s)
        if sent.site and sent.site != site.name:
            return elsewhere(site, asked, sent)
    ruling: Ruling | None = None
    if asked.steps.admission:
        ruling = _ruled(site, asked)
        if ruling.verdict != "admit":
            return _second_choice(site, asked, ruling.reason) or ruled_out(site, asked, ruling, sent)
    book = book_of(site, asked.policy, asked.pool)
    if not asked.steps.routing:
        if book is None or ruling is None or has_credit(asked, book):
            return stays(site, asked, ruling, sent)
        return _second_choice(site, asked, "all_busy") or lent_out(site, asked, ruling, sent, book)
    if asked.paces:
        return paced(site, asked, ruling, sent)
    here = routed(site, asked, ruling, sent)
    wary = ruling is not None and ruling.waits
    if book is not None and (here.placement is not None or here.decision.reason == "all_busy"):
        here = on_credit(site, asked, ruling, sent, book, here)
    elif here.placement is not None and _waits(site, asked, here.decision.candidates[0], wary=wary):
        return waits(here)
    return _second_choice(site, asked, here.decision.reason) or here


def _waits(site: Site, asked: Asked, chosen: Candidate, *, wary: bool) -> bool:
    """Whether the request is held, now or still: its gateway can, its instance is not open, another goes first, or
    SLOMax is `wary` of it."""
    request, terms, turn = asked.request, asked.policy.tokenpilot.late, asked.turn
    is_open = chosen.wait_s <= site.held.open_s(terms)
    if turn is not None:
        return not turn.overdue and not is_open
    if (
        request.wait_max_s <= 0.0
        or not asked.policy.products.tokenpilot
        or site.held.off(asked.policy.tokenpilot, asked.now_s)
    ):
        return False
    waiting = waiting_of(asked)
    first = site.held.goes_first(request, waiting.work_s, asked.now_s, terms)
    if (first and is_open and not wary) or len(site.held) >= terms.held_max:
        return False
    if not request.dry_run:
        site.held.put(waiting)
    return True


def _rights(site: Site, asked: Asked) -> tuple[Reason, str] | None:
    """Why the request may not run whatever the load: class, model, and this site where it is not FleetMind's to ask."""
    request, steps, policy = asked.request, asked.steps, asked.policy
    if (steps.admission or steps.routing) and (refused := barred(request, asked.classified, policy)):
        return "filtered_by_policy", refused
    if steps.dispatch and not request.hop:
        return None
    refused = residency_refusal(request, site.name, policy, now_wall_s=asked.ids.now_wall_s)
    return ("not_permitted", refused) if refused else None


def _retries_too_much(site: Site, asked: Asked) -> Decided | None:
    """The refusal of a retry that its tenant has no budget for. An attempt counts once, where it arrived."""
    request, policy = asked.request, asked.policy
    if asked.turn is not None or request.hop or not asked.steps.admission or not policy.products.slomax:
        return None
    if asked.standing.keeps:
        return None  # it was told to come again
    entry = entry_of(request.tenant, policy)
    if request.is_retry:
        if site.retries.has_left(entry) if request.dry_run else site.retries.retry(entry):
            return None
        # When fresh requests will have earned one is unknown.
        wait_s = retry_after_s(policy.slomax.retry_after_max_s, policy, asked.rng)
        detail = (
            f"the tenant has used up its retries: it gains {policy.slomax.retry.budget_per_request:g} a fresh request"
        )
        return refused_for(site, asked, "retry_budget", detail, retry_after_s=wait_s)
    if not request.attempt and not request.dry_run:
        site.retries.fresh(entry)
    return None


def _second_choice(site: Site, asked: Asked, reason: Reason) -> Decided | None:
    """Another site when this one has no room now, if the request may still leave."""
    if not asked.steps.dispatch or asked.request.hop or reason != "all_busy" or not asked.policy.products.fleetmind:
        return None
    sent = dispatched(site, asked, without=(site.name,))
    return None if sent.reason else elsewhere(site, asked, sent)


def _ruled(site: Site, asked: Asked) -> Ruling:
    request, policy = asked.request, asked.policy
    model, request_class = request.model, asked.classified.request_class
    terms = policy.site(site.name)
    # Who has its turn was judged when it came, so was who kept its place, and who failed on an instance was let in.
    ran = request.attempt > 0 and site.ledger.heard_of(request.id, request.attempt - 1)
    gated = policy.slomax.gate.enabled and asked.turn is None and not ran and not asked.standing.judged
    return admit(
        request,
        asked.classified,
        asked.pool,
        asked.policy,
        charge=asked.charge,
        queues=asked.paces,
        kept=kept_from(site, asked),
        kept_free=kept_free(site, asked) if asked.pool.columns.usable().any() else "",
        full="" if asked.turn is not None or asked.paces else beyond_class_share(site, asked),
        held_s=site.held.ahead_s(model, request_class, policy.classes) if gated and site.held else 0.0,
        gate=site.gates.of(model) if gated else None,
        rtt_s=0.0 if request.origin == site.name else terms.rtt_s.get(request.origin, terms.rtt_default_s),
        held=0 if asked.turn else site.held.of_class(model, request_class),  # who has its turn took its place before
        output_q50_tokens=asked.output_q50,
        output_q90_tokens=asked.output_q90,
        rng=asked.rng,
    )
