"""Paced: what becomes of a request where SLOMax queues classes apart: it goes at once, in its turn, or waits.

What an instance has no room for waits too: only who can't be served at all is refused on arrival.
"""

from msgspec.structs import replace

from tokenfleet.core.answers import busy, refused_for, routed, stays, waits
from tokenfleet.core.asked import Asked, Decided, Turn
from tokenfleet.core.class_room import beyond_class_share
from tokenfleet.core.credit import book_of, has_credit, lent_out, limit_of, paid
from tokenfleet.core.decision import Place
from tokenfleet.core.fleetmind.dispatch import Dispatch
from tokenfleet.core.returning import kept_from
from tokenfleet.core.shard.records import ticket_of
from tokenfleet.core.site import Site
from tokenfleet.core.slomax.admit import Ruling
from tokenfleet.core.tokenpilot.explain import ms
from tokenfleet.core.tokenpilot.held import Call, Waiting, waiting_of


def paced(site: Site, asked: Asked, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
    """Where a request goes whose turn it is; else it waits in its class's queue, with where it would go now."""
    if asked.turn is not None:
        return _in_turn(site, asked, asked.turn, ruling, sent)
    waiting, queues = waiting_of(asked), site.queues(asked.request.model)
    wary = ruling is not None and ruling.waits
    turn = None if wary else queues.at_once(waiting, asked.pool, asked.policy, asked.now_s)
    if turn is None:
        here = routed(site, asked, ruling, sent)
    else:
        here = _in_turn(site, replace(asked, turn=turn), turn, ruling, sent)
        if here.placement is not None and not asked.request.dry_run:
            queues.went(waiting, here.decision.id, asked.pool, asked.policy, asked.now_s)
        if here.decision.verdict != "queue":
            return here
    if here.decision.verdict == "reject" and here.decision.reason != "all_busy":
        return here
    return _lines_up(site, asked, waiting, here, ruling, sent)


def stays_in_line(site: Site, model: str, now_s: float) -> bool:
    """Whether a replica that ends leaves what it holds of the model to others: they share one book, so it can't place
    it all without credit, and each of them has a line where it can wait on."""
    policy = site.policy_of(model)
    return policy.paces and book_of(site, policy, site.pool(model, now_s, policy=policy)) is not None


def standing(site: Site, model: str, call: Call, now_s: float) -> Place | None:
    """Where a held request of the model stands in the queue of its class by now, None if it is in none."""
    return site.queues(model).place(call, site.policy_of(model), now_s)


def _in_turn(site: Site, asked: Asked, turn: Turn, ruling: Ruling | None, sent: Dispatch | None) -> Decided:
    """Placed or refused; verdict `queue` where no instance that is open to it has room."""
    if turn.late:
        waited = f"it waited {asked.request.elapsed_s:.1f} s and can't have its first token in time any more"
        return refused_for(site, asked, "infeasible", waited)
    if turn.busy:
        return busy(site, asked, ruling, sent, f"it waited {asked.request.elapsed_s:.1f} s, and nothing is open to it")
    book = None if ruling is None else book_of(site, asked.policy, asked.pool)  # None: nobody was asked whether it may
    if book is not None and not turn.overdue and not has_credit(asked, book):
        if not asked.request.dry_run:
            book.purse.lacks(book.book, ticket_of(asked.request.id, asked.request.attempt), asked.kv_tokens)
        short = waits(stays(site, asked, ruling, sent), f"{asked.kv_tokens:,} KV tokens of the pool are wanted")
        return replace(short, short=True)
    if not turn.overdue and (full := beyond_class_share(site, asked)):
        return replace(waits(stays(site, asked, ruling, sent), full), short=True)
    here = routed(site, asked, ruling, sent)
    if here.decision.reason == "all_busy" and not turn.overdue:
        return waits(here, "no instance has room")
    if book is None or ruling is None or here.placement is None:
        return here
    return paid(asked, book, here) or lent_out(site, asked, ruling, sent, book)


def _lines_up(
    site: Site, asked: Asked, waiting: Waiting, here: Decided, ruling: Ruling | None, sent: Dispatch | None
) -> Decided:
    queues, policy = site.queues(asked.request.model), asked.policy
    book = book_of(site, policy, asked.pool)
    if book is not None and ruling is not None and asked.kv_tokens > limit_of(asked.pool, policy):
        return lent_out(site, asked, ruling, sent, book)
    kept = kept_from(site, asked).places
    if queues.full(asked.request.tenant, policy, kept=kept):
        full = f"{len(queues):,} requests wait for the pool already"
        if kept:
            full += f", {kept:,} places are kept for those who were told to come again"
        return busy(site, asked, ruling, sent, full)
    if asked.request.dry_run:
        return waits(here, f"{asked.classified.request_class} requests wait for an instance that is open to them")
    site.held.put(waiting)
    place = queues.put(waiting, policy, asked.now_s)
    held = waits(here, words(place, asked.classified.request_class))
    return replace(held, decision=replace(held.decision, place=place))


def words(place: Place, request_class: str) -> str:
    """A place in line, as people read it."""
    told = f"number {place.position} of the {request_class} requests that wait"
    if place.wait_p50_s is None or place.wait_p90_s is None:
        return told
    return f"{told}, for about {ms(place.wait_p50_s)}, hardly over {ms(place.wait_p90_s)}"
