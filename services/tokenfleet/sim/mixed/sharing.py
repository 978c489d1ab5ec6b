"""Sharing: class shares of the pool in a mixed run: none, as the policy has them, or as their controller moves them.

The controller is fed as the goodput process feeds it: by what gateways report and by the site's own summary. What it
changes is in force at all gateways with the next look, a second later.
"""

from typing import Final, Literal

from msgspec.structs import replace

from tokenfleet.core.decision import Request
from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.pool_windows import PoolWindows
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent, SiteSummary
from tokenfleet.core.site import pool_name
from tokenfleet.core.slomax.controller import Controller
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy
from tokenfleet.core.summary import summarise
from tokenfleet.sim.mixed.allowances import Allowances
from tokenfleet.sim.mixed.service_levels import WINDOW_S
from tokenfleet.sim.slots import Slots
from tokenfleet.sim.telemetry import MODEL, SITE

Sharing = Literal["none", "static", "controlled"]
SHARING: Final[tuple[Sharing, ...]] = ("none", "static", "controlled")
LOG, GATEWAY = "outcomes", "gateways"
POOL = pool_name(MODEL, SITE)
# What each holds of the KV in a run at load 0.9 without shares, rounded; floors of a third of it.
CLASSES = {
    "chat": ClassShare(share=0.5, floor=0.15),
    "long": ClassShare(share=0.2, floor=0.05),
    "batch": ClassShare(share=0.3, floor=0.1),
}
SUMMARY_PERIOD_S = 0.5


def shared(policy: Policy, sharing: str) -> Policy:
    """The policy with class shares. Raises PolicyError for a way of sharing that there is not."""
    if sharing not in SHARING:
        raise PolicyError(f"--shares {sharing!r}: there is {listed(SHARING)}")
    if sharing == "none":
        return policy
    terms = ControllerPolicy(enabled=sharing == "controlled", classes=CLASSES)
    return replace(policy, slomax=replace(policy.slomax, controller=terms))


class Shares(Allowances):
    """The overseer that moves shares, and still reads the allowance. `revisions` are its changes in order,
    `share_of_chat` what is in force each second."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.revisions: list[ShareRevision] = []
        self.share_of_chat: list[tuple[float, float]] = []
        self._controller = Controller(POOL, policy.slomax.controller)
        self._policy = policy
        self._windows = PoolWindows(WINDOW_S)
        self._partition = PartitionGoodput(policy, sources=(LOG,))
        self._partition.caught_up(LOG)
        self._asked: dict[str, Request] = {}
        self._summaries = 0
        self._in_flight: ShareRevision | None = None

    def offered(self, request: Request, now_s: float) -> None:
        self._asked[request.id] = request

    def placed(self, request: str, now_s: float) -> None:
        """Gateways report what they dispatch."""
        asked = self._asked.pop(request)
        started = OutcomeEvent(
            request=request,
            attempt=0,
            kind="started",
            decision="",
            tenant=asked.tenant,
            request_class=asked.declared_class,
            model=MODEL,
            origin=SITE,
            pool=POOL,
            at_wall_s=now_s,
            elapsed_s=0.0,
        )
        self._hear(started, now_s)

    def ended(self, event: OutcomeEvent, now_s: float) -> None:
        self._asked.pop(event.request, None)
        self._hear(event, now_s)
        self._windows.observe((event,), self._policy)

    def advance(self, slots: Slots, now_s: float) -> None:
        super().advance(slots, now_s)
        self._obey(now_s)
        self.share_of_chat.append((now_s, self.pilots[0].site.policy.slomax.controller.setting(POOL).shares["chat"]))
        self._windows.hear_summary(self._summary(now_s))
        for partial in self._partition.partials(site=SITE, partition=0, cluster=SITE, now_s=now_s):
            self._windows.hear(partial)
        for windows in self._windows.closed(self._policy):
            lag_s = now_s - (self._windows.watermark_s or 0.0)
            step = self._controller.advance(windows[POOL], lag_s=lag_s)
            if step.revision is not None:
                self.revisions.append(step.revision)
                self._in_flight = step.revision

    def _hear(self, event: OutcomeEvent, now_s: float) -> None:
        envelope = OutcomeEnvelope(site=SITE, replica=GATEWAY, sent_wall_s=event.at_wall_s, events=(event,))
        self._partition.hear(LOG, envelope, appended_wall_s=event.at_wall_s, now_s=now_s)

    def _obey(self, now_s: float) -> None:
        if (revision := self._in_flight) is None:
            return
        self._in_flight = None
        for pilot in self.pilots:
            policy = pilot.site.policy
            terms = replace(policy.slomax.controller, pools={POOL: revision.new})
            pilot.site.adopt(replace(policy, slomax=replace(policy.slomax, controller=terms)))
        self._controller.applied(revision.number, now_s)

    def _summary(self, now_s: float) -> SiteSummary:
        self._summaries += 1
        site = self.pilots[0].site
        return summarise(
            SITE,
            site.pools(now_s),
            site.policy,
            cluster=SITE,
            epoch=0,
            n=self._summaries,
            period_s=SUMMARY_PERIOD_S,
            gateways=(),
        )
