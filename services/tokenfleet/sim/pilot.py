"""Pilot: one simulated TokenPilot gateway; the core's Site, driven as a decide replica drives it, without I/O."""

from collections.abc import Sequence
from itertools import count

from msgspec.structs import replace

from tokenfleet.core.asked import ROUTE, Decided, Ids
from tokenfleet.core.compiled import COMPILED_FROM, load
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import (
    REQUIRED_CLASSES,
    LedgerPolicy,
    Model,
    Policy,
    RequestClass,
    SitePolicy,
    Tenant,
    TokenPilotPolicy,
)
from tokenfleet.core.records import OutcomeEvent, PlacementEvent
from tokenfleet.core.schedule import decide, released
from tokenfleet.core.site import Heard, Site
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.router import Answer, Record, Setup
from tokenfleet.sim.telemetry import MODEL, SITE, TENANT

UNBOUNDED = 1_000_000_000
WAIT_MAX_S = 3_600.0  # callers of these runs never give up
SILENT_MAX_S = 3_600.0  # a gateway of the fleet reports no progress; lost ends are left to the telemetry to correct


class Pilot:
    """A Router: decides on one Site, publishes its placements, hears all else. `steps` are the questions that it asks,
    for requests that can wait for `wait_max_s`."""

    steps = ROUTE
    wait_max_s = WAIT_MAX_S

    def __init__(self, setup: Setup) -> None:
        policy = setup.policy or policy_of(
            setup.profile, weights=setup.weights, prior_factor=setup.prior_factor, learning=setup.learning
        )
        if len(setup.instances) >= COMPILED_FROM:
            load()
        self.site = Site(setup.site, policy, replica=setup.gateway)
        self._publish = setup.publish
        self._names = (f"{setup.gateway}-{number}" for number in count(1))
        self._offset = 0

    @property
    def holding(self) -> int:
        return len(self.site.held)

    def route(self, request: Request, now_s: float) -> Answer:
        held = replace(request, wait_max_s=self.wait_max_s)
        return self._answer(request, decide(self.site, held, self.steps, self._ids(), now_s=now_s), now_s)

    def released(self, now_s: float) -> Sequence[Answer]:
        return [
            self._answer(waiting.request, answer, now_s)
            for model in sorted(self.site.held.models())
            for waiting, answer in released(self.site, model, now_s, self._ids)
            if isinstance(answer, Decided)  # the names of these runs never go
        ]

    def heard(self, record: Record, now_s: float) -> None:
        self._offset += 1
        self.site.heard(record, Heard(offset=self._offset, now_s=now_s))

    def settled(self, event: OutcomeEvent, now_s: float) -> OutcomeEvent:
        event, change = self.site.settled(event, now_s=now_s)
        if change is not None:
            self._place(change, now_s)
        return event

    def _ids(self) -> Ids:
        return Ids(decision=next(self._names), now_wall_s=0.0)

    def _answer(self, request: Request, decided: Decided, now_s: float) -> Answer:
        decision = decided.decision
        if decision.verdict == "queue":
            return Answer(request=request.id, decision=decision.id)
        if decided.placement is None:
            return Answer(request=request.id, decision=decision.id, refused=decision.reason)
        self._place(decided.placement, now_s, session=request.session, block_keys=request.block_keys)
        return Answer(request=request.id, decision=decision.id, instance=decision.target)

    def _place(self, event: PlacementEvent, now_s: float, *, session: str = "", block_keys: bytes = b"") -> None:
        self._publish(event)
        self.site.placed(event, partition=0, session=session, now_s=now_s, block_keys=block_keys)


def policy_of(
    profile: Profile,
    *,
    weights: TokenPilotPolicy | None = None,
    prior_factor: float = 1.0,
    learning: bool = False,
) -> Policy:
    """The policy of a fleet of one pool, in which nothing but TokenPilot's weights bears on a request.

    The engine coefficients are the profile's × `prior_factor`; where no outcomes teach, they are taken as they are.
    """
    shipped = weights or TokenPilotPolicy()
    unbound = RequestClass(running_max_per_instance=UNBOUNDED, backlog_max_s=UNBOUNDED, kv_share_max=1.0)
    return Policy(
        classes=dict.fromkeys(REQUIRED_CLASSES, unbound),
        tenants={TENANT: Tenant()},
        models={MODEL: model_of(profile, factor=prior_factor)},
        sites={SITE: SitePolicy(jurisdiction=SITE)},
        tokenpilot=shipped if learning else replace(shipped, unlearned_factor=1.0),
        ledger=LedgerPolicy(silent_max_s=SILENT_MAX_S),
    )


def model_of(profile: Profile, *, factor: float = 1.0) -> Model:
    """The policy's form of a profile: c0 + max(w_min, a · tokens) + …, w_min being the profile's floor at its largest
    batch, which a step with a prefill chunk meets."""
    return Model(
        context_max_tokens=profile.kv_tokens,
        budget_tokens=profile.token_budget,
        seats_max=UNBOUNDED,
        c0_s=profile.prefill_base_s * factor,
        w_min_s=max(0.0, profile.floor_points[-1][1] - profile.prefill_base_s) * factor,
        a_s=profile.token_s * factor,
        b_s=profile.pair_s * factor,
        d_s=profile.context_s * factor,
    )
