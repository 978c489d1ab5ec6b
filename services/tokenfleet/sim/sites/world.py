"""World: origins whose gateways have no engines, sites that do, and the ways between them, in virtual time.

A request reaches an origin's replica, which names a site; half a round trip and its upload later it is there, where the
site's own TokenPilot picks the instance. Its tokens come back half a round trip later. A site that refuses sends it
back, and the origin tries another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.core.records import CapacityShard, KvDelta, KvSnapshot, OutcomeEvent, PlacementEnvelope
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.site import pool_name
from tokenfleet.core.sketch import Sketch
from tokenfleet.core.summary import summarise
from tokenfleet.sim.agenda import Agenda, Rank
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.router import Answer, Record, Setup
from tokenfleet.sim.served import Served
from tokenfleet.sim.sites.dispatchers import DESIGNS, IDEAL, Dispatcher, Setting, Told
from tokenfleet.sim.sites.layout import Place, origin_names, sites_policy
from tokenfleet.sim.telemetry import CLUSTER, MODEL
from tokenfleet.sim.traces.rows import TraceRow

SKETCH_PERIOD_S = 5.0
Step = Literal["first_token", "finished"]
NO_LAG = Links(telemetry=Links().outcomes, kv=Links().outcomes)


class WorldTerms(Struct, frozen=True, kw_only=True):
    """What a world consists of. Each origin and each site has `replicas` decision services, which hear of one another
    after `event_delay_s`; summaries leave every `summary_period_s`, sketches every 5 s."""

    profile: Profile
    design: str
    places: tuple[Place, ...]
    origins: int = 1
    replicas: int = 1
    event_delay_s: float = 0.02
    summary_period_s: float = 0.5
    drain_max_s: float = 3_600.0


@dataclass(slots=True)
class Trip:
    """One request on its way through the world; `tried` are the sites that refused it, `site` where it runs."""

    served: Served
    origin: int
    replica: int
    request: Request
    site: str = ""
    tried: list[str] = field(default_factory=list[str])


class World:
    """A run: made from terms and a seed, it serves rows once."""

    def __init__(self, terms: WorldTerms, *, seed: int) -> None:
        self.terms = terms
        self._seed = seed
        self._agenda = Agenda()
        self._rng = Random(f"{seed}/ways")
        self.origins = origin_names(terms.origins)
        self.places = {place.name: place for place in terms.places}
        self.policy = sites_policy(terms.profile, self.origins, terms.places)
        self.trips: dict[str, Trip] = {}
        self._open = 0
        self._numbers = 0
        self.fleets = {place.name: _SiteFleet(self, place, seed=seed) for place in terms.places}
        self.dispatchers = [
            [self._dispatcher(origin, number) for number in range(terms.replicas)] for origin in range(terms.origins)
        ]
        if terms.design == IDEAL:  # who knows all knows of all requests too
            self.dispatchers = [[self.dispatchers[0][0]] * terms.replicas] * terms.origins
        self._envelopes = [[0] * terms.replicas for _ in self.origins]

    def serve(self, rows: Sequence[TraceRow], *, progress: Callable[[float], None] | None = None) -> list[Trip]:
        """Serve all rows to their ends, each arriving at a random replica of a random origin; their trips in order."""
        for number, row in enumerate(rows):
            served = Served(id=f"{self._seed}-{number}", row=row)
            origin, replica = self._rng.randrange(self.terms.origins), self._rng.randrange(self.terms.replicas)
            request = replace(served.request(), origin=self.origins[origin])
            self.trips[served.id] = Trip(served, origin, replica, request)
            self._agenda.at(row.at_s, Rank.ARRIVAL, partial(self._ask, self.trips[served.id]))
        self._open = len(self.trips)
        for number, fleet in enumerate(self.fleets.values()):
            fleet.begin(None if number else progress)
        if self.terms.design != IDEAL:
            self._agenda.every(self.terms.summary_period_s, self._summarise)
            self._agenda.every(SKETCH_PERIOD_S, self._sketch)
        end_s = max((row.at_s for row in rows), default=0.0) + self.terms.drain_max_s
        self._agenda.run(until_s=end_s, while_=lambda: self._open > 0)
        return list(self.trips.values())

    @property
    def agenda(self) -> Agenda:
        return self._agenda

    # Requests

    def _ask(self, trip: Trip, now_s: float) -> None:
        tried = tuple(trip.tried)
        request = replace(trip.request, attempt=len(tried), sites_tried=tried, elapsed_s=now_s - trip.served.row.at_s)
        sent = self.dispatchers[trip.origin][trip.replica].send(request, now_s)
        if sent.refused:
            trip.served.refused, trip.served.refused_s = sent.refused, now_s
            self._open -= 1
            return
        trip.site = sent.site
        place = self.places[sent.site]
        there = replace(request, hop=1, lease=sent.instance)
        at_s = now_s + place.rtt_s / 2 + place.upload_s(request.prompt_tokens)
        self._agenda.at(at_s, Rank.ARRIVAL, partial(self._arrive, trip, there))

    def _arrive(self, trip: Trip, request: Request, now_s: float) -> None:
        fleet = self.fleets[trip.site]
        fleet.take(trip.served, request, now_s, gateway=self._rng.randrange(self.terms.replicas))

    def refused(self, served: Served, now_s: float) -> None:
        """A site has no room: the request is back at its origin half a round trip later."""
        trip = self.trips[served.id]
        trip.tried.append(trip.site)
        back_s = now_s + self.places[trip.site].rtt_s / 2
        self._agenda.at(back_s, Rank.ARRIVAL, partial(self._back, trip))

    def _back(self, trip: Trip, now_s: float) -> None:
        self.dispatchers[trip.origin][trip.replica].came_back(trip.served.id, trip.site)
        self._ask(trip, now_s)

    def told(self, served: Served, kind: Step, now_s: float) -> None:
        """A request's stream tells its site's gateway, and half a round trip later its origin."""
        trip = self.trips[served.id]
        if kind == "finished":
            self._open -= 1
        engine = self.fleets[trip.site].engines[served.instance]
        event = served.outcome(kind, now_s, instance=engine.name, gateway=trip.site)
        lag_s = 0.0 if self.terms.design == IDEAL else self.places[trip.site].rtt_s / 2
        dispatcher = self.dispatchers[trip.origin][trip.replica]
        self._agenda.at(now_s + lag_s, Rank.DELIVERY, partial(dispatcher.settled, event))

    # Records

    def overheard(self, site: str, record: Record, now_s: float) -> None:
        """A site's own record, as it is made."""
        if isinstance(record, CapacityShard | KvDelta | KvSnapshot):
            for dispatcher in {id(each): each for replicas in self.dispatchers for each in replicas}.values():
                dispatcher.overheard(site, record, now_s)

    def _summarise(self, now_s: float) -> None:
        self._numbers += 1
        for name, fleet in self.fleets.items():
            summary = summarise(
                name,
                fleet.observer.site.pools(now_s),
                self.policy,
                cluster=CLUSTER,
                epoch=0,
                n=self._numbers,
                period_s=self.terms.summary_period_s,
                gateways=(f"{name}:1",),
            )
            self._tell_origins(name, summary, now_s)

    def _sketch(self, now_s: float) -> None:
        for name, fleet in self.fleets.items():
            keys = fleet.observer.site.prefix.census([engine.name for engine in fleet.engines]).keys()
            pool = pool_name(MODEL, name)
            for chunk in Sketch.of(keys).chunks(site=name, pool=pool, cluster=CLUSTER, epoch=0, n=self._numbers):
                self._tell_origins(name, chunk, now_s)

    def _tell_origins(self, site: str, record: Told, now_s: float) -> None:
        at_s = now_s + self.places[site].rtt_s / 2
        for replicas in self.dispatchers:
            for dispatcher in replicas:
                self._agenda.at(at_s, Rank.DELIVERY, partial(dispatcher.heard, record))

    def _publish(self, origin: int, sender: int, event: SendEvent) -> None:
        """On the origin's own topic: its other replicas hear of it."""
        self._envelopes[origin][sender] += 1
        envelope = PlacementEnvelope(
            site=self.origins[origin],
            replica=f"{self.origins[origin]}{sender}",
            start="1",
            n=self._envelopes[origin][sender],
            events=(),
            sends=(event,),
        )
        at_s = self._agenda.now_s + self.terms.event_delay_s
        for number, dispatcher in enumerate(self.dispatchers[origin]):
            if number != sender:
                self._agenda.at(at_s, Rank.DELIVERY, partial(dispatcher.heard, envelope))

    def _dispatcher(self, origin: int, number: int) -> Dispatcher:
        name = f"{self.origins[origin]}{number}"
        return DESIGNS[self.terms.design](
            Setting(
                origin=self.origins[origin],
                replica=name,
                places=self.terms.places,
                policy=self.policy,
                rng=Random(f"{self._seed}/{name}"),
                publish=partial(self._publish, origin, number),
            )
        )


class _SiteFleet(Fleet):
    """A site's engines and gateways; the last gateway is asked nothing and only hears: it makes the summaries."""

    def __init__(self, world: World, place: Place, *, seed: int) -> None:
        self._world = world
        terms = world.terms
        links = NO_LAG if terms.design == IDEAL else Links()
        super().__init__(
            FleetTerms(
                profile=terms.profile,
                instances=place.instances,
                site=place.name,
                gateways=terms.replicas + 1,
                links=replace(links, placements=replace(links.placements, delay_s=terms.event_delay_s)),
                policy=world.policy,
            ),
            Carrier if terms.design == IDEAL else Pilot,
            seed=seed,
            agenda=world.agenda,
        )

    @property
    def observer(self) -> Pilot:
        router = self._gateways[-1].router
        assert isinstance(router, Pilot)
        return router

    def _follow(self, answer: Answer, now_s: float) -> None:
        if answer.refused:
            served = self._open.pop(answer.request)
            self._world.refused(served, now_s)
        else:
            super()._follow(answer, now_s)

    def _settle(self, served: Served, kind: Step, now_s: float) -> None:
        super()._settle(served, kind, now_s)
        self._world.told(served, kind, now_s)

    def _send(self, record: Record, now_s: float) -> None:
        super()._send(record, now_s)
        self._world.overheard(self.terms.site, record, now_s)


class Carrier:
    """A Router that takes each request to the instance that its origin has chosen."""

    holding = 0

    def __init__(self, setup: Setup) -> None:
        del setup

    def route(self, request: Request, now_s: float) -> Answer:
        return Answer(request=request.id, decision=request.id, instance=request.lease)

    def released(self, now_s: float) -> Sequence[Answer]:
        return ()

    def heard(self, record: Record, now_s: float) -> None:
        pass

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        return event
