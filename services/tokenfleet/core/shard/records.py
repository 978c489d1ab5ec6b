"""Records of topic `tickets`: what holders ask and owners answer, in the order of the log.

`book` is a pool, or a tenant's quota. A record with an `order` is its owner's: `order.cluster` and `order.claim` are
the epoch (where the owner's claim lies), `order.n` counts from 1 within it; it is void behind a later claim. The others
are their holder's and always stand; `n` counts a holder's messages, lease requests and messages about tickets each on
their own, so copies that come late or twice are known by it.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenfleet.core.records import Count, Name, Order, Seconds

BookName = Annotated[str, Meta(min_length=1, max_length=512)]
TicketName = Annotated[str, Meta(min_length=1, max_length=300)]  # of a request's id, 256 at most, and its attempt
TICKETS_A_MESSAGE_MAX = 512  # of the longest names: some 600 KiB
Tickets = Annotated[tuple[TicketName, ...], Meta(max_length=TICKETS_A_MESSAGE_MAX)]


class Holder(Struct, frozen=True, kw_only=True):
    """One life of one replica: `start` is the start count of its spool, as in its placements envelopes."""

    replica: Name
    start: str


class ShardClaim(Struct, frozen=True, kw_only=True, tag="shard_claim"):
    """Written at every assignment of the partition, for all its books: its offset is the epoch of what follows.

    `assignment` counts those of this owner, so that it knows its own claim when it reads it.
    """

    owner: Holder
    assignment: Count


class LeaseRequest(Struct, frozen=True, kw_only=True, tag="lease_request"):
    """A holder's request number `n` for `wants` units. It settles the holder's leases that answer numbers < n.

    Of these it keeps the one that answers `keeps` (0: none), of which `rest` units are unspent; it will never spend
    from the others. All that it spent before lies in placements envelopes up to number `envelopes`: once the owner has
    read that, the rest of what is not kept is free. `spent` is the net sum of the holder's life (quotas).
    """

    book: BookName
    holder: Holder
    n: Count
    wants: Count
    keeps: Count = 0
    rest: Count = 0
    envelopes: Count = 0
    spent: int = 0


class Lease(Struct, frozen=True, kw_only=True, tag="lease"):
    """`units` that `holder` may spend for 5 s from when it sent request `n`; 0 units say that there are none."""

    book: BookName
    order: Order
    holder: Holder
    n: Count
    units: Count


class TicketAsk(Struct, frozen=True, kw_only=True, tag="ticket_ask"):
    """A request that wants to wait: `units` is its demand, `work_s` its predicted GPU-seconds over its tenant's weight.

    `rank` orders classes, least first. `left_s` is how long the caller would wait. It has stood in line for `stood_s`
    before, by a return ticket.
    """

    book: BookName
    holder: Holder
    n: Count
    ticket: TicketName
    tenant: str
    request_class: Name
    rank: int
    units: Count
    work_s: Seconds
    left_s: Seconds
    stood_s: Seconds = 0.0


class Ticket(Struct, frozen=True, kw_only=True, tag="ticket"):
    """A place in the line: the owner's answer to an ask or a shown token. `ahead` are the tickets before it."""

    book: BookName
    order: Order
    holder: Holder
    n: Count
    ticket: TicketName
    tenant: str
    request_class: Name
    rank: int
    units: Count
    work_s: Seconds
    virtual_start: float
    token: str
    ahead: Count = 0


class Keepalive(Struct, frozen=True, kw_only=True, tag="keepalive"):
    """These tickets still wait at their gateway."""

    book: BookName
    holder: Holder
    n: Count
    tickets: Tickets


class TokenShown(Struct, frozen=True, kw_only=True, tag="token_shown"):
    """A ticket's token comes back: to a new owner, or through another gateway."""

    book: BookName
    holder: Holder
    n: Count
    token: Annotated[str, Meta(max_length=4096)]
    left_s: Seconds


class TicketsWithdrawn(Struct, frozen=True, kw_only=True, tag="tickets_withdrawn"):
    """The callers of these tickets left; grants that they had are not used and never will be."""

    book: BookName
    holder: Holder
    n: Count
    tickets: Tickets


class Grant(Struct, frozen=True, kw_only=True, tag="grant"):
    """The ticket may go: `holder` may use it for 2 s from when it sent its message `cites`.

    `grant` names it: the order of its first record. A later record of the same grant has another `order`.
    """

    book: BookName
    order: Order
    grant: Order
    ticket: TicketName
    holder: Holder
    cites: Count
    units: Count


class GrantUnused(Struct, frozen=True, kw_only=True, tag="grant_unused"):
    """The gateway did not use the grant and never will: the ticket goes back to the head."""

    book: BookName
    holder: Holder
    n: Count
    ticket: TicketName
    grant: Order


EndReason = Literal["used", "unheard", "withdrawn", "too_large", "line_full", "unknown"]


class TicketEnded(Struct, frozen=True, kw_only=True, tag="ticket_ended"):
    """The ticket is no more; `unknown`: its owner lost it, and rebuilds it when its holder shows the token."""

    book: BookName
    order: Order
    holder: Holder
    ticket: TicketName
    why: EndReason


Asked = LeaseRequest | TicketAsk | Keepalive | TokenShown | TicketsWithdrawn | GrantUnused
Answer = Lease | Ticket | Grant | TicketEnded
Record = ShardClaim | Asked | Answer


class At(Struct, frozen=True, kw_only=True):
    """Where a record lies: the id of the Kafka cluster and the offset in its partition."""

    cluster: str
    offset: int


def pool_book(pool: str) -> str:
    """The book of a pool."""
    return f"pool {pool}"


def quota_book(tenant: str) -> str:
    """The book of the requests a minute of a tenant, by its entry in the policy."""
    return f"tenant {tenant}"


def ticket_of(request: str, attempt: int) -> str:
    """The ticket of one attempt of a logical request: what placements say of the attempt settles it."""
    return f"{request}#{attempt}"


def call_of(ticket: str) -> tuple[str, int]:
    """The request and attempt of a ticket's name; attempt -1 for one that is not of that form."""
    request, _, attempt = ticket.rpartition("#")
    return request, int(attempt) if attempt.isascii() and attempt.isdigit() else -1
