"""A pool that is shared out between classes, in virtual time: what each delivers under a setting and a demand."""

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from tokenfleet.core.slomax.attainment import ClassWindow
from tokenfleet.core.slomax.controller import Controller, Step, Window
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy

WIDTH_S = 10.0
CLASSES = {
    "chat": ClassShare(share=0.5, floor=0.1, target=0.98),
    "long": ClassShare(share=0.3, floor=0.1, target=0.98),
    "batch": ClassShare(share=0.2, floor=0.05, target=0.98),
}
TERMS = ControllerPolicy(enabled=True, classes=CLASSES)

Demand = Callable[[float], dict[str, float]]  # by time: what each class needs, in shares of the pool


class SharedPool:
    """Runs a controller window by window. A revision comes into force `delay_s` after its window has closed."""

    def __init__(self, demand: Demand, *, requests: int = 300, seed: int = 1, delay_s: float = 2.0) -> None:
        self.controller = Controller("large-chat@b", TERMS)
        self.revisions: list[ShareRevision] = []
        self.steps: list[Step] = []
        self.worst: list[tuple[float, float]] = []  # (end of window, least attainment)
        self.shares = self.controller.setting.shares
        self._demand, self._requests, self._rng, self._delay_s = demand, requests, Random(seed), delay_s
        self._pending: ShareRevision | None = None
        self.now_s = 0.0

    def run(self, until_s: float, **changed: float) -> "SharedPool":
        while self.now_s < until_s:
            step = self.controller.advance(replace(self.window(), **changed), lag_s=5.0)
            self.steps.append(step)
            if step.revision is not None:
                self.revisions.append(step.revision)
                self._pending = step.revision
        return self

    def window(self) -> Window:
        """The next window as it was delivered."""
        start_s, self.now_s = self.now_s, self.now_s + WIDTH_S
        if self._pending is not None:
            self.shares = self._pending.new.shares
            self.controller.applied(self._pending.number, start_s + self._delay_s)
            self._pending = None
        demand = self._demand(start_s)
        classes = {name: self._class(name, demand[name]) for name in demand}
        self.worst.append((self.now_s, min(attained(self.shares[n], demand[n]) for n in demand)))
        return Window(
            start_s=start_s,
            width_s=WIDTH_S,
            classes=classes,
            output_tokens=100_000,
            ready=8,
            utilisation=0.9,
            residual_ratio=1.0,
        )

    def _class(self, name: str, demand: float) -> ClassWindow:
        share = attained(self.shares[name], demand)
        of = int(self._requests * demand)
        met = sum(self._rng.random() < share for _ in range(of))
        return ClassWindow(met=met, missed=of - met, offered_s=demand * 80.0)

    def turns(self) -> list[float]:
        """When shares turned round: any class moved the other way than the last time."""
        way: dict[str, float] = {}
        times: list[float] = []
        for revision in self.revisions:
            moves = {name: revision.new.shares[name] - revision.old.shares[name] for name in revision.new.shares}
            moves = {name: move for name, move in moves.items() if abs(move) >= 0.002}
            if any(way.get(name, move) * move < 0.0 for name, move in moves.items()):
                times.append(revision.at_s)
            way |= moves
        return times

    def settled_s(self, *, since_s: float, at_least: float) -> float:
        """Seconds from `since_s` until no class was worse than `at_least` any more."""
        return max(
            [end_s - since_s for end_s, worst in self.worst if end_s > since_s and worst < at_least], default=0.0
        )


def attained(share: float, demand: float) -> float:
    """Within its service level: all with room to spare, fewer as the queue grows, steeply."""
    return min(1.0, 0.995 * min(1.0, (share / max(demand, 1e-9)) ** 3) + 0.005 * (share > 1.1 * demand))
