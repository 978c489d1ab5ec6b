"""Dispatchers: what decides at an origin where a request runs, and all that it gets to see.

Nothing reaches one but what other sites tell and how its own requests go; only AllKnowing hears every engine at once.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.asked import DISPATCH, Ids, chance_of
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import (
    CapacityShard,
    Entry,
    KvDelta,
    KvSnapshot,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
    SiteSummary,
    SketchChunk,
)
from tokenfleet.core.schedule import decide
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.site import Heard, Site
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.sim.sites.layout import HERE, PINNED, Place
from tokenfleet.sim.telemetry import MODEL

SPILL_AT = 6  # requests in flight an instance, at which a site counts as full

Told = SiteSummary | SketchChunk | PlacementEnvelope  # what origins hear
Overheard = CapacityShard | KvDelta | KvSnapshot  # what only AllKnowing hears


class Sent(Struct, frozen=True, kw_only=True):
    """Where the request goes; `instance` only where the site's own pilot has no choice. `refused`: nowhere, and why."""

    site: str = ""
    instance: str = ""
    refused: str = ""


class Dispatcher(Protocol):
    """One replica of an origin's decision service."""

    def send(self, request: Request, now_s: float) -> Sent:
        """Where the request goes, `sites_tried` left out."""
        ...

    def heard(self, record: Told, now_s: float) -> None:
        """A record that reaches this replica now."""
        ...

    def overheard(self, site: str, record: Overheard, now_s: float) -> None:
        """A record of a site's own engines, at the moment at which it is made."""
        ...

    def settled(self, event: OutcomeEvent, now_s: float) -> None:
        """How a request that it sent goes (`first_token`, `finished`), as its stream tells."""
        ...

    def came_back(self, request: str, site: str) -> None:
        """A site refused it: it never ran there."""
        ...


class Setting(Struct, frozen=True, kw_only=True):
    """What a dispatcher is made from: its origin and its name there, the sites, the policy, its own chance, and the
    topic that the other replicas of its origin follow."""

    origin: str
    replica: str
    places: tuple[Place, ...]
    policy: Policy
    rng: Random
    publish: Callable[[SendEvent], None]


class FleetMind:
    """The core's FleetMind, on the Site of an origin without engines."""

    def __init__(self, setting: Setting) -> None:
        self.site = Site(setting.origin, setting.policy, replica=setting.replica)
        self._publish = setting.publish
        self._names = (f"{setting.replica}-{number}" for number in count(1))
        self._offset = 0

    def send(self, request: Request, now_s: float) -> Sent:
        ids = Ids(decision=next(self._names), now_wall_s=now_s)
        decided = decide(self.site, request, DISPATCH, ids, now_s=now_s)
        decision = decided.decision
        if decision.verdict != "redirect":
            return Sent(refused=decision.reason)
        if decided.sent is not None:
            self._publish(decided.sent)
        return Sent(site=decision.site)

    def heard(self, record: Told, now_s: float) -> None:
        self._offset += 1
        self.site.heard(record, Heard(offset=self._offset, now_s=now_s))

    def overheard(self, site: str, record: Overheard, now_s: float) -> None:
        pass

    def settled(self, event: OutcomeEvent, now_s: float) -> None:
        pass

    def came_back(self, request: str, site: str) -> None:
        pass  # its next attempt names the site


class Counting:
    """A rule that knows its own requests in flight and hears nobody: `pick` takes one of the sites that may."""

    def __init__(self, setting: Setting, pick: "Callable[[Counting, Sequence[Place]], Place]") -> None:
        self.rng = setting.rng
        self._pick = pick
        self.in_flight: Counter[str] = Counter()
        self._places = setting.places
        self._sent: dict[str, str] = {}

    def send(self, request: Request, now_s: float) -> Sent:
        may = [place for place in permitted(self._places, request) if place.name not in request.sites_tried]
        if not may:
            return Sent(refused="no_site")
        site = self._pick(self, may).name
        self.in_flight[site] += 1
        self._sent[request.id] = site
        return Sent(site=site)

    def load(self, place: Place) -> float:
        """Own requests in flight an instance."""
        return self.in_flight[place.name] / place.instances

    def least(self, places: Sequence[Place]) -> Place:
        """The least loaded, lots among equals."""
        least = min(self.load(place) for place in places)
        return self.rng.choice([place for place in places if self.load(place) == least])

    def heard(self, record: Told, now_s: float) -> None:
        pass

    def overheard(self, site: str, record: Overheard, now_s: float) -> None:
        pass

    def settled(self, event: OutcomeEvent, now_s: float) -> None:
        if event.kind == "finished":
            self.in_flight[self._sent.pop(event.request)] -= 1

    def came_back(self, request: str, site: str) -> None:
        self.in_flight[self._sent.pop(request)] -= 1


def local_only(counting: Counting, places: Sequence[Place]) -> Place:
    """Always the nearest."""
    return min(places, key=lambda place: place.rtt_s)


def at_random(counting: Counting, places: Sequence[Place]) -> Place:
    """Lots, a site by the number of its instances."""
    return counting.rng.choices(places, [place.instances for place in places])[0]


def spill(counting: Counting, places: Sequence[Place]) -> Place:
    """The nearest that is not full; if all are, the least loaded."""
    near = sorted(places, key=lambda place: place.rtt_s)
    return next((place for place in near if counting.load(place) < SPILL_AT), None) or counting.least(places)


class AllKnowing:
    """Every instance of every site as one pool, heard without delay, each dearer by the way to it: TokenPilot's
    prediction where FleetMind has a summary. It holds nothing back."""

    def __init__(self, setting: Setting) -> None:
        self.site = Site(setting.origin, setting.policy, replica=setting.replica)
        self._places = {place.name: place for place in setting.places}
        self._shards = {place.name: number for number, place in enumerate(setting.places)}
        self._policy = setting.policy

    def send(self, request: Request, now_s: float) -> Sent:
        may = permitted(tuple(self._places.values()), request)
        pool = self.site.pool(MODEL, now_s, request)
        where = [site_of(name) for name in pool.columns.labels.names]
        way_s = {p.name: p.rtt_s + p.upload_s(request.prompt_tokens) for p in self._places.values()}
        names = {place.name for place in may}
        prior = self._policy.models[MODEL].output_tokens_prior
        routing = choose(
            request,
            pool,
            self._policy,
            request_class="chat",
            output_q50=prior,
            output_q90=prior,
            rng=chance_of(request.id, request.attempt, request.hop),
            allowed=np.array([site in names for site in where], np.bool_),
            pace_s=np.array([way_s[site] for site in where], np.float64),
        )
        if routing.reason:
            return Sent(refused=routing.reason)
        chosen = routing.candidates[0]
        entry = Entry(
            decision=request.id,
            request=request.id,
            attempt=request.attempt,
            instance=routing.target,
            model=MODEL,
            request_class="chat",
            work_s=chosen.work_s,
            uncached_tokens=chosen.uncached_tokens,
            kv_tokens=request.prompt_tokens + round(prior),
            replica=self.site.replica,
            tenant=request.tenant,
            placed=routing.placed,
        )
        event = PlacementEvent(
            kind="placed",
            decision=entry.decision,
            request=entry.request,
            attempt=entry.attempt,
            instance=entry.instance,
            entry=entry,
        )
        self.site.placed(event, partition=0, session="", now_s=now_s, block_keys=request.block_keys)
        return Sent(site=site_of(routing.target), instance=routing.target)

    def heard(self, record: Told, now_s: float) -> None:
        pass

    def overheard(self, site: str, record: Overheard, now_s: float) -> None:
        if isinstance(record, CapacityShard):
            record = replace(record, site=self.site.name, shard=self._shards[site])
        self.site.heard(record, Heard(now_s=now_s))

    def settled(self, event: OutcomeEvent, now_s: float) -> None:
        _, change = self.site.settled(replace(event, decision=event.request), now_s=now_s)
        if change is not None:
            self.site.placed(change, partition=0, session="", now_s=now_s)

    def came_back(self, request: str, site: str) -> None:
        raise AssertionError("nobody refuses what was put on an instance")


def permitted(places: Sequence[Place], request: Request) -> list[Place]:
    """The sites that the request's tenant may use: rules that know nothing else know that."""
    return [place for place in places if request.tenant != PINNED or place.jurisdiction == HERE]


def site_of(instance: str) -> str:
    """The site that an engine's name begins with."""
    return instance.partition("-")[0]


IDEAL = "ideal"
DESIGNS: dict[str, Callable[[Setting], Dispatcher]] = {
    "fleetmind": FleetMind,
    IDEAL: AllKnowing,
    "least_in_flight": partial(Counting, pick=Counting.least),
    "local_only": partial(Counting, pick=local_only),
    "spill": partial(Counting, pick=spill),
    "random": partial(Counting, pick=at_random),
}
