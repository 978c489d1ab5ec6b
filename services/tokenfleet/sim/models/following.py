"""Following: slots that follow demand; the controller of shares, fed with what gateways report and obeyed by slots."""

import math

from msgspec import Struct

from tokenfleet.core.asked import estimated
from tokenfleet.core.decision import Request
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.table import GoodputSums, GoodputTable
from tokenfleet.core.policy import Policy
from tokenfleet.core.predict.output import OutputTable
from tokenfleet.core.predict.work import request_work_s
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent
from tokenfleet.core.site import pool_name
from tokenfleet.core.slomax.attainment import ClassWindow
from tokenfleet.core.slomax.controller import Controller, Window
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import ControllerPolicy
from tokenfleet.sim.slots import Slots
from tokenfleet.sim.telemetry import SITE

LOG, GATEWAY = "outcomes", "gateways"


class Followed(Struct, kw_only=True):
    """A revision and when slots were as it says; None: they never were."""

    revision: ShareRevision
    applied_s: float | None = None


class Following:
    """An Overseer. `followed` has all revisions in order."""

    def __init__(self, terms: ControllerPolicy, policy: Policy, *, slots: int) -> None:
        self.followed: list[Followed] = []
        self._controller = Controller(SITE, terms)
        self._policy = policy
        self._slots = slots
        self._width_s = policy.goodput.windows_s[0]
        self._partition = PartitionGoodput(policy, sources=(LOG,))
        self._partition.caught_up(LOG)
        self._table = GoodputTable()
        self._offered_s: dict[int, dict[str, float]] = {}  # by window and model
        self._waiting: dict[str, tuple[str, float]] = {}  # model and work, by request
        self._closed = 0

    def offered(self, request: Request, now_s: float) -> None:
        work_s = predicted_s(request, self._policy)
        window = self._offered_s.setdefault(int(now_s // self._width_s), dict.fromkeys(self._policy.models, 0.0))
        window[request.model] += work_s
        self._waiting[request.id] = request.model, work_s

    def placed(self, request: str, now_s: float) -> None:
        self._waiting.pop(request, None)

    def ended(self, event: OutcomeEvent, now_s: float) -> None:
        self._waiting.pop(event.request, None)
        envelope = OutcomeEnvelope(site=SITE, replica=GATEWAY, sent_wall_s=event.at_wall_s, events=(event,))
        self._partition.hear(LOG, envelope, appended_wall_s=event.at_wall_s, now_s=now_s)

    def advance(self, slots: Slots, now_s: float) -> None:
        """Each window that has closed moves the setting; slots go after it one by one."""
        for partial in self._partition.partials(site=SITE, partition=0, cluster=SITE, now_s=now_s):
            self._table.hear(partial)
        watermark_s = self._table.watermark_s if self._table.watermark_s is not None else -math.inf
        self._obey(slots, now_s)
        while (self._closed + 1) * self._width_s <= watermark_s:
            step = self._controller.advance(self._window(self._closed), lag_s=now_s - watermark_s)
            self._closed += 1
            if step.revision is not None:
                self.followed.append(Followed(revision=step.revision))
                self._obey(slots, now_s)

    def _obey(self, slots: Slots, now_s: float) -> None:
        """The next slot moves if the last one has arrived; when all are where they belong, the revision is applied."""
        if slots.moving or not self.followed or self.followed[-1].applied_s is not None:
            return
        revision, counts = self.followed[-1].revision, slots.counts()
        lacks = {name: round(share * self._slots) - counts[name] for name, share in revision.new.shares.items()}
        source, target = min(lacks, key=lacks.__getitem__), max(lacks, key=lacks.__getitem__)
        if lacks[target] > 0:
            slots.move(source, target, now_s)
        else:
            self.followed[-1].applied_s = now_s
            self._controller.applied(revision.number, now_s)

    def _window(self, number: int) -> Window:
        start_s = number * self._width_s
        sums = self._table.by("pool", self._width_s, start_s)
        offered_s = self._offered_s.pop(number, dict.fromkeys(self._policy.models, 0.0))
        nothing = GoodputSums(seconds=self._width_s)
        ended = {model: sums.get(pool_name(model, SITE), nothing) for model in self._policy.models}
        waiting = list(self._waiting.values())
        classes = {
            model: ClassWindow(
                met=its.met,
                missed=its.missed,
                rejected=its.rejected,
                waiting=sum(name == model for name, _ in waiting),
                offered_s=offered_s[model],
                waiting_s=math.fsum(work_s for name, work_s in waiting if name == model),
            )
            for model, its in ended.items()
        }
        return Window(
            start_s=start_s,
            width_s=self._width_s,
            classes=classes,
            output_tokens=sum(its.output_tokens for its in ended.values()),
            waste_tokens=sum(its.waste_tokens for its in ended.values()),
            ready=self._slots,
            utilisation=sum(offered_s.values()) / (self._slots * self._width_s),
        )


def predicted_s(request: Request, policy: Policy) -> float:
    """GPU seconds of a request with nothing cached and its likely output."""
    _, output_tokens, _ = estimated(request, policy, OutputTable())
    return request_work_s(request.prompt_tokens, request.prompt_tokens, output_tokens, policy.model(request.model))
