"""Credit: what a placement takes of its pool's book where the site's replicas share one, and who waits for it.

The call that places spends: `Schedule` does or waits, `Admit` looks whether there is any, `Route` alone takes what
there is and goes on without, since nobody was asked whether it may. A request that waits has a ticket at the book's
owner, goes when it is granted, and is decided on the tables of then. Where classes have queues there are no tickets:
who has its turn and finds no credit keeps its place until some is lent (core/paced.py).
"""

from collections.abc import Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.answers import busy, ruled_out, waits
from tokenfleet.core.asked import Asked, Decided, Turn
from tokenfleet.core.columns import READY, Flags
from tokenfleet.core.fleetmind.dispatch import Dispatch
from tokenfleet.core.policy import Policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.shard.purse import Purse
from tokenfleet.core.shard.records import pool_book, ticket_of
from tokenfleet.core.site import Site, pool_name
from tokenfleet.core.slomax.admit import Ruling
from tokenfleet.core.slomax.queues import output_price_s
from tokenfleet.core.slomax.quota import Charge, entry_of
from tokenfleet.core.tokenpilot.held import Waiting, waiting_of


class Claimed(Struct, frozen=True, kw_only=True):
    """The book that rules a pool, and this replica's part of it."""

    purse: Purse
    book: str


def book_name(model: str, site: str) -> str:
    """The name of the book of a model's pool."""
    return pool_book(pool_name(model, site))


def book_of(site: Site, policy: Policy, pool: PoolView) -> Claimed | None:
    """The book that rules the pool; None where there is none, or nobody knows how much KV the pool has."""
    purse = site.purse
    if purse is None or not policy.products.slomax or pool.columns.fixed.least_kv_total == np.inf:
        return None
    book = pool_book(pool.pool)
    return Claimed(purse=purse, book=book) if purse.rules(book) else None


def limit_of(pool: PoolView, policy: Policy) -> int:
    """KV tokens that the pool's book holds: the ceiling's part of its ready instances'.

    One whose size is unknown counts as the mean of the others.
    """
    sizes = pool.columns.fixed.kv_total[ready(pool)]
    told = sizes[~np.isnan(sizes)]
    ceiling = policy.slomax.controller.setting(pool.pool).ceiling
    return int(ceiling * float(told.mean()) * len(sizes)) if len(told) else 0


def ready(pool: PoolView) -> Flags:
    """The instances whose KV and placements the pool's book counts."""
    return pool.columns.fixed.availability == READY


def has_credit(asked: Asked, claimed: Claimed) -> bool:
    """Whether the request could be placed now."""
    return claimed.purse.rest(claimed.book, asked.now_s) >= asked.kv_tokens


def on_credit(
    site: Site, asked: Asked, ruling: Ruling | None, sent: Dispatch | None, claimed: Claimed, here: Decided
) -> Decided:
    """`here` with what its placement takes. Without credit, or an instance that has room, it waits in the line of the
    book's owner, or is refused."""
    if here.placement is not None and (answer := paid(asked, claimed, here)) is not None:
        return answer
    if ruling is None:
        return here
    if not _may_wait(site, asked, claimed):
        return here if here.placement is None else lent_out(site, asked, ruling, sent, claimed)
    if not asked.request.dry_run:
        waiting = waiting_of(asked)
        if asked.turn is None:
            site.held.put(waiting)
        if not has_ticket(site, waiting):
            _lines_up(asked, claimed, waiting)
    return waits(here, f"{asked.kv_tokens:,} KV tokens of the pool are wanted, and its owner has a line")


def lines_up_at_home(site: Site, asked: Asked, sent: Dispatch) -> bool:
    """Whether a request that no site has room for waits for it here: in a line, where home was refused for load."""
    home = next((option for option in sent.options if option.site == site.name), None)
    if sent.reason != "all_busy" or home is None or home.wait_s is None or not asked.steps.routing:
        return False
    if asked.paces:
        return True
    book = book_of(site, asked.policy, asked.pool)
    return book is not None and _may_wait(site, asked, book)


def lent_out(site: Site, asked: Asked, ruling: Ruling, sent: Dispatch | None, claimed: Claimed) -> Decided:
    """Refused for want of credit."""
    wanted, limit = asked.kv_tokens, limit_of(asked.pool, asked.policy)
    if wanted > limit:
        detail = f"{wanted:,} KV tokens wanted, the pool may hold {limit:,} in all"
        return ruled_out(site, asked, replace(ruling, verdict="reject", reason="infeasible", detail=detail), sent)
    rest = claimed.purse.rest(claimed.book, asked.now_s)
    why = f"{wanted:,} KV tokens of the pool wanted, {rest:,} are lent to this replica"
    return busy(site, asked, ruling, sent, why)


def granted_turns(site: Site, model: str, now_s: float) -> Iterator[tuple[Waiting, Turn]]:
    """The held requests of a pool that a book rules, whose turn it is: those with a grant, those that nobody keeps in
    line any more, and those that can wait no longer. Between two the caller tells of the one that is `gone`."""
    purse, book = site.purse, book_name(model, site.name)
    assert purse is not None
    ended = purse.ended(book)
    for waiting in tuple(site.held.of(model)):
        ticket = ticket_of(*waiting.call)
        if (grant := purse.granted(book, ticket, now_s=now_s)) is not None:
            yield waiting, Turn(overdue=False, granted=grant)
            continue
        overdue = ticket in ended or now_s - waiting.since_s >= waiting.request.wait_max_s
        if overdue:
            purse.withdraw(book, ticket, now_s=now_s)
        if overdue or not purse.waits(book, ticket):
            yield waiting, Turn(overdue=overdue)


def has_ticket(site: Site, waiting: Waiting) -> bool:
    """Whether an owner has the held request in its line."""
    book = book_name(waiting.request.model, site.name)
    return site.purse is not None and site.purse.waits(book, ticket_of(*waiting.call))


def gone(site: Site, waiting: Waiting, now_s: float, *, placed: bool = False) -> None:
    """The held request waits no longer: its grant is used if it was `placed`, else its ticket is given back."""
    if site.purse is None:
        return
    book, ticket = book_name(waiting.request.model, site.name), ticket_of(*waiting.call)
    if not placed or site.purse.use(book, ticket, now_s=now_s) is None:
        site.purse.withdraw(book, ticket, now_s=now_s)


def give_back(site: Site, charge: Charge, now_s: float) -> None:
    """The request that took it from its tenant's quota is not admitted; once a charge."""
    site.quotas.refund(charge)
    if site.purse is not None:
        for book, credit in charge.credits:
            site.purse.refund(book, credit, now_s=now_s)


def paid(asked: Asked, claimed: Claimed, here: Decided) -> Decided | None:
    """None where there is no credit for it."""
    purse, turn = claimed.purse, asked.turn
    if turn is not None and turn.granted is not None:
        return here
    if asked.request.dry_run:
        return here if has_credit(asked, claimed) else None
    credit = purse.spend(claimed.book, asked.kv_tokens, now_s=asked.now_s)
    if credit is None:
        return None
    purse.placed(here.decision.id, claimed.book, credit)
    if not credit.degraded:
        return here
    sentence = f"{here.decision.sentence}; no owner of the pool's book is heard, this is of the last lease"
    return replace(here, decision=replace(here.decision, mode="degraded", sentence=sentence))


def _may_wait(site: Site, asked: Asked, claimed: Claimed) -> bool:
    """Whether its owner would take the request in, and its gateway hold it. Without an owner nobody queues."""
    if asked.turn is not None:
        return not asked.turn.overdue
    room = len(site.held) < asked.policy.tokenpilot.late.held_max
    heard = claimed.purse.state(claimed.book, asked.now_s) == "live"
    fits = asked.kv_tokens <= limit_of(asked.pool, asked.policy)
    return asked.request.wait_max_s > 0.0 and room and heard and fits


def _lines_up(asked: Asked, claimed: Claimed, waiting: Waiting) -> None:
    """The request waits for its turn from now on."""
    request, policy = waiting.request, asked.policy
    output_s = waiting.output_tokens * output_price_s(asked.pool)
    asks = claimed.purse.line(claimed.book).ask(
        ticket_of(request.id, request.attempt),
        tenant=entry_of(request.tenant, policy),
        request_class=waiting.request_class,
        rank=policy.classes[waiting.request_class].rank,
        units=asked.kv_tokens,
        work_s=(waiting.work_s + output_s) / policy.tenant(request.tenant).weight,
        left_s=request.wait_max_s,
        now_s=asked.now_s,
        stood_s=asked.standing.stood_s,
    )
    claimed.purse.append(claimed.book, asks)
