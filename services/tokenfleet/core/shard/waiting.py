"""Waiting: the tickets that one gateway's side holds, from the ask to the grant's use.

A grant is good for 2 s from when the message that it cites was sent, is used at most once, and goes back by word: what
came too late or found no instance is declined, and a grant that was declined is never used. Words are repeated until
they are read in the log.
"""

from collections import OrderedDict
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.records import Order
from tokenfleet.core.shard.fence import Fence
from tokenfleet.core.shard.records import (
    TICKETS_A_MESSAGE_MAX,
    Asked,
    At,
    EndReason,
    Grant,
    GrantUnused,
    Holder,
    Keepalive,
    Record,
    ShardClaim,
    Ticket,
    TicketAsk,
    TicketEnded,
    TicketsWithdrawn,
    TokenShown,
)
from tokenfleet.core.shard.terms import EARLY_S, GRANT_TTL_S, KEEPALIVE_EVERY_S, WRITE_AGAIN_S

DONE_MAX = 100_000  # grants that were used or declined: their late copies say nothing


class Held(Struct, kw_only=True, eq=False):
    """One ticket: what asked for it last, and the grant in hand.

    `unanswered_s` is when it was asked or shown without an answer yet, None after it. `left_until_s` is when its caller
    gives up.
    """

    asks: TicketAsk | TokenShown
    left_until_s: float
    unanswered_s: float | None
    token: str = ""
    ahead: int = 0
    grant: Grant | None = None


class Waiting:
    """One holder's tickets of one book. Append what `ask`, `show`, `withdraw` and `turn` return."""

    def __init__(self, book: str, me: Holder) -> None:
        self.book, self.me = book, me
        self._fence = Fence()
        self._tickets: dict[str, Held] = {}
        self._used: dict[str, Held] = {}  # until their end is heard: a use may still turn out to be none
        self._done: OrderedDict[Order, None] = OrderedDict()
        self._words: dict[GrantUnused | TicketsWithdrawn, float] = {}  # not read in the log yet; when last written
        self._sent_s: OrderedDict[int, float] = OrderedDict()
        self._ended: list[tuple[str, EndReason]] = []
        self._n = 0
        self._kept_s = float("-inf")

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, ticket: str) -> bool:
        return ticket in self._tickets

    def ask(
        self,
        ticket: str,
        *,
        tenant: str,
        request_class: str,
        rank: int,
        units: int,
        work_s: float,
        left_s: float,
        now_s: float,
        stood_s: float = 0.0,
    ) -> TicketAsk:
        """A request begins to wait for at most `left_s`, and has stood in line for `stood_s` before."""
        asks = TicketAsk(
            book=self.book,
            holder=self.me,
            n=self._number(now_s),
            ticket=ticket,
            tenant=tenant,
            request_class=request_class,
            rank=rank,
            units=units,
            work_s=work_s,
            left_s=left_s,
            stood_s=stood_s,
        )
        self._tickets[ticket] = Held(asks=asks, left_until_s=now_s + left_s, unanswered_s=now_s)
        return asks

    def show(self, ticket: str, token: str, *, left_s: float, now_s: float) -> TokenShown:
        """A caller came back with the token of a ticket."""
        shown = TokenShown(book=self.book, holder=self.me, n=self._number(now_s), token=token, left_s=left_s)
        held = Held(asks=shown, left_until_s=now_s + left_s, unanswered_s=now_s, token=token)
        if (known := self._tickets.get(ticket)) is not None:
            held.grant = known.grant
        self._tickets[ticket] = held
        return shown

    def withdraw(self, ticket: str, now_s: float) -> TicketsWithdrawn | None:
        """The caller left; None for a ticket that does not wait."""
        if (held := self._tickets.pop(ticket, None)) is None:
            return None
        if held.grant is not None:
            self._finish(held.grant.grant)
        word = TicketsWithdrawn(book=self.book, holder=self.me, n=self._number(now_s), tickets=(ticket,))
        self._words[word] = now_s
        return word

    def token(self, ticket: str) -> str:
        """What the caller may come back with; empty before the owner has answered."""
        return held.token if (held := self._tickets.get(ticket)) else ""

    def ahead(self, ticket: str) -> int:
        """How many were before it when it was taken in."""
        return held.ahead if (held := self._tickets.get(ticket)) else 0

    def ended(self) -> list[tuple[str, EndReason]]:
        """Tickets that their owner ended since the last call, and why; those that were used are not told."""
        ended, self._ended = self._ended, []
        return ended

    def granted(self, now_s: float) -> list[str]:
        """Tickets that may be used now."""
        return [name for name, held in self._tickets.items() if held.grant and now_s < self._until_s(held.grant)]

    def grant(self, ticket: str, now_s: float) -> Grant | None:
        """The ticket's grant, while it is good."""
        held = self._tickets.get(ticket)
        if held is None or held.grant is None or now_s >= self._until_s(held.grant):
            return None
        return held.grant

    def use(self, ticket: str, now_s: float) -> Grant | None:
        """The ticket's grant, at most once and only while it is good: now place its request."""
        if (grant := self.grant(ticket, now_s)) is not None:
            self._finish(grant.grant)
            self._used[ticket] = self._tickets.pop(ticket)
        return grant

    def unused(self, grant: Grant, now_s: float) -> GrantUnused | None:
        """After `use`: no placement was written. The ticket waits on, at the head."""
        if (held := self._used.pop(grant.ticket, None)) is None:
            return None
        self._tickets[grant.ticket] = held
        return self._decline(held, grant, now_s)

    def turn(self, now_s: float) -> tuple[Asked, ...]:
        """What to append now: late grants go back, what has no answer yet again, and keepalives each second."""
        out: list[Asked] = []
        for word, written_s in self._words.items():
            if now_s - written_s > WRITE_AGAIN_S:
                self._words[word] = now_s
                out.append(word)
        for held in self._tickets.values():
            if held.grant is not None and now_s >= self._until_s(held.grant):
                out.append(self._decline(held, held.grant, now_s))
            if held.unanswered_s is not None and now_s - held.unanswered_s >= WRITE_AGAIN_S:
                held.unanswered_s = now_s
                held.asks = self._again(held, now_s)
                out.append(held.asks)
        if now_s - self._kept_s >= KEEPALIVE_EVERY_S:
            self._kept_s = now_s
            out += self._keepalives([name for name, held in self._tickets.items() if held.unanswered_s is None], now_s)
        return tuple(out)

    def read(self, record: Record, at: At, *, now_s: float) -> None:
        """The next record of the book's partition."""
        stands = self._fence.read(record, at)
        if isinstance(record, ShardClaim) or not stands or record.book != self.book:
            return
        if isinstance(record, GrantUnused | TicketsWithdrawn):
            self._words.pop(record, None)
        elif isinstance(record, Ticket):
            if (held := self._tickets.get(record.ticket)) is not None and record.holder == self.me:
                held.token, held.ahead, held.unanswered_s = record.token, record.ahead, None
        elif isinstance(record, Grant):
            self._granted(record, now_s)
        elif isinstance(record, TicketEnded) and record.why == "unknown":
            if (held := self._tickets.get(record.ticket)) is not None and record.holder == self.me:
                held.unanswered_s = float("-inf")
        elif isinstance(record, TicketEnded):
            self._used.pop(record.ticket, None)
            if self._tickets.pop(record.ticket, None) is not None:
                self._ended.append((record.ticket, record.why))

    def _granted(self, grant: Grant, now_s: float) -> None:
        held = self._tickets.get(grant.ticket)
        if grant.holder != self.me:
            if held is not None:
                held.unanswered_s = None  # it is out to another gateway, whose word is waited for
        elif grant.grant in self._done:
            return
        elif held is None:
            self._finish(grant.grant)
            word = self._word(grant, now_s)
            self._words[word] = float("-inf")
        else:
            newer = held.grant is None or grant.cites >= held.grant.cites
            held.grant, held.unanswered_s = grant if newer else held.grant, None

    def _decline(self, held: Held, grant: Grant, now_s: float) -> GrantUnused:
        held.grant = None
        self._finish(grant.grant)
        word = self._word(grant, now_s)
        self._words[word] = now_s
        return word

    def _word(self, grant: Grant, now_s: float) -> GrantUnused:
        return GrantUnused(
            book=self.book, holder=self.me, n=self._number(now_s), ticket=grant.ticket, grant=grant.grant
        )

    def _again(self, held: Held, now_s: float) -> TicketAsk | TokenShown:
        left_s = max(0.0, held.left_until_s - now_s)
        if held.token:
            n = self._number(now_s)
            return TokenShown(book=self.book, holder=self.me, n=n, token=held.token, left_s=left_s)
        return replace(held.asks, n=self._number(now_s), left_s=left_s)

    def _keepalives(self, names: list[str], now_s: float) -> Iterable[Keepalive]:
        for first in range(0, len(names), TICKETS_A_MESSAGE_MAX):
            tickets = tuple(names[first : first + TICKETS_A_MESSAGE_MAX])
            yield Keepalive(book=self.book, holder=self.me, n=self._number(now_s), tickets=tickets)

    def _number(self, now_s: float) -> int:
        while self._sent_s and now_s - next(iter(self._sent_s.values())) > GRANT_TTL_S:
            self._sent_s.popitem(last=False)
        self._n += 1
        self._sent_s[self._n] = now_s
        return self._n

    def _until_s(self, grant: Grant) -> float:
        return self._sent_s.get(grant.cites, float("-inf")) + GRANT_TTL_S - EARLY_S

    def _finish(self, grant: Order) -> None:
        self._done[grant] = None
        if len(self._done) > DONE_MAX:
            self._done.popitem(last=False)
