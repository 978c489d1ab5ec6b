"""Returns: who was refused for want of room and keeps a place in line, and when should each come again?

A return ticket is the place: signed, it describes itself, so that any replica with the site's key can read it and none
has to remember it. Two clocks never meet in it, for it tells durations: how long the request had stood in line when it
was given, and after how long it may be shown. How long ago that was, the replica that gave it knows from its own clock;
any other from the gateway's, by how much the `elapsed_s` of the request has grown since.

A ticket is good for the one attempt after the refused one, from its time on and for `return_within_s`, once. What it is
worth: the request stands where it stood, its service level counts from its first arrival, and coming again is free. Who
comes new finds the places taken that those keep who are due now, in so far as those who are due have come of late.
"""

import math
from bisect import bisect_right, insort
from collections import Counter, defaultdict

import msgspec
from msgspec import Struct

from tokenfleet.core.decision import Request, Returned
from tokenfleet.core.records import Entry, PlacementEvent
from tokenfleet.core.remembered import Remembered
from tokenfleet.core.sealed import seal, unseal
from tokenfleet.core.slomax.retry import room_in_s
from tokenfleet.core.slomax.terms import RetryPolicy

VERSION = b"\x02"
EARLY_S = 0.5  # a timer of the caller's may be so much too fast
KEPT_BEFORE_S = 0.25  # places are kept from so long before somebody is due
KEPT_MAX = 1_000  # absent requests of one entry of the policy and one class that places are kept for
USED_MAX = 20_000  # tickets shown; within their time none is forgotten below 500 a second
GAIN = 0.05  # the last twenty tickets tell whether tickets come back
DRAIN_GAIN = 0.02
DRAINED_MIN = 3  # requests that ended; below, what drains is not known


class ReturnTicket(Struct, frozen=True, kw_only=True, array_like=True):
    """A refused request's place. `attempt` is the refused one; the next may show it, and may again when a site has sent
    it back.

    When it was given `elapsed_s` had passed of the logical request, `stood_s` of them in line here, where it had joined
    at `virtual_ns` (slomax.fair); it may be shown `wait_s` later. `given_s` and `virtual_ns` are `issuer`'s, one life
    of one replica, and say nothing to another. `judged`: it was not refused for being late.
    """

    issuer: str
    pool: str
    tenant: str
    request: str
    request_class: str
    attempt: int
    elapsed_s: float
    stood_s: float
    virtual_ns: int
    given_s: float
    wait_s: float
    judged: bool


class Standing(Struct, frozen=True, kw_only=True):
    """What a request's ticket is worth: it has stood in line for `stood_s` already, since it joined at `virtual_ns`
    (None: unknown here), and `elapsed_s` have passed at least since it arrived. `judged`: it was let into the line, and
    who stands there is not judged again."""

    note: Returned = ""
    stood_s: float = 0.0
    elapsed_s: float = 0.0
    virtual_ns: int | None = None
    judged: bool = False

    @property
    def keeps(self) -> bool:
        """Whether a place was kept."""
        return self.note == "kept"


class Kept(Struct, frozen=True, kw_only=True):
    """Places kept for those of a class who are due and absent, and the prefill seconds that they would bring."""

    places: int = 0
    work_s: float = 0.0


class Returns:
    """The tickets of one replica, by model. Without a key it gives none and takes none."""

    def __init__(self) -> None:
        self._secret, self._issuer = b"", ""
        self._used: Remembered[tuple[str, str, int], bool] = Remembered(USED_MAX)
        self._absent: defaultdict[tuple[str, str], _Absent] = defaultdict(_Absent)  # by model and class
        self._drains: defaultdict[tuple[str, str], _Drain] = defaultdict(_Drain)

    def sign_with(self, secret: bytes, *, issuer: str) -> None:
        """From now on tickets are given. All replicas of a site have one `secret`; `issuer` names one life of one."""
        self._secret, self._issuer = secret, issuer

    def standing(
        self, request: Request, *, entry: str, request_class: str, pool: str, terms: RetryPolicy, now_s: float
    ) -> Standing:
        """What the ticket that the request shows is worth now. It is used by it, unless the request is a dry run.

        `entry` is the policy's entry that its tenant falls under.
        """
        if not request.return_ticket:
            return Standing()
        ticket = self._read(request.return_ticket)
        if ticket is None:
            return Standing(note="forged")
        own = (request.tenant, request.id, request_class, pool)
        is_next = 0 < request.attempt - ticket.attempt <= 1 + len(request.sites_tried)
        if own != (ticket.tenant, ticket.request, ticket.request_class, ticket.pool) or not is_next:
            return Standing(note="foreign")
        mine = ticket.issuer == self._issuer
        passed_s = now_s - ticket.given_s if mine else request.elapsed_s - ticket.elapsed_s
        if passed_s < ticket.wait_s - EARLY_S:
            return Standing(note="early")
        if passed_s > ticket.wait_s + terms.return_within_s:
            return Standing(note="late")
        key = (request.tenant, request.id, request.attempt)
        if self._used.get(entry, key):
            return Standing(note="used")
        if not request.dry_run:
            self._used.put(entry, key, True)
            self._absent[request.model, request_class].came((request.tenant, request.id), terms, now_s)
        return Standing(
            note="kept",
            stood_s=ticket.stood_s + passed_s,
            elapsed_s=ticket.elapsed_s + passed_s,
            virtual_ns=ticket.virtual_ns if mine else None,
            judged=ticket.judged,
        )

    def absent_s(self, model: str, request_class: str, *, came_s: float) -> float:
        """Σ prefill seconds of those of the class who were sent away and came no later than that."""
        absent = self._absent.get((model, request_class))
        return 0.0 if absent is None else absent.before_s(came_s)

    def room_in_s(
        self, model: str, request_class: str, *, ahead_s: float, work_s: float, running: float, instances: int
    ) -> tuple[float, float | None]:
        """Seconds until there is room for `work_s` of prefill behind `ahead_s` of it, and how much of it a second those
        of the class who run make room for. Where that is not known, None, a second of it on each instance is assumed.

        What was given out is no measure: it falls with those who stay away, and they would be told to stay longer.
        """
        drain_rate = self._drains[model, request_class].rate(running)
        assumed = float(instances) if drain_rate is None else drain_rate
        return room_in_s(ahead_s=ahead_s, work_s=work_s, free_s=0.0, drain_rate=assumed), drain_rate

    def give(
        self,
        request: Request,
        *,
        entry: str,
        request_class: str,
        pool: str,
        came_s: float,
        virtual_ns: int,
        work_s: float,
        wait_s: float,
        judged: bool,
        now_s: float,
    ) -> str:
        """The ticket of a request that was told to come again in `wait_s`; empty without a key to sign it with.

        It has stood in line since `came_s`.
        """
        if not self._secret:
            return ""
        ticket = ReturnTicket(
            issuer=self._issuer,
            pool=pool,
            tenant=request.tenant,
            request=request.id,
            request_class=request_class,
            attempt=request.attempt,
            elapsed_s=request.elapsed_s,
            stood_s=now_s - came_s,
            virtual_ns=virtual_ns,
            given_s=now_s,
            wait_s=wait_s,
            judged=judged,
        )
        absent = self._absent[request.model, request_class]
        absent.leaves((request.tenant, request.id), entry, came_s, work_s, now_s + wait_s)
        return seal(VERSION + msgspec.msgpack.encode(ticket), self._secret)

    def kept(self, model: str, request_class: str, terms: RetryPolicy, now_s: float) -> Kept:
        """The places that are kept from who comes new."""
        absent = self._absent.get((model, request_class))
        return Kept() if absent is None else absent.kept(terms, now_s)

    def told(self, event: PlacementEvent) -> None:
        """Whoever is placed, here or by another replica, is absent no longer."""
        placed = event.entry
        if event.kind != "placed" or placed is None:
            return
        if (absent := self._absent.get((placed.model, placed.request_class))) is not None:
            absent.forget((placed.tenant, placed.request))

    def ended(self, placed: Entry) -> None:
        """A request that was placed so long ago, by its `age_s`, has completed."""
        self._drains[placed.model, placed.request_class].ended(placed.work_s, placed.age_s)

    def retain(self, models: frozenset[str]) -> None:
        """Forgets models that a new policy lacks."""
        for known in (self._absent, self._drains):
            for key in [key for key in known if key[0] not in models]:
                del known[key]

    def _read(self, text: str) -> ReturnTicket | None:
        body = unseal(text, self._secret, version=VERSION) if self._secret else "malformed"
        if isinstance(body, str):
            return None
        try:
            return msgspec.msgpack.decode(body[len(VERSION) :], type=ReturnTicket)
        except msgspec.MsgspecError:  # another version's
            return None


class _Out(Struct, frozen=True):
    entry: str
    came_s: float
    work_s: float
    due_s: float


class _Absent:
    """Those of one class who were sent away with a ticket that has not lapsed."""

    def __init__(self) -> None:
        self._out: dict[tuple[str, str], _Out] = {}
        self._due: list[tuple[float, tuple[str, str]]] = []
        self._entries: Counter[str] = Counter()
        self._work_s = 0.0
        self._come_share = 0.0  # of those who were due of late; at first nothing is kept from anybody

    def leaves(self, call: tuple[str, str], entry: str, came_s: float, work_s: float, due_s: float) -> None:
        self.forget(call)
        if self._entries[entry] < KEPT_MAX:
            self._out[call] = _Out(entry, came_s, work_s, due_s)
            insort(self._due, (due_s, call))
            self._entries[entry] += 1
            self._work_s += work_s

    def came(self, call: tuple[str, str], terms: RetryPolicy, now_s: float) -> None:
        self._lapse(terms, now_s)
        if self.forget(call):
            self._come_share += GAIN * (1.0 - self._come_share)

    def forget(self, call: tuple[str, str]) -> bool:
        """Whether it was absent."""
        if (out := self._out.pop(call, None)) is None:
            return False
        del self._due[bisect_right(self._due, (out.due_s, call)) - 1]
        self._entries[out.entry] -= 1
        self._work_s -= out.work_s
        return True

    def before_s(self, came_s: float) -> float:
        """Σ prefill seconds of those who came no later."""
        return math.fsum(out.work_s for out in self._out.values() if out.came_s <= came_s)

    def kept(self, terms: RetryPolicy, now_s: float) -> Kept:
        self._lapse(terms, now_s)
        due = bisect_right(self._due, (now_s + KEPT_BEFORE_S,)) * self._come_share
        mean_s = self._work_s / len(self._out) if self._out else 0.0
        return Kept(places=round(due), work_s=due * max(mean_s, 0.0))

    def _lapse(self, terms: RetryPolicy, now_s: float) -> None:
        while self._due and self._due[0][0] + terms.return_within_s < now_s:
            self.forget(self._due[0][1])
            self._come_share -= GAIN * self._come_share


class _Drain:
    """How long requests of one class stay on their instances, and what prefill each brings: means of the last fifty."""

    def __init__(self) -> None:
        self._stay_s = self._work_s = 0.0
        self._ended = 0

    def ended(self, work_s: float, stay_s: float) -> None:
        self._ended += 1
        gain = max(DRAIN_GAIN, 1.0 / self._ended)
        self._stay_s += gain * (stay_s - self._stay_s)
        self._work_s += gain * (work_s - self._work_s)

    def rate(self, running: float) -> float | None:
        """Prefill seconds a second that so many running requests make room for, by Little's law; None if too few ended
        to tell."""
        if self._ended < DRAINED_MIN or self._stay_s <= 0.0 or running <= 0.0:
            return None
        return running * self._work_s / self._stay_s
