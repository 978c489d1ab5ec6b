"""Tickets: the batch work with a far deadline that waits in PostgreSQL, as one replica knows of it.

No ticket that waits is in memory. What is known of them all is how many GPU seconds wait by deadline (`Backlog`) and
how many end a second (`DrainRate`); by name only the few are known that are granted and not used yet.
"""

import hmac
import math
from base64 import urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from tokenfleet.core.decision import Request

Key = tuple[str, str, int]
"""Tenant, request and attempt."""

BUCKETS: Final = 256
BUCKET_RATIO: Final = 1.1  # each bucket's deadlines are up to a tenth further away than the last one's; 1.1²⁵⁵ s: ever
TOKEN_BYTES: Final = 16  # of the HMAC; the token names nothing that the request doesn't, it says that it was handed in


class HandedIn(Struct, frozen=True, kw_only=True, tag="handed_in"):
    """A ticket on its way to its row: its demand in KV tokens and predicted GPU seconds, and the time to its deadline
    when the host's own clock said `at_wall_s`."""

    tenant: str
    request: str
    attempt: int
    site: str
    model: str
    kv_tokens: int
    gpu_s: float
    left_s: float
    at_wall_s: float


class Used(Struct, frozen=True, kw_only=True, tag="used"):
    """The ticket's request was placed, by that decision."""

    tenant: str
    request: str
    attempt: int
    decision: str


class Ended(Struct, frozen=True, kw_only=True, tag="ended"):
    """The ticket's request has ended, placed or not: `how` is the kind of its outcome."""

    tenant: str
    request: str
    attempt: int
    how: str


TicketEvent = HandedIn | Used | Ended


class Backlog:
    """The GPU seconds that wait for one pool, by the time left to their deadlines."""

    def __init__(self, seconds: Mapping[int, float] | None = None, *, tickets: int = 0) -> None:
        """`seconds` by number of bucket; see `bucket_of`."""
        self.tickets = tickets
        self._seconds = [0.0] * BUCKETS
        for bucket, its in (seconds or {}).items():
            self._seconds[bucket] += its

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self._seconds)

    def ahead_s(self, left_s: float) -> float:
        """GPU seconds whose deadline is no later, or so little that nobody knows which goes first."""
        return sum(self._seconds[: bucket_of(left_s) + 1])

    def add(self, left_s: float, seconds: float) -> None:
        """One more waits."""
        self.tickets += 1
        self._seconds[bucket_of(left_s)] += seconds


def bucket_of(left_s: float) -> int:
    """The bucket of a deadline that is so far away; adapters.batch_store has the same in SQL."""
    return min(BUCKETS - 1, math.ceil(math.log(max(left_s, 1.0)) / math.log(BUCKET_RATIO)))


class DrainRate:
    """The GPU seconds of batch work that end a second, measured while some waited all the time: else an idle pool
    would pass for a slow one."""

    def __init__(self) -> None:
        self.per_s: float | None = None
        self._waits_since_s: float | None = None

    def heard(self, done_s: float, *, window_s: float, waits: bool, now_s: float) -> None:
        """`done_s` GPU seconds ended in the last `window_s`; `waits`: something waits now."""
        if not waits:
            self._waits_since_s = None
        elif self._waits_since_s is None:
            self._waits_since_s = now_s
        elif now_s - self._waits_since_s >= window_s:
            self.per_s = done_s / window_s


class Standing(NamedTuple):
    """Where a ticket stands: GPU seconds that go before it, how long it is likely to wait and when it would end, from
    now on; `will_miss`: that is past its deadline."""

    ahead_s: float
    wait_s: float
    end_s: float
    will_miss: bool


class Tickets:
    """What one replica knows of its site's tickets, told by adapters.batch_tickets.

    `closed` says why none is taken in now, in a word; empty: they are. `secret` signs tokens.
    """

    def __init__(self) -> None:
        self.closed = "off"
        self.secret = b""
        self._backlogs: dict[str, Backlog] = {}
        self._rates: dict[str, DrainRate] = {}
        self._granted: frozenset[Key] = frozenset()
        self._used: set[Key] = set()  # since the last look

    def heard_granted(self, granted: Iterable[Key]) -> None:
        """The grants that are out and not used, as PostgreSQL has them. What was used here may not stand there yet."""
        known = frozenset(granted)
        self._used &= known
        self._granted = known - self._used

    def heard_backlogs(self, backlogs: Mapping[str, Backlog]) -> None:
        """What waits, by model, as PostgreSQL has it."""
        self._backlogs = dict(backlogs)

    def backlog(self, model: str) -> Backlog:
        """What waits for the model's pool."""
        return self._backlogs.get(model) or self._backlogs.setdefault(model, Backlog())

    def rate(self, model: str) -> DrainRate:
        """How fast that goes."""
        return self._rates.setdefault(model, DrainRate())

    def granted(self, request: Request) -> bool:
        """Whether it is its turn."""
        return key_of(request) in self._granted

    def used(self, request: Request) -> None:
        """Its grant is spent."""
        self._used.add(key_of(request))
        self._granted -= {key_of(request)}

    def token(self, request: Request) -> str:
        """What the caller shows when it comes again."""
        name = "\0".join((request.tenant, request.id, str(request.attempt)))
        digest = hmac.digest(self.secret, name.encode("utf-8", "surrogatepass"), "sha256")
        return urlsafe_b64encode(digest[:TOKEN_BYTES]).decode()

    def shown(self, request: Request) -> bool:
        """Whether the request brings the token of its own ticket: it was handed in."""
        if not request.ticket.isascii():
            return False
        return bool(self.secret) and hmac.compare_digest(request.ticket, self.token(request))

    def standing(self, model: str, *, left_s: float, gpu_s: float, rate_max: float) -> Standing:
        """Of a ticket that waits, by earliest deadline first at the measured rate; while none is known at `rate_max`,
        the most that the pool could do, which proves a miss the surer."""
        ahead_s = self.backlog(model).ahead_s(left_s)
        rate = self.rate(model).per_s or rate_max
        wait_s = ahead_s / rate
        end_s = wait_s + gpu_s
        return Standing(ahead_s=ahead_s, wait_s=wait_s, end_s=end_s, will_miss=end_s > left_s)


def key_of(request: Request) -> Key:
    return request.tenant, request.id, request.attempt
