"""Fleets: a Site with instances in one line, for tests of decisions."""

from typing import Any

from msgspec.structs import replace

from tokenfleet.adapters.policy_file import load_policy
from tokenfleet.core.asked import SCHEDULE, Decided, Ids, Steps
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.records import CapacityRow, CapacityShard, Control, Heartbeat, Order, OutcomeEvent, SiteSummary
from tokenfleet.core.schedule import decide
from tokenfleet.core.site import Heard, Site
from tokenfleet.core.summary import summarise

POLICY, POLICY_HASH = load_policy()
MODELS = {"small": "small-chat", "large": "large-chat"}
DIGESTS = {"small-chat": "small-chat@2026-08", "large-chat": "large-chat@2026-09"}


def asked(request_id: str, **facts: Any) -> Request:
    """A chat request for the small model that arrives at b."""
    known: dict[str, Any] = {"model": "small-chat", "tenant": "acme", "origin": "b", "prompt_tokens": 1000}
    return Request(id=request_id, **(known | facts))


class Town:
    """The site `name` with idle instances `<name>-small-0` …, at the time `now_s`, heard of 0.1 s before."""

    def __init__(
        self, name: str, *, small: int = 0, large: int = 0, tenant_limits: dict[str, int] | None = None
    ) -> None:
        tenants = {
            tenant: replace(terms, requests_per_minute_max=(tenant_limits or {}).get(tenant, 0))
            for tenant, terms in POLICY.tenants.items()
        }
        self.site = Site(name, replace(POLICY, tenants=tenants), policy_hash=POLICY_HASH, replica="0")
        self.now_s = 1000.0
        self.decisions = 0
        self._snapshots = 0
        self.beats = [
            Heartbeat(
                instance=f"{name}-{kind}-{i}",
                boot="boot-1",
                age_s=0.1,
                address=f"127.0.0.1:{8000 + i}",
                model=MODELS[kind],
                model_digest=DIGESTS[MODELS[kind]],
                running=0.0,
                waiting=0.0,
                kv_used_blocks=0.0,
                kv_total_blocks=8000,
                block_size=32,
            )
            for kind, count in (("small", small), ("large", large))
            for i in range(count)
        ]
        self.hears_telemetry()

    def hears_telemetry(self, *, agent_silent_s: float = 0.1, **facts: Any) -> None:
        """A capacity snapshot, now; `facts` change every heartbeat."""
        self._snapshots += 1
        rows = tuple(
            CapacityRow(
                beat=replace(beat, **facts),
                order=Order(cluster="kafka-1", claim=1, n=self._snapshots),
                agent="agent-1",
                age_s=max(0.1, agent_silent_s),
                agent_silent_s=agent_silent_s,
            )
            for beat in self.beats
        )
        shard = CapacityShard(
            site=self.site.name,
            shard=0,
            cluster="kafka-1",
            epoch=0,
            n=self._snapshots,
            period_s=0.1,
            telemetry_age_s=max(0.1, agent_silent_s) if rows else None,
            rows=rows,
        )
        self.site.heard(shard, Heard(now_s=self.now_s))

    def changes(self, instance: str, **facts: Any) -> None:
        """The instance is so from its next heartbeat on."""
        self.beats = [replace(beat, **facts) if beat.instance == instance else beat for beat in self.beats]

    def summary(self, n: int = 1) -> SiteSummary:
        """What the site tells the others as of now."""
        return summarise(
            self.site.name,
            self.site.pools(self.now_s),
            self.site.policy,
            cluster="kafka-1",
            epoch=0,
            n=n,
            period_s=0.5,
            gateways=(f"gate-{self.site.name}",),
        )

    def hears_summary_of(self, other: "Town") -> None:
        """The other site's summary as of now."""
        self._snapshots += 1
        self.site.heard(other.summary(self._snapshots), Heard(now_s=self.now_s))

    def hears_control(self, instance: str, state: Any) -> None:
        """An operator's word."""
        self.site.heard(Control(instance=instance, state=state), Heard(now_s=self.now_s))

    def decide(self, request: Request, *, steps: Steps = SCHEDULE) -> Decided:
        """The answer now, not counted as placed."""
        return decide(self.site, request, steps, self.ids(), now_s=self.now_s)

    def ids(self) -> Ids:
        """Of the next decision."""
        self.decisions += 1
        return Ids(decision=f"{self.site.name}-{self.decisions}", now_wall_s=1.8e9)

    def place(self, request: Request, *, steps: Steps = SCHEDULE) -> Decision:
        """The answer now, counted in the ledger."""
        decided = self.decide(request, steps=steps)
        if decided.placement is not None:
            self.site.placed(
                decided.placement,
                partition=0,
                session=request.session,
                now_s=self.now_s,
                block_keys=request.block_keys,
            )
        return decided.decision

    def hears_outcome(self, decision: Decision, kind: Any, **facts: Any) -> OutcomeEvent:
        """What became of a placed decision, as its gateway reports it."""
        event = OutcomeEvent(
            request=decision.request,
            attempt=decision.attempt,
            kind=kind,
            decision=decision.id,
            tenant=decision.tenant,
            request_class=decision.request_class,
            model=decision.model,
            origin=decision.origin,
            site=decision.site,
            instance=decision.target,
            at_wall_s=1.8e9,
            elapsed_s=1.0,
            **facts,
        )
        event, change = self.site.settled(event, now_s=self.now_s)
        if change is not None:
            self.site.placed(change, partition=0, session="", now_s=self.now_s)
        return event
