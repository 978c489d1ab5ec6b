"""Failures: instances whose requests fail lately are held back, a while and never too many.

Evidence comes from outcomes, so it works when telemetry says that all is well. A held-back instance is `out` at first
and then half-open: one request a second until one succeeds.
"""

from collections import deque
from collections.abc import Collection, Mapping
from typing import Literal

from msgspec import Struct

from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import OutcomeKind

Standing = Literal["in", "out", "probe", "probed"]


class Failures:
    """What the last outcomes say about each instance."""

    def __init__(self, policy: LivenessPolicy) -> None:
        self.policy = policy
        self._known: dict[str, _Evidence] = {}
        self._held: set[str] = set()  # those of them that are out or half-open: few, and asked for at each decision

    def settled(self, instance: str, *, failed: bool, now_s: float) -> None:
        """One attempt on `instance` ended; see FAILED for which ends count."""
        known = self._known.setdefault(instance, _Evidence())
        if known.out_until_s is not None:
            if now_s < known.out_until_s:
                return  # sent before it was held back: no news
            if failed:
                known.hold(now_s, self.policy)
            else:
                self.forget(instance)
            return
        known.add(failed, now_s, window_s=self.policy.failures_window_s)
        if known.is_failing(self.policy):
            known.hold(now_s, self.policy)
            self._held.add(instance)

    def standings(self, pool: Collection[str], now_s: float) -> Mapping[str, Standing]:
        """Those of `pool` that are held back: `out`; `probe`, half-open with a request to spare; or `probed`, without.

        At most `out_share_max` of the pool, and one of any pool of two or more (a share of a small pool would never
        hold back anybody): those held back first. The others stay in, so a fault of the clients can't empty a pool.
        """
        held = [(self._known[name].held_since_s, name) for name in self._held if name in pool]
        most = max(int(self.policy.out_share_max * len(pool)), 1 if len(pool) > 1 else 0)
        return {name: self._known[name].standing(now_s) for _, name in sorted(held)[:most]}

    def probed(self, instance: str, now_s: float) -> None:
        """A request was sent to a half-open instance: the next one may follow PROBE_PERIOD_S later."""
        if (known := self._known.get(instance)) is not None:
            known.probed_at_s = now_s

    def forget(self, instance: str) -> None:
        """The instance is gone, or another boot has its name."""
        self._known.pop(instance, None)
        self._held.discard(instance)

    @property
    def some_held(self) -> bool:
        """Whether any instance is held back."""
        return bool(self._held)

    def __len__(self) -> int:
        return len(self._known)


FAILED: Mapping[OutcomeKind, bool] = {  # the other kinds say nothing about the instance
    "finished": False,
    "failed": True,
    "timed_out": True,
}
PROBE_PERIOD_S = 1.0
OUTCOMES_KEPT_MAX = 1000  # of one instance within the window


class _Outcome(Struct, frozen=True):
    at_s: float
    failed: bool


class _Evidence:
    """Outcomes of one instance within the window, and since when and until when it is out."""

    def __init__(self) -> None:
        self.outcomes: deque[_Outcome] = deque(maxlen=OUTCOMES_KEPT_MAX)
        self.in_a_row = 0
        self.held_since_s = 0.0
        self.out_until_s: float | None = None
        self.out_for_s = 0.0
        self.probed_at_s: float | None = None

    def add(self, failed: bool, now_s: float, *, window_s: float) -> None:
        self.in_a_row = self.in_a_row + 1 if failed else 0
        self.outcomes.append(_Outcome(now_s, failed))
        while self.outcomes[0].at_s < now_s - window_s:
            self.outcomes.popleft()

    def is_failing(self, policy: LivenessPolicy) -> bool:
        if self.in_a_row >= policy.failures_in_a_row:
            return True
        failures = sum(outcome.failed for outcome in self.outcomes)
        return len(self.outcomes) >= policy.failures_min and failures >= policy.failures_share * len(self.outcomes)

    def hold(self, now_s: float, policy: LivenessPolicy) -> None:
        """Out for twice as long as the last time."""
        if self.out_until_s is None:
            self.held_since_s = now_s
        self.out_for_s = min(2 * self.out_for_s or policy.out_first_s, policy.out_max_s)
        self.out_until_s = now_s + self.out_for_s
        self.probed_at_s = None

    def standing(self, now_s: float) -> Standing:
        if self.out_until_s is not None and now_s < self.out_until_s:
            return "out"
        spare = self.probed_at_s is None or now_s - self.probed_at_s >= PROBE_PERIOD_S
        return "probe" if spare else "probed"
