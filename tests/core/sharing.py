"""Sharing: replicas of site b that share its books over one log, moved step by step; the first owns them all."""

from collections import deque
from itertools import count
from typing import Any

from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import SCHEDULE, Decided, Ids, Steps
from tokenfleet.core.credit import limit_of
from tokenfleet.core.decision import Decision
from tokenfleet.core.records import PlacementEnvelope, PlacementEvent
from tokenfleet.core.schedule import Released, released
from tokenfleet.core.shard.owner import Owner
from tokenfleet.core.shard.purse import Purse
from tokenfleet.core.shard.records import At, Holder, Record, ShardClaim, pool_book
from tokenfleet.core.site import Heard
from tokenfleet.core.site_books import SiteBooks

POOL = pool_book("small-chat@b")


class Replica:
    """One decide replica: what it decides is placed and told at once."""

    def __init__(self, site: "Sharing", name: str, **engines: Any) -> None:
        self.town = Town("b", **engines)
        self.town.beats = [replace(beat, kv_total_blocks=1600) for beat in self.town.beats]
        self.town.hears_telemetry()
        self.site = self.town.site
        self.site.replica = name
        self.site.envelopes.caught_up()
        self.sharing = site
        self.outbox: deque[Record] = deque()
        self.me = Holder(replica=name, start="1")
        purse = Purse(self.me, lambda _, record: self.outbox.append(record))
        shard = replace(self.site.policy.slomax.shard, enabled=True)
        self.site.adopt(replace(self.site.policy, slomax=replace(self.site.policy.slomax, shard=shard)))
        self.site.shares(purse)
        self.purse = purse
        self.books = SiteBooks(self.site)
        self.owners: dict[str, Owner] = {}
        self.envelopes = 0
        self.read_to = 0
        self._ids = count()

    def asks(self, name: str, steps: Steps = SCHEDULE, **facts: Any) -> Decision:
        """What it says now."""
        decided = self.town.decide(asked(name, **facts), steps=steps)
        self._settle(decided)
        return decided.decision

    def ends(self, decision: Decision) -> None:
        """The request of that decision is over."""
        event = PlacementEvent(
            kind="ended",
            decision=decision.id,
            request=decision.request,
            attempt=decision.attempt,
            instance=decision.target,
        )
        self._tell(event)

    def releases(self) -> list[Released]:
        """The final answers to those it holds, whose turn it is."""
        answers: list[Released] = []
        for _, answer in released(self.site, "small-chat", self.now_s, self._next_ids):
            if isinstance(answer, Decided):
                self._settle(answer)
            answers.append(answer)
        return answers

    @property
    def now_s(self) -> float:
        return self.town.now_s

    def _next_ids(self) -> Ids:
        return Ids(decision=f"{self.me.replica}-held-{next(self._ids)}", now_wall_s=1.8e9)

    def _settle(self, decided: Decided) -> None:
        if decided.placement is not None:
            self._tell(decided.placement)

    def _tell(self, event: PlacementEvent) -> None:
        self.envelopes += 1
        self.site.placed(event, partition=0, session="", now_s=self.now_s)
        envelope = PlacementEnvelope(site="b", replica=self.me.replica, start="1", n=self.envelopes, events=(event,))
        for each in self.sharing.replicas:
            each.site.heard(envelope, Heard(now_s=each.now_s))


class Sharing:
    """The log and its readers. Ids of decisions are their replica's."""

    def __init__(self, *names: str, **engines: Any) -> None:
        self.log: list[Record] = []
        self.replicas = [Replica(self, name, **engines) for name in names]
        for number, each in enumerate(self.replicas):
            each.town.decisions = 1000 * number
        self.owner = self.replicas[0]
        self.owned = True
        self.owner.outbox.append(ShardClaim(owner=self.owner.me, assignment=1))

    @property
    def limit(self) -> int:
        site = self.owner.site
        return limit_of(site.pool("small-chat", self.owner.now_s), site.policy)

    @property
    def running(self) -> int:
        """KV tokens of all that runs."""
        return sum(entry.kv_tokens for entry in self.owner.site.ledger.entries())

    def passes(self, seconds: float) -> None:
        """Time goes by in steps of 50 ms; all is written and read in each."""
        for _ in range(round(seconds / 0.05)):
            for each in self.replicas:
                each.town.now_s += 0.05
                if round(each.now_s * 20) % 20 == 0:
                    each.town.hears_telemetry()
                    each.site.advance(0, each.now_s, live=True)
            self._move()

    def _move(self) -> None:
        for each in self.replicas:
            each.books.look(each.now_s)
            wanted = each.books.wanted()
            for book in wanted:
                each.purse.follow(book)
            for book, leases in each.purse.leases.items():
                wants = max(wanted.get(book, 0), 2 * leases.asked)
                if leases.due(each.now_s) and (wants or not leases.idle):
                    each.outbox.append(leases.request(each.now_s, wants=wants, envelopes=each.envelopes))
            for waiting in each.purse.waiting.values():
                each.outbox.extend(waiting.turn(each.now_s))
            each.purse.sweep(lambda decision, each=each: decision in each.site.ledger)
        if self.owned:
            for book, owner in self.owner.owners.items():
                owner.limit_units = self.owner.books.limit_units(book)
                self.owner.outbox.extend(owner.turn(self.owner.now_s, live=True))
        for each in self.replicas:
            self.log.extend(each.outbox)
            each.outbox.clear()
        for each in self.replicas:
            self._read(each)

    def _read(self, each: Replica) -> None:
        for offset in range(each.read_to, len(self.log)):
            record, at = self.log[offset], At(cluster="kafka-1", offset=offset)
            if each is self.owner and not isinstance(record, ShardClaim):
                self._owner_of(record.book)
            for owner in each.owners.values():
                owner.read(record, at, now_s=each.now_s, live=True)
            for book in {POOL, *each.purse.leases}:
                each.purse.read(record, at, book, now_s=each.now_s)
        each.read_to = len(self.log)

    def _owner_of(self, book: str) -> None:
        if book not in self.owner.owners:
            entries, hold_s = self.owner.books.entries(book)
            owner = Owner(book, self.owner.me, assignment=1, secret=b"s", entries=entries, hold_s=hold_s)
            claim = next(offset for offset, record in enumerate(self.log) if isinstance(record, ShardClaim))
            at = At(cluster="kafka-1", offset=claim)
            owner.read(self.log[claim], at, now_s=self.owner.now_s, live=True)
            self.owner.owners[book] = owner
