"""Fleet: N engines, R gateways and the links between them, in virtual time.

One heap of events, ties in a fixed order, all chance from the seeds passed in: the same arrivals, options and seed give
the same run to the last bit. A gateway sees what the links bring it and how its own requests go, nothing else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from msgspec import Struct

from tokenfleet.core.accounts import Feedback
from tokenfleet.core.decision import Request
from tokenfleet.core.goodput.lessons import Lessons
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.records import (
    CapacityShard,
    KvDelta,
    KvSnapshot,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
)
from tokenfleet.sim.agenda import Agenda, Rank
from tokenfleet.sim.engine.events import Admitted, Event, Finished, FirstToken
from tokenfleet.sim.links import Link, Links, LinkTerms
from tokenfleet.sim.overseer import Overseer
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.router import Answer, MakeRouter, Record, Router, Setup
from tokenfleet.sim.served import Served
from tokenfleet.sim.slots import Engine, Slots, engines_of
from tokenfleet.sim.telemetry import MODEL, SITE, heartbeat, shard
from tokenfleet.sim.traces.rows import TraceRow

RELEASE_PERIOD_S = 0.05  # how often a gateway that holds requests is asked for them
FEEDBACK_PERIOD_S = 1.0
OVERSIGHT_PERIOD_S = 1.0


class FleetTerms(Struct, frozen=True, kw_only=True):
    """What a fleet consists of. `drain_max_s` bounds the time after the last arrival: what is open then is unfinished.

    Each of the `instances` is a slot that serves the model `serving` names for it, one of `models`, at a time.
    Without `engine_counts` scrapes tell neither the requests of the engines nor the KV that they use. `site` names it
    among others, and its engines. `policy`, `weights`, `prior_factor` and `learning` are for the routers
    (router.Setup).
    """

    profile: Profile
    instances: int
    site: str = SITE
    models: tuple[str, ...] = (MODEL,)
    serving: tuple[str, ...] = ()  # empty: the first model on all
    gateways: int = 1
    telemetry_period_s: float = 0.25
    engine_counts: bool = True
    kv_snapshot_period_s: float = 30.0
    links: Links = Links()
    policy: Policy | None = None
    weights: TokenPilotPolicy | None = None
    prior_factor: float = 1.0
    learning: bool = False
    drain_max_s: float = 3_600.0


@dataclass(slots=True)
class _Gateway:
    name: str
    router: Router
    links: dict[type[Record], Link]
    outcomes: Link
    envelopes: int = 0
    release_due: bool = False


class Fleet:
    """A run: made from terms, a policy and a seed, it serves rows once.

    `lessons_policy` is what outcomes are learned under; None leaves calibration out. Without an `overseer` all slots
    stay with the models that they begin with. Fleets of several sites share an `agenda`, which somebody else runs.
    """

    def __init__(
        self,
        terms: FleetTerms,
        make_router: MakeRouter,
        *,
        seed: int,
        lessons_policy: Policy | None = None,
        overseer: Overseer | None = None,
        agenda: Agenda | None = None,
    ) -> None:
        self.terms = terms
        engines = engines_of(terms.profile, slots=terms.instances, models=terms.models, site=terms.site)
        self.engines = [engine for by_model in engines for engine in by_model.values()]
        self.slots = Slots(engines, terms.serving or (terms.models[0],) * terms.instances)
        self._overseer = overseer
        self._seed = seed
        self._numbers = {engine.name: number for number, engine in enumerate(self.engines)}
        self._arrivals_rng = Random(f"{seed}/arrivals")
        self._agenda = agenda or Agenda()
        self._open: dict[str, Served] = {}
        self._to_come = 0
        self._shards = 0
        self._lessons = Lessons() if lessons_policy is not None else None
        self._lessons_policy = lessons_policy
        self._gateways = [self._gateway(number, make_router) for number in range(terms.gateways)]

    def serve(self, rows: Sequence[TraceRow], *, progress: Callable[[float], None] | None = None) -> list[Served]:
        """Serve all rows, each arriving at a random gateway, to their ends; what became of each, in their order.

        `progress` is told the time, in virtual seconds, after every scrape. The rows fit into an engine (traces.fits).
        """
        served = [Served(id=f"{self._seed}-{number}", row=row) for number, row in enumerate(rows)]
        self._to_come = len(served)
        for each in served:
            self._agenda.at(each.row.at_s, Rank.ARRIVAL, partial(self._arrive, each))
        self.begin(progress)
        end_s = max((row.at_s for row in rows), default=0.0) + self.terms.drain_max_s
        self._agenda.run(until_s=end_s, while_=lambda: bool(self._to_come or self._open))
        return served

    def begin(self, progress: Callable[[float], None] | None = None) -> None:
        """Enter what happens again and again into the agenda, from its beginning."""
        self._agenda.every(self.terms.telemetry_period_s, partial(self._scrape, progress))
        self._agenda.every(self.terms.kv_snapshot_period_s, self._snapshot)
        if self._lessons is not None:
            self._agenda.every(FEEDBACK_PERIOD_S, self._teach)
        if self._overseer is not None:
            self._agenda.every(OVERSIGHT_PERIOD_S, partial(self._oversee, self._overseer))

    # Requests

    def _arrive(self, served: Served, now_s: float) -> None:
        self._to_come -= 1
        request = served.request()
        if self._overseer is not None:
            self._overseer.offered(request, now_s)
        self.take(served, request, now_s, gateway=self._arrivals_rng.randrange(len(self._gateways)))

    def take(self, served: Served, request: Request, now_s: float, *, gateway: int) -> None:
        """Ask a gateway, by its number, for the request."""
        self._open[served.id] = served
        served.gateway = gateway
        self._follow(self._gateways[gateway].router.route(request, now_s), now_s)
        if served.dispatched_s is None:  # held: the others' order may have changed by it, and its own turn be now
            self._release(self._gateways[gateway], now_s)
        self._await_release(self._gateways[gateway], now_s)

    def _follow(self, answer: Answer, now_s: float) -> None:
        """Do what a gateway answered; a held request stays where it is."""
        served = self._open[answer.request]
        assert served.dispatched_s is None, f"request {answer.request} was answered twice"
        if answer.refused:
            served.refused, served.refused_s = answer.refused, now_s
            del self._open[answer.request]
            if self._overseer is not None:
                self._overseer.ended(served.without_tokens("rejected", now_s), now_s)
        elif answer.instance:
            served.instance = self._numbers[answer.instance]
            served.decision, served.dispatched_s = answer.decision, now_s
            engine = self.engines[served.instance]
            assert engine.state in ("ready", "draining"), f"request {served.id} goes to {engine.name}: {engine.state}"
            self._advance(engine, now_s)
            engine.machine.submit(served.job(), now_s)
            self._await(engine)
            if self._overseer is not None:
                self._overseer.placed(served.id, now_s)

    def _await_release(self, gateway: _Gateway, now_s: float) -> None:
        if gateway.router.holding and not gateway.release_due:
            gateway.release_due = True
            self._agenda.at(now_s + RELEASE_PERIOD_S, Rank.RELEASE, partial(self._release_due, gateway))

    def _release_due(self, gateway: _Gateway, now_s: float) -> None:
        gateway.release_due = False
        self._release(gateway, now_s)

    def _release(self, gateway: _Gateway, now_s: float) -> None:
        if gateway.router.holding:
            for answer in gateway.router.released(now_s):
                self._follow(answer, now_s)
            self._await_release(gateway, now_s)

    # Engines

    def _wake(self, engine: Engine, now_s: float) -> None:
        if now_s == engine.wakes_at_s:  # else it was planned anew meanwhile
            engine.wakes_at_s = math.inf
            self._advance(engine, now_s)
            self._await(engine)

    def _await(self, engine: Engine) -> None:
        at_s = engine.machine.next_event_at_s()
        if at_s is None:
            engine.wakes_at_s = math.inf
        elif at_s != engine.wakes_at_s:
            engine.wakes_at_s = at_s
            self._agenda.at(at_s, Rank.ENGINE, partial(self._wake, engine))

    def _advance(self, engine: Engine, now_s: float) -> None:
        events = engine.machine.advance(now_s)
        if not events:
            return
        if (delta := engine.book.delta(events)) is not None:
            self._send(delta, now_s)
        first_tokens = [served.gateway for event in events if (served := self._take(event, now_s)) is not None]
        for number in first_tokens:
            self._release(self._gateways[number], now_s)

    def _take(self, event: Event, now_s: float) -> Served | None:
        """Report a request's step to its gateway; the request if it was its first token."""
        assert not isinstance(event, FirstToken | Finished) or event.at_s == now_s, "an engine was woken too late"
        if isinstance(event, FirstToken):
            served = self._open[event.job_id]
            served.first_token_s = event.at_s
            self._settle(served, "first_token", now_s)
            return served
        if isinstance(event, Finished):
            served = self._open.pop(event.job_id)
            served.finished_s, served.cached_tokens = event.at_s, event.cached_tokens
            self._settle(served, "finished", now_s)
        elif isinstance(event, Admitted) and (served := self._open[event.job_id]).first_token_s is None:
            served.cached_tokens = event.cached_tokens
        return None

    def _settle(self, served: Served, kind: Literal["first_token", "finished"], now_s: float) -> None:
        gateway, engine = self._gateways[served.gateway], self.engines[served.instance]
        event = served.outcome(kind, now_s, instance=engine.name, gateway=gateway.name)
        for at_s in gateway.outcomes.arrivals_s(now_s):
            if at_s == now_s:
                self._report(gateway, event, now_s)
            else:
                self._agenda.at(at_s, Rank.DELIVERY, partial(self._report_late, gateway, event))

    def _report_late(self, gateway: _Gateway, event: OutcomeEvent, now_s: float) -> None:
        self._report(gateway, event, now_s)
        if event.kind == "first_token":
            self._release(gateway, now_s)

    def _report(self, gateway: _Gateway, event: OutcomeEvent, now_s: float) -> None:
        event = gateway.router.settled(event, now_s)
        if self._overseer is not None and event.kind == "finished":
            self._overseer.ended(event, now_s)
        if self._lessons is not None and self._lessons_policy is not None:
            self._lessons.observe((event,), self._lessons_policy)

    # Records

    def _scrape(self, progress: Callable[[float], None] | None, now_s: float) -> None:
        self._shards += 1
        profile = self.terms.profile
        for engine in self.engines:
            self._advance(engine, now_s)
            self._await(engine)
        self.slots.advance(now_s)
        beats = [
            heartbeat(
                engine.name,
                engine.machine.load(),
                engine.book.digest(),
                block_size=profile.block_size,
                context_max_tokens=profile.kv_tokens,
                counted=self.terms.engine_counts,
                model=engine.model,
                state=engine.state,
            )
            for engine in self.engines
        ]
        seen = shard(beats, n=self._shards, period_s=self.terms.telemetry_period_s, site=self.terms.site)
        if self._shards == 1:  # a gateway serves when it has read its tables
            for gateway in self._gateways:
                gateway.router.heard(seen, now_s)
        else:
            self._send(seen, now_s)
        if progress is not None:
            progress(now_s)

    def _snapshot(self, now_s: float) -> None:
        for engine in self.engines:
            self._send(engine.book.snapshot(), now_s)

    def _oversee(self, overseer: Overseer, now_s: float) -> None:
        overseer.advance(self.slots, now_s)

    def _teach(self, now_s: float) -> None:
        assert self._lessons is not None, "nothing teaches"
        self._send(self._lessons.feedback(at_wall_s=now_s), now_s)

    def _send(self, record: Record, now_s: float) -> None:
        for gateway in self._gateways:
            self._deliver(record, gateway, now_s)

    def _deliver(self, record: Record, gateway: _Gateway, now_s: float) -> None:
        for at_s in gateway.links[type(record)].arrivals_s(now_s):
            self._agenda.at(at_s, Rank.DELIVERY, partial(gateway.router.heard, record))

    def _publish(self, sender: int, event: PlacementEvent) -> None:
        if len(self._gateways) == 1:
            return
        source = self._gateways[sender]
        source.envelopes += 1
        envelope = PlacementEnvelope(
            site=self.terms.site, replica=source.name, start="1", n=source.envelopes, events=(event,)
        )
        for gateway in self._gateways:  # the sender too: a replica reads its own events back
            self._deliver(envelope, gateway, self._agenda.now_s)

    def _gateway(self, number: int, make_router: MakeRouter) -> _Gateway:
        terms, name = self.terms, f"g{number}"
        setup = Setup(
            gateway=name,
            gateways=terms.gateways,
            instances=tuple(engine.name for engine in self.engines),
            profile=terms.profile,
            rng=Random(f"{self._seed}/{name}"),
            publish=partial(self._publish, number),
            site=terms.site,
            policy=terms.policy,
            weights=terms.weights,
            prior_factor=terms.prior_factor,
            learning=terms.learning,
        )

        def link(kind: str, of: LinkTerms) -> Link:
            return Link(of, Random(f"{self._seed}/{name}/{kind}"))

        kv = link("kv", terms.links.kv)
        links: dict[type[Record], Link] = {
            CapacityShard: link("telemetry", terms.links.telemetry),
            KvDelta: kv,
            KvSnapshot: kv,
            PlacementEnvelope: link("placements", terms.links.placements),
            Feedback: link("feedback", terms.links.feedback),
        }
        return _Gateway(
            name=name, router=make_router(setup), links=links, outcomes=link("outcomes", terms.links.outcomes)
        )
