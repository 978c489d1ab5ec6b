"""Ticketed: what becomes of batch work with a far deadline: it waits by a ticket in PostgreSQL, and goes as any other
request once that is granted.

The ticket waits at the site that was asked, for the pool there, and so does not go elsewhere in its turn. While no
ticket is taken in (PostgreSQL is away, the spool is full) batch work is answered as if there were none.
"""

from collections.abc import Callable

from msgspec.structs import replace

from tokenfleet.core.answers import deferred, ruled_out
from tokenfleet.core.asked import Asked, Decided, Steps
from tokenfleet.core.decision import BatchTicket, Decision, Request
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.admit import Ruling
from tokenfleet.core.slomax.grants import seats_of
from tokenfleet.core.slomax.queues import output_price_s
from tokenfleet.core.slomax.tickets import HandedIn, Standing, Used
from tokenfleet.core.tokenpilot.held import waiting_of

BATCH = "batch"  # the class whose requests have tickets
SPREAD = 0.2  # those who were deferred together come back apart
POLL_SHARE = 0.5  # of the likely wait, until one comes again: the nearer its turn, the surer it is known


def is_ticketed(site: Site, asked: Asked) -> bool:
    """Whether the request waits by a ticket, or has its turn by one."""
    policy, request = asked.policy, asked.request
    terms = policy.slomax.batch
    if not terms.enabled or not policy.products.slomax or not asked.steps.admission or asked.turn is not None:
        return False
    if asked.classified.request_class != BATCH or request.wait_max_s > 0.0 or not len(asked.pool):
        return False
    left_s = _left_s(asked)
    if left_s is None or site.tickets.closed:
        return False
    return left_s >= terms.deadline_min_s or site.tickets.shown(request) or site.tickets.granted(request)


def lacks_ticket(site: Site, request: Request, steps: Steps, decision: Decision) -> bool:
    """Whether a batch request was answered without a ticket only because none is taken in."""
    wanted = site.policy.slomax.batch.enabled and steps.admission and request.wait_max_s <= 0.0
    return wanted and bool(site.tickets.closed) and decision.request_class == BATCH


def in_its_turn(site: Site, asked: Asked, ruling: Ruling, run: Callable[[Asked], Decided]) -> Decided:
    """What `run` says once the ticket is granted, unless there is no room just now: the grant stays, and it comes again
    soon. Before that it is deferred; refused is what could not be served in its turn either."""
    if site.tickets.granted(asked.request):
        here = run(replace(asked, steps=replace(asked.steps, dispatch=False)))
        if here.decision.reason != "all_busy" or here.decision.admission is None:
            return here
        ticket = BatchTicket(token=_token(site, asked), window_s=asked.policy.slomax.batch.grant_s, granted=True)
        admission = replace(here.decision.admission, not_before_s=_spread(asked, asked.policy.slomax.batch.poll_min_s))
        return deferred(site, asked, admission, ticket, f"it is granted and waits for room: {here.decision.detail}")
    if ruling.verdict == "reject" and ruling.reason != "all_busy":
        return ruled_out(site, asked, ruling, None)
    return _waits(site, asked, ruling)


def by_its_ticket(site: Site, request: Request, decided: Decided) -> Decided:
    """`decided`, with the word that the request's ticket was used if it is placed."""
    if decided.placement is None or not (site.tickets.granted(request) or site.tickets.shown(request)):
        return decided
    site.tickets.used(request)
    used = Used(tenant=request.tenant, request=request.id, attempt=request.attempt, decision=decided.decision.id)
    return replace(decided, ticket=used)


def _waits(site: Site, asked: Asked, ruling: Ruling) -> Decided:
    request, terms = asked.request, asked.policy.slomax.batch
    left_s, gpu_s = _left_s(asked), _gpu_s(asked)
    assert left_s is not None
    rate_max = float(max(seats_of(asked.pool, asked.policy.classes[BATCH]), 1))
    standing = site.tickets.standing(request.model, left_s=left_s, gpu_s=gpu_s, rate_max=rate_max)
    wait_s = min(max(POLL_SHARE * standing.wait_s, terms.poll_min_s), terms.poll_max_s)
    ticket = BatchTicket(
        token=_token(site, asked),
        window_s=terms.grant_s,
        ahead_s=standing.ahead_s,
        end_s=standing.end_s,
        will_miss=standing.will_miss,
    )
    admission = replace(ruling.admission, not_before_s=_spread(asked, wait_s), retry_after_s=None)
    here = deferred(site, asked, admission, ticket, _words(standing, left_s))
    if request.dry_run or site.tickets.shown(request):
        return here
    site.tickets.backlog(request.model).add(left_s, gpu_s)
    row = HandedIn(
        tenant=request.tenant,
        request=request.id,
        attempt=request.attempt,
        site=site.name,
        model=request.model,
        kv_tokens=asked.kv_tokens,
        gpu_s=gpu_s,
        left_s=left_s,
        at_wall_s=asked.ids.now_wall_s,
    )
    return replace(here, ticket=row)


def _words(standing: Standing, left_s: float) -> str:
    told = f"{standing.ahead_s:,.0f} GPU seconds of batch work go first"
    if not standing.will_miss:
        return f"{told}, its turn is likely in {standing.wait_s:,.0f} s"
    return f"{told}; it will miss its deadline in {left_s:,.0f} s, its end is likely in {standing.end_s:,.0f} s"


def _token(site: Site, asked: Asked) -> str:
    return "" if asked.request.dry_run else site.tickets.token(asked.request)


def _left_s(asked: Asked) -> float | None:
    """Until its deadline, None without one."""
    request = asked.request
    deadline_s = request.deadline_s if request.deadline_s is not None else asked.policy.classes[BATCH].deadline_s
    return None if deadline_s is None else deadline_s - request.elapsed_s


def _gpu_s(asked: Asked) -> float:
    """The GPU seconds that it is predicted to take: its prefill, and its part of the iterations that decode it."""
    waiting = waiting_of(asked)
    return waiting.work_s + waiting.output_tokens * output_price_s(asked.pool)


def _spread(asked: Asked, seconds: float) -> float:
    return seconds * (1.0 + SPREAD * asked.rng.uniform(-1.0, 1.0))
