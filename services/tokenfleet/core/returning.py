"""Returning: what the return ticket of a request is worth here, and what a refusal for want of room gives along.

Only where SLOMax is asked. A deferral is such a refusal too; one for right, quota or a name is none. Who is refused for
being late is told to come again only if it could still be in time then.
"""

from msgspec.structs import replace

from tokenfleet.core.asked import Asked, Decided, Steps
from tokenfleet.core.decision import Admission, Request
from tokenfleet.core.policy import Policy
from tokenfleet.core.site import Site, pool_name
from tokenfleet.core.slomax.queues import latest_start_s
from tokenfleet.core.slomax.quota import entry_of
from tokenfleet.core.slomax.retry import retry_after_s
from tokenfleet.core.slomax.returns import Kept, Standing
from tokenfleet.core.tokenpilot.held import Waiting, waiting_of


def standing_of(
    site: Site, request: Request, request_class: str, policy: Policy, *, steps: Steps, now_s: float
) -> Standing:
    """What its ticket is worth to a request that comes now."""
    if not steps.admission or not policy.products.slomax:
        return Standing()
    return site.returns.standing(
        request,
        entry=entry_of(request.tenant, policy),
        request_class=request_class,
        pool=pool_name(request.model, site.name),
        terms=policy.slomax.retry,
        now_s=now_s,
    )


def stood_on(waiting: Waiting, waited_s: float) -> Standing:
    """The standing of one that was held, in its turn."""
    before = waiting.standing
    return replace(before, stood_s=before.stood_s + waited_s, virtual_ns=waiting.joined_ns)


def kept_from(site: Site, asked: Asked) -> Kept:
    """The places that are kept from the request, if it comes new."""
    if asked.standing.keeps or asked.turn is not None:
        return Kept()
    return site.returns.kept(
        asked.request.model, asked.classified.request_class, asked.policy.slomax.retry, asked.now_s
    )


def told_when(site: Site, asked: Asked, decided: Decided) -> Decided:
    """A refusal for want of room with its time by what stands in line, and with a ticket; all else as it is."""
    decision = decided.decision
    admission, wanted = decision.admission, decision.verdict in ("reject", "defer")
    if not wanted or admission is None or not asked.steps.admission or not asked.policy.products.slomax:
        return decided
    if decision.reason not in ("all_busy", "infeasible"):
        return decided
    if decision.reason == "infeasible" and admission.retry_after_s is None:
        return decided  # not for want of room
    waiting = waiting_of(asked)
    admission, wait_s = _timed(site, asked, waiting, admission, deferred=decision.verdict == "defer")
    terms = asked.policy.classes[waiting.request_class]
    if decision.reason == "infeasible" and asked.now_s + wait_s > latest_start_s(waiting, terms):
        return replace(decided, decision=replace(decision, admission=replace(admission, retry_after_s=None)))
    judged = decision.reason == "all_busy"
    ticket = "" if asked.request.dry_run else _ticket(site, asked, waiting, wait_s, judged=judged)
    return replace(decided, decision=replace(decision, admission=admission, return_ticket=ticket))


def _timed(
    site: Site, asked: Asked, waiting: Waiting, admission: Admission, *, deferred: bool
) -> tuple[Admission, float]:
    """When it may come again: when what goes before it has gone, and not before the tables' guess where nothing is
    known of how fast that is."""
    model, request_class = asked.request.model, waiting.request_class
    ahead_s = site.held.ahead_s(model, request_class, asked.policy.classes, came_s=waiting.came_s)
    ahead_s += site.returns.absent_s(model, request_class, came_s=waiting.came_s)
    columns = asked.pool.columns
    running = float(columns.classes[request_class].sum()) if request_class in columns.classes else 0.0
    room_s, drain_rate = site.returns.room_in_s(
        model,
        request_class,
        ahead_s=ahead_s,
        work_s=waiting.work_s,
        running=running + kept_from(site, asked).places,
        instances=int(columns.usable().sum()),
    )
    admission = replace(admission, ahead_s=ahead_s, drain_rate=drain_rate)
    if deferred and admission.not_before_s is not None:
        return admission, admission.not_before_s
    wait_s = retry_after_s(room_s, asked.policy, asked.rng)
    if drain_rate is None:
        wait_s = max(admission.retry_after_s or 0.0, wait_s)
    return replace(admission, retry_after_s=wait_s), wait_s


def _ticket(site: Site, asked: Asked, waiting: Waiting, wait_s: float, *, judged: bool) -> str:
    request, policy = asked.request, asked.policy
    virtual_ns = asked.standing.virtual_ns or 0
    if policy.paces:
        queues = site.queues(request.model)
        virtual_ns = queues.virtual_ns(waiting.request_class, policy, before_ns=asked.standing.virtual_ns)
    return site.returns.give(
        request,
        entry=entry_of(request.tenant, policy),
        request_class=waiting.request_class,
        pool=asked.pool.pool,
        came_s=waiting.came_s,
        virtual_ns=virtual_ns,
        work_s=waiting.work_s,
        wait_s=wait_s,
        judged=judged,
        now_s=asked.now_s,
    )
