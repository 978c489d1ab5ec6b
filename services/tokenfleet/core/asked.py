"""Asked: one request with all that is looked up for it once, and what a decision gives back."""

from functools import cached_property
from random import Random
from typing import Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.columns import Flags, Floats
from tokenfleet.core.decision import Decision, Request
from tokenfleet.core.policy import Policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.output import OutputTable
from tokenfleet.core.records import OutcomeEvent, PlacementEvent
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.shard.records import Grant
from tokenfleet.core.slomax.classify import Classification
from tokenfleet.core.slomax.quota import Charge, entry_of
from tokenfleet.core.slomax.returns import Standing
from tokenfleet.core.slomax.tickets import HandedIn, Used


class Steps(Struct, frozen=True, kw_only=True):
    """Which of the three questions a call asks."""

    admission: bool = False
    dispatch: bool = False
    routing: bool = False


SCHEDULE: Final = Steps(admission=True, dispatch=True, routing=True)
ADMIT: Final = Steps(admission=True)
DISPATCH: Final = Steps(dispatch=True)
ROUTE: Final = Steps(routing=True)


class Ids(Struct, frozen=True, kw_only=True):
    """What names and labels a decision: its id, and the wall clock (a label, and when a residency rule expires)."""

    decision: str
    now_wall_s: float


def chance_of(request: str, attempt: int, hop: int) -> Random:
    """The chance of one attempt (by the logical request's id) at one site, the same whoever decides or replays."""
    return cast(Random, _Unseeded(f"{request}/{attempt}/{hop}"))


class _Unseeded:
    """Stands for Random(seed): seeding takes 6 µs, and most decisions draw nothing."""

    def __init__(self, seed: str) -> None:
        self._seed = seed

    @cached_property
    def _random(self) -> Random:
        return Random(self._seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._random, name)


class Turn(Struct, frozen=True, kw_only=True):
    """A held request's turn: `ahead_s` is held work that goes first, by slot of its pool, `held_s` all that is held,
    per instance. `overdue`: it can wait no longer, and goes whatever the backlog. Where classes
    share the pool, `allowed` are the instances that may take it (None: all) and `pace_s` is added to the cost of each;
    `late`: it can't meet its service level any more and is refused; so is who is overdue, finds nothing open, and has
    no claim to more (`busy`). `granted` is the credit that its ticket brought.
    """

    ahead_s: Floats | None = None
    held_s: float = 0.0
    overdue: bool
    allowed: Flags | None = None
    pace_s: Floats | None = None
    late: bool = False
    busy: bool = False
    granted: Grant | None = None


class Decided(Struct, frozen=True, kw_only=True):
    """The decision, the placement to count if it placed something, what the other replicas are to hear if it went to
    another site, and the outcome to report if it refused. `short`: it waits for credit of its pool's book or for its
    class's share, and those of its class behind it do too. `ticket` must be kept before anybody is answered."""

    decision: Decision
    placement: PlacementEvent | None = None
    sent: SendEvent | None = None
    outcome: OutcomeEvent | None = None
    short: bool = False
    ticket: HandedIn | Used | None = None


class Asked(Struct, frozen=True, kw_only=True):
    """One request with all that is looked up once; `turn` is set when it was held and may go now. `standing` is what it
    has from its return ticket, and from when it was held.

    `policy`, with its `policy_hash`, is the one that decides throughout: in force, or a canary.
    """

    request: Request
    policy: Policy
    policy_hash: str
    steps: Steps
    ids: Ids
    pool: PoolView
    classified: Classification
    output_q50: float
    output_q90: float
    charge: Charge
    now_s: float
    rng: Random
    standing: Standing = Standing()
    turn: Turn | None = None

    @property
    def paces(self) -> bool:
        """Whether SLOMax queues requests for this pool by class, and this one's gateway can hold it."""
        can_wait = self.turn is not None or self.request.wait_max_s > 0.0
        return self.policy.paces and can_wait

    @property
    def kv_tokens(self) -> int:
        """What the request is counted for until it ends: what it was granted, else prompt and cautious output."""
        if self.turn is not None and self.turn.granted is not None:
            return self.turn.granted.units
        return self.request.prompt_tokens + round(self.output_q90)


def estimated(request: Request, policy: Policy, outputs: OutputTable) -> tuple[Request, float, float]:
    """The request with a budget that its model's context can hold, and the q50 and q90 of its output, in tokens.

    A budget is a bound: what the context can't hold is never produced. Raises UnknownModelError.
    """
    model = policy.model(request.model)
    room = model.context_max_tokens - request.prompt_tokens
    if request.max_tokens > room > 0:
        request = replace(request, max_tokens=room)
    q50, q90 = outputs.quantiles(
        tenant=entry_of(request.tenant, policy),
        model=request.model,
        prior=model,
        prompt_tokens=request.prompt_tokens,
        budget_tokens=request.max_tokens,
    )
    return request, q50, q90
