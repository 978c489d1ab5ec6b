"""A site whose slots are shared out between two models, in virtual time: what each is offered, serves and keeps waiting
under a demand that moves."""

from collections.abc import Callable
from random import Random
from typing import Any

from tokenfleet.core.slomax.attainment import ClassWindow
from tokenfleet.core.slomax.controller import Controller, Step, Window
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import ClassShare, ControllerPolicy

WIDTH_S, LAG_S, MOVE_S = 10.0, 5.0, 20.0  # a slot drains, sleeps and wakes
REQUESTS_PER_S = 12.0
SLOTS = 8
NAMES: tuple[str, str] = ("talk", "read")
Demand = Callable[[float], float]  # the first model's part of what is offered


def sharing(**changed: Any) -> ControllerPolicy:
    shares = {name: ClassShare(share=0.5, floor=1 / SLOTS, ceiling=1 - 1 / SLOTS, target=0.99) for name in NAMES}
    terms: dict[str, Any] = {"enabled": True, "slots": SLOTS, "ceiling_min": 0.95, "classes": shares}
    return ControllerPolicy(**(terms | changed))


class SlottedSite:
    """Runs a controller window by window; `noise` is the deviation of what a model is offered in a window, as a share.

    `load` is what is offered in all, as a share of what the slots can serve. A request is late that waits for 2 s.
    """

    def __init__(
        self, demand: Demand, *, load: float = 0.8, noise: float = 0.13, seed: int = 1, terms: ControllerPolicy
    ) -> None:
        self.controller = Controller("site", terms)
        self.revisions: list[ShareRevision] = []
        self.steps: list[Step] = []
        self.slots: list[tuple[float, float]] = [(0.0, SLOTS / 2)]  # (since, the first model's)
        self.met = self.of = 0.0
        self._serving: dict[str, int] = dict.fromkeys(NAMES, SLOTS // 2)
        self._waiting_s: dict[str, float] = dict.fromkeys(NAMES, 0.0)
        self._demand, self._load, self._noise, self._rng = demand, load, noise, Random(seed)
        self._arrives: tuple[float, str] | None = None
        self.now_s = 0.0

    def run(self, until_s: float) -> "SlottedSite":
        while self.now_s < until_s:
            window = self._window()
            step = self.controller.advance(window, lag_s=LAG_S)
            self.steps.append(step)
            if step.revision is not None:
                self._follow(step.revision)
        return self

    def _window(self) -> Window:
        start_s, self.now_s = self.now_s, self.now_s + WIDTH_S
        part = self._demand(start_s + WIDTH_S / 2)
        classes = {name: self._class(name, p, start_s) for name, p in zip(NAMES, (part, 1.0 - part), strict=True)}
        return Window(start_s=start_s, width_s=WIDTH_S, classes=classes, output_tokens=100_000, ready=SLOTS)

    def _class(self, name: str, part: float, start_s: float) -> ClassWindow:
        offered_s = part * self._load * SLOTS * WIDTH_S * max(0.0, self._rng.gauss(1.0, self._noise))
        late = 0
        for second in range(round(WIDTH_S)):
            if self._arrives is not None and start_s + second >= self._arrives[0]:
                self._arrive()
            serving = self._serving[name]
            self._waiting_s[name] = max(0.0, self._waiting_s[name] + offered_s / WIDTH_S - serving)
            late += self._waiting_s[name] > 2.0 * serving
        of = part * REQUESTS_PER_S * WIDTH_S
        met = of * (1.0 - late / WIDTH_S)
        self.met, self.of = self.met + met, self.of + of
        return ClassWindow(
            met=round(met),
            missed=round(of) - round(met),
            offered_s=offered_s,
            waiting_s=self._waiting_s[name],
        )

    def _follow(self, revision: ShareRevision) -> None:
        """The slot begins to drain when the window's lag has passed."""
        self.revisions.append(revision)
        rise = {name: revision.new.shares[name] - revision.old.shares[name] for name in NAMES}
        to, giver = max(NAMES, key=lambda name: rise[name]), min(NAMES, key=lambda name: rise[name])
        self._serving[giver] -= 1
        self._arrives = self.now_s + LAG_S + MOVE_S, to

    def _arrive(self) -> None:
        assert self._arrives is not None, "no slot is on its way"
        at_s, to = self._arrives
        self._serving[to] += 1
        self._arrives = None
        self.controller.applied(len(self.revisions), at_s)
        self.slots.append((at_s, self.slots[-1][1] + (1.0 if to == NAMES[0] else -1.0)))
