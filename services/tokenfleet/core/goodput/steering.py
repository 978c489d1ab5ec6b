"""Steering: the controllers of all pools' shares, from closed windows of goodput to revisions of the policy.

What it says are records, to be written to the `policy` topic; read back they are in force, and the state: the file of
the last revision holds each pool's setting, and who published it tells whether that was a step of ours or somebody
else's word, which is the base from then on. At most one record is in flight, so one change of a pool.
"""

from collections.abc import Iterable

from tokenfleet.core.accounts import GoodputPartial
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.pool_windows import PoolWindows
from tokenfleet.core.policy import Policy, policy_hash
from tokenfleet.core.records import OutcomeEvent, SiteSummary
from tokenfleet.core.revisions import PolicyLog, PolicyRecord, PolicyRevision, with_pools
from tokenfleet.core.slomax.controller import Controller
from tokenfleet.core.slomax.shares import ShareRevision

BY = "controller"


class Steering:
    """One for all pools of all sites, where their goodput is added up. `policy` is in force, with its file `toml`."""

    def __init__(self, policy: Policy, toml: str) -> None:
        self.problem = ""  # why no file can be written, empty while one can
        self.held: dict[str, str] = {}  # why each pool's last window changed nothing
        self._policy, self._toml = policy, toml
        self._last: PolicyRevision | None = None
        self._at_s = 0.0
        self._log = PolicyLog()
        self._windows = PoolWindows(min(policy.goodput.windows_s))
        self._controllers: dict[str, Controller] = {}
        self._pending: PolicyRevision | None = None

    def hear_goodput(self, partial: GoodputPartial) -> None:
        self._windows.hear(partial)

    def hear_summary(self, summary: SiteSummary) -> None:
        self._windows.hear_summary(summary)

    def observe(self, events: Iterable[OutcomeEvent]) -> None:
        """Events that were not heard before."""
        self._windows.observe(events, self._policy)

    def hear(self, record: PolicyRecord, in_force: Policy, *, at_s: float) -> None:
        """The next record of the log, which took it at `at_s`, and the policy in force after it."""
        self._log.hear(record, at_s=at_s)
        if not isinstance(record, PolicyRevision) or record.is_canary or record.revision <= self._policy.revision:
            return
        if record.revision != in_force.revision:
            return  # it can't be used
        ours = self._pending is not None and record.sha256 == self._pending.sha256
        if self._pending is not None and record.revision >= self._pending.revision:
            self._pending = None
        self._policy, self._toml, self._last, self._at_s, self.problem = in_force, record.toml, record, at_s, ""
        for pool, controller in self._controllers.items():
            if not ours:
                terms = in_force.slomax.controller
                # Switched off, static shares hold at once; that they do is a revision of ours, for the audit.
                base = terms.setting(pool) if terms.enabled else None
                controller.follow(terms, setting=base, at_s=at_s)
        for change in record.shares if ours else ():
            self._controllers[change.pool].applied(change.number, at_s)

    def due(self, *, now_wall_s: float) -> PolicyRevision | None:
        """What to write now, again until it is read back; None: nothing."""
        terms = self._policy.slomax.controller
        changes: list[ShareRevision] = []
        for windows in self._windows.closed(self._policy) if terms.classes else ():
            frozen = self._frozen() or ("two windows at once" if changes else "")
            for pool, window in windows.items():
                step = self._controller(pool).advance(window, lag_s=now_wall_s - self._complete_s, frozen=frozen)
                self.held[pool] = step.held
                changes += [step.revision] if step.revision is not None else []
        if changes:
            self._publish(changes, now_wall_s)
        return self._pending

    @property
    def _complete_s(self) -> float:
        return self._windows.watermark_s or 0.0

    def _frozen(self) -> str:
        """Why nothing may be published, empty if it may."""
        if self._log.canary is not None:
            return f"canary revision {self._log.canary.revision} is on trial"
        if self._pending is not None:
            return f"policy revision {self._pending.revision} is in flight"
        return self.problem

    def _controller(self, pool: str) -> Controller:
        """As the file in force says; after a restart with what we last did."""
        if (known := self._controllers.get(pool)) is not None:
            return known
        terms, last = self._policy.slomax.controller, self._last
        made = self._controllers[pool] = Controller(pool, terms)
        made.follow(terms, setting=terms.setting(pool), at_s=self._at_s)
        if last is not None and last.by == BY:
            for change in last.shares:
                if change.pool == pool:
                    made.restored(change, at_s=self._at_s)
        return made

    def _publish(self, changes: list[ShareRevision], now_wall_s: float) -> None:
        terms = self._policy.slomax.controller
        pools = terms.pools | {change.pool: change.new for change in changes}
        revision = max(self._log.greatest, self._policy.revision) + 1
        try:
            text = with_pools(
                self._toml, revision, {pool: each for pool, each in pools.items() if each != terms.static()}
            )
        except PolicyError as error:
            self.problem = str(error)
            for pool, controller in self._controllers.items():
                controller.follow(terms, setting=terms.setting(pool), at_s=self._at_s)
            return
        self._pending = PolicyRevision(
            revision=revision,
            toml=text,
            sha256=policy_hash(text),
            by=BY,
            at_wall_s=now_wall_s,
            reason="; ".join(f"{change.pool}: {change.why}" for change in changes),
            shares=tuple(changes),
        )
