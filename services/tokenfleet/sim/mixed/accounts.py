"""Accounts: goodput and attainment of a run, kept by the same code that keeps them for a live fleet."""

from collections.abc import Iterable, Sequence

from tokenfleet.core.accounts import GoodputPartial
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.goodput.table import GoodputSums, GoodputTable, Label
from tokenfleet.core.policy import REQUIRED_CLASSES, Policy
from tokenfleet.core.records import OutcomeEnvelope, OutcomeEvent
from tokenfleet.sim.mixed.service_levels import WINDOW_S
from tokenfleet.sim.served import Served
from tokenfleet.sim.telemetry import SITE

LOG = "outcomes"
GATEWAY = "gateways"


class Accounts:
    """The sums of one run by class or pool and window of WINDOW_S; `windows` are as many as something happened in."""

    def __init__(self, served: Sequence[Served], policy: Policy) -> None:
        events = sorted(_ends(served), key=lambda event: event.at_wall_s)
        self._table = GoodputTable()
        for partial in _partials(events, policy):
            self._table.hear(partial)
        last_s = events[-1].at_wall_s if events else 0.0
        self.windows = int(last_s // WINDOW_S) + 1

    def by_class(self, *, until_s: float | None = None) -> dict[str, GoodputSums]:
        """Each class and `all` over [0, until_s), whole windows; None: the whole run."""
        return self._sums("request_class", REQUIRED_CLASSES, 0, self._until(until_s))

    def by_pool(self, pools: Sequence[str], *, until_s: float | None = None) -> dict[str, GoodputSums]:
        """The same of each of the pools and `all`."""
        return self._sums("pool", pools, 0, self._until(until_s))

    def by_tenant(self, *, until_s: float | None = None) -> dict[str, GoodputSums]:
        """Each tenant over [0, until_s), whole windows; None: the whole run."""
        windows = self.windows if until_s is None else round(until_s / WINDOW_S)
        return self._table.by("tenant", WINDOW_S, 0.0, windows=windows)

    def window(self, number: int) -> dict[str, GoodputSums]:
        """The same over [number, number + 1) · WINDOW_S."""
        return self._sums("request_class", REQUIRED_CLASSES, number, 1)

    def _until(self, until_s: float | None) -> int:
        return self.windows if until_s is None else round(until_s / WINDOW_S)

    def _sums(self, label: Label, names: Sequence[str], first: int, windows: int) -> dict[str, GoodputSums]:
        start_s = first * WINDOW_S
        nothing = GoodputSums(seconds=windows * WINDOW_S)
        every = self._table.total(WINDOW_S, start_s, windows=windows)
        found = self._table.by(label, WINDOW_S, start_s, windows=windows)
        return {"all": every} | {name: found.get(name, nothing) for name in names}


def _partials(events: Sequence[OutcomeEvent], policy: Policy) -> Iterable[GoodputPartial]:
    partition = PartitionGoodput(policy, sources=(LOG,))
    for event in events:
        at_s = event.at_wall_s
        envelope = OutcomeEnvelope(site=SITE, replica=GATEWAY, sent_wall_s=at_s, events=(event,))
        partition.hear(LOG, envelope, appended_wall_s=at_s, now_s=at_s)
    partition.caught_up(LOG)
    return partition.partials(site=SITE, partition=0, cluster=SITE, now_s=events[-1].at_wall_s if events else 0.0)


def _ends(served: Sequence[Served]) -> Iterable[OutcomeEvent]:
    """How each request ended; what never did is given up when the last of all has: in its queue, or where it runs."""
    last_s = max((each.finished_s or each.refused_s or each.row.at_s for each in served), default=0.0)
    for each in served:
        if each.finished_s is not None:
            yield each.outcome("finished", each.finished_s, instance=f"i{each.instance}", gateway=GATEWAY)
        elif each.refused_s is not None:
            yield each.without_tokens("rejected", each.refused_s)
        else:
            yield each.without_tokens("timed_out", last_s)
