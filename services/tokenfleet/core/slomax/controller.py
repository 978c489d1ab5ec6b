"""Controller: do a pool's shares and its admission ceiling fit what was delivered?

Every ten seconds, on a closed window of outcomes in event time: a class that misses its target takes shares from those
that don't, by e = target − attainment and its sum; the ceiling falls when what is admitted is late and wasted, and
rises while there is a queue and all is well. Everything else here keeps it from doing harm: it moves in small steps,
one at a time, on enough evidence, turns round at most once a minute, stands still while its view is no good, and takes
back what cost throughput.

One `Controller` a pool, in the one process that owns it. Give each closed `Window` to `advance` once, in order; publish
the revision that comes back, to those who enforce it and to the audit, and say `applied` when they do. After a restart
give the last published revision to `restored`; what somebody else published is told by `follow`.
"""

from collections import deque
from itertools import islice

from msgspec import Struct

from tokenfleet.core.slomax.attainment import Attainment, ClassWindow
from tokenfleet.core.slomax.shares import Kind, ShareRevision, directions, one_moved, projected
from tokenfleet.core.slomax.terms import ControllerPolicy, Setting

CHANGES_KEPT = 60  # that may be reverted


class Window(Struct, frozen=True, kw_only=True):
    """What one pool delivered in a closed window of event time.

    `ready` are the instances that could serve, `utilisation` is how much of what the ceiling bounds is in use, `queued`
    how many placed requests have no first token at its end. `residual_ratio` is the median of actual over predicted
    time to first token, None without any.
    """

    start_s: float
    width_s: float
    classes: dict[str, ClassWindow]
    output_tokens: int = 0
    waste_tokens: int = 0
    ready: int = 0
    queued: int = 0
    utilisation: float = 0.0
    residual_ratio: float | None = None

    @property
    def end_s(self) -> float:
        return self.start_s + self.width_s

    @property
    def offered_s(self) -> float:
        """Predicted GPU seconds of what arrived."""
        return sum(each.offered_s for each in self.classes.values())


class Step(Struct, frozen=True, kw_only=True):
    """What came of a window: a revision to publish, or why nothing is changed."""

    revision: ShareRevision | None = None
    held: str = ""


class Controller:
    """One pool's setting, and what the controller remembers to change it safely."""

    def __init__(self, pool: str, terms: ControllerPolicy) -> None:
        self.terms = terms
        self.setting = terms.static()
        self._pool = pool
        self._number = 0
        self._applied_s: float | None = 0.0  # None: a change is in flight
        self._attainment = Attainment()
        self._windows: deque[Window] = deque()
        self._changes: deque[ShareRevision] = deque(maxlen=CHANGES_KEPT)
        self._directions: dict[str, int] = {}
        self._ceiling_direction = 0
        self._reversed_s = self._ceiling_reversed_s = self._reverted_s = float("-inf")
        self._reverted_on: Window | None = None  # what was offered when a step was last taken back
        self._slow_windows = 0

    def follow(self, terms: ControllerPolicy, *, setting: Setting | None = None, at_s: float = 0.0) -> None:
        """Somebody else's policy is in force since `at_s`, with this `setting` of the pool, by default the present one:
        the base from which it goes on. Other classes put its static shares into force with the next window."""
        self.terms = terms
        self.setting = setting or self.setting
        self._applied_s = at_s
        self._forget()

    def restored(self, revision: ShareRevision, *, at_s: float) -> None:
        """The pool's last revision, in force since `at_s`, published before a restart. It may have been a turn."""
        self.setting, self._number, self._applied_s = revision.new, revision.number, at_s
        self._directions = directions(revision.old.shares, revision.new.shares)
        self._ceiling_direction = _sign(revision.new.ceiling - revision.old.ceiling)
        self._reversed_s = self._ceiling_reversed_s = revision.at_s
        if revision.kind == "revert":
            self._reverted_s = revision.at_s

    def applied(self, number: int, at_s: float) -> None:
        """Those who enforce it have taken the revision up, at this event time."""
        if number == self._number and self._applied_s is None:
            self._applied_s = at_s

    def advance(self, window: Window, *, lag_s: float, frozen: str = "") -> Step:
        """`lag_s` is how far the watermark is behind the present. A window that came before is ignored. `frozen` says
        why nothing may be published now, if so."""
        last = self._windows[-1] if self._windows else None
        if last is not None and window.start_s <= last.start_s:
            return Step(held="this window has been seen")
        self._windows.append(window)
        while self._windows[0].start_s < window.start_s - self.terms.baseline_s:
            self._windows.popleft()
        if frozen:
            self._slow_windows = 0
            return Step(held=frozen)
        if not self.terms.enabled or self.setting.shares.keys() != self.terms.classes.keys():
            return self._static(window)
        if unsure := self._unsure(window, last, lag_s):
            self._slow_windows = 0
            return Step(held=unsure)
        if self._applied_s is None:
            return Step(held=f"revision {self._number} is in flight")
        if window.start_s < self._applied_s:  # its outcomes tell of two settings; what was offered depends on neither
            during = f"revision {self._number} came into force during this window"
            return self._step(window) if self.terms.slots else Step(held=during)
        self._attainment.hear(window.classes, self.terms)
        if slow := self._slow(window):
            return slow
        return self._step(window)

    def _static(self, window: Window) -> Step:
        """The kill switch, or other classes than before."""
        static = self.terms.static()
        off = not self.terms.enabled
        if self.setting == static:
            return Step(held="switched off")
        why = "switched off: the policy's static shares" if off else "the policy shares this pool out otherwise"
        step = self._change(window, static, "static", why)
        self._forget()
        return step

    def _forget(self) -> None:
        """Somebody else's change is no turn of ours, and what was known tells of another setting."""
        self._attainment = Attainment()
        self._changes.clear()
        self._directions, self._ceiling_direction, self._slow_windows = {}, 0, 0

    def _unsure(self, window: Window, last: Window | None, lag_s: float) -> str:
        """Why no conclusion can be drawn from this window, empty if one can."""
        if lag_s > 2 * window.width_s:
            return f"the watermark is {lag_s:.0f} s behind"
        if last is not None and last.ready != window.ready:
            return f"{window.ready} instances are ready, {last.ready} were"
        ratio = window.residual_ratio
        if ratio is not None and not 1.0 / self.terms.drift_max <= ratio <= self.terms.drift_max:
            return f"first tokens take {ratio:.2f} times as long as predicted"
        return ""

    def _slow(self, window: Window) -> Step | None:
        """The throughput guard: less output than before the last change, at the load that it was made for, takes it
        back."""
        change = self._changes[-1] if self._changes else None
        made_on = next((each for each in self._windows if change is not None and each.end_s == change.at_s), None)
        if change is None or made_on is None or not _alike(made_on, window, within=self.terms.load_tolerance):
            self._slow_windows = 0
            return None
        alike = [
            before.output_tokens / before.width_s
            for before in self._windows
            if before.end_s <= change.at_s
            and before.ready == window.ready
            and _alike(before, window, within=self.terms.load_tolerance)
        ]
        baseline = sum(alike) / len(alike) if len(alike) >= self.terms.throughput_windows else 0.0
        rate = window.output_tokens / window.width_s
        if rate >= self.terms.throughput_min * baseline:
            self._slow_windows = 0
            return None
        self._slow_windows += 1
        told = f"{rate:.0f} tokens/s, {baseline:.0f} before revision {change.number} at the same load"
        late = self._turns_too_soon(change.old, window.end_s)
        if self._slow_windows < self.terms.throughput_windows or late:
            return Step(held=f"{told}; {late or 'watched'}")
        self._changes.pop()
        self._reverted_s, self._reverted_on = window.end_s, window
        self._attainment = Attainment()
        return self._change(window, change.old, "revert", told)

    def _step(self, window: Window) -> Step:
        if self._repeats_itself(window):
            return Step(held="a step was reverted at this load a short while ago")
        now = self.setting
        shares, told = self._shares(window)
        if not directions(now.shares, shares):
            shares, told = now.shares, ""
        elif late := self._turns_too_soon(Setting(shares=shares, ceiling=now.ceiling), window.end_s):
            shares, told = now.shares, late
        ceiling, told_ceiling = self._ceiling(window)
        if late := self._turns_too_soon(Setting(shares=now.shares, ceiling=ceiling), window.end_s):
            ceiling, told_ceiling = now.ceiling, late
        new = Setting(shares=shares, ceiling=ceiling)
        why = "; ".join(filter(None, (told, told_ceiling))) or "on target"
        return Step(held=why) if new == now else self._change(window, new, "step", why)

    def _repeats_itself(self, window: Window) -> bool:
        """Whether a step would be tried again too soon: as much is offered to each class as when one was reverted."""
        recent = window.end_s - self._reverted_s < self.terms.reverted_hold_s
        on = self._reverted_on
        return recent and (on is None or _alike(on, window, within=self.terms.load_tolerance))

    def _shares(self, window: Window) -> tuple[dict[str, float], str]:
        """What the shares should be, and the attainments that say so."""
        terms, classes, now = self.terms, self.terms.classes, self.setting.shares
        errors = {name: self._attainment.error(name, terms) for name in classes}
        needed = self._needed(window)
        total = sum(needed.values())
        full = any(need > terms.slot_full * now[name] for name, need in needed.items())
        if terms.slots and total and (full or any(error > 0.0 for error in errors.values())):
            told = ", ".join(f"{name} needs {need:.1%}" for name, need in needed.items())
            level = {name: need / total + self._correction(name, errors[name]) for name, need in needed.items()}
            shares = one_moved(now, projected(level, classes), terms.slots, hold=terms.slot_hold)
            return shares, ", ".join(filter(None, (told, self._missed(errors))))
        if terms.slots or all(error <= 0.0 for error in errors.values()):
            return now, ""  # nobody needs what another could give
        wanted = {name: share + self._correction(name, errors[name]) for name, share in now.items()}
        needed = {name: min(need, now[name]) for name, need in needed.items()}
        missing = {name: wanted[name] for name, error in errors.items() if error > 0.0}
        return projected(wanted, classes, needed | missing, needed), self._missed(errors)

    def _correction(self, name: str, error: float) -> float:
        """By how much its attainment moves a class's share."""
        terms = self.terms
        by = terms.gain * error + terms.gain_sum * self._attainment.error_sum(name)
        return min(max(by, -terms.step_max), terms.step_max)

    def _missed(self, errors: dict[str, float]) -> str:
        """The attainments of the classes that are off their targets."""
        return ", ".join(
            f"{name} {self._attainment.of(name):.1%} of {self.terms.classes[name].target:.1%}"
            for name, error in errors.items()
            if error
        )

    def _needed(self, window: Window) -> dict[str, float]:
        """The share of the pool that each class needs for what it was offered lately and for what waits."""
        room_s = window.ready * window.width_s * self.setting.ceiling
        windows = max(1, round(self.terms.offered_s / window.width_s))
        needed = dict[str, float]()
        for name in self.setting.shares:
            recent = [
                each.classes[name].offered_s
                for each in islice(reversed(self._windows), windows)
                if name in each.classes
            ]
            waiting_s = window.classes[name].waiting_s if name in window.classes else 0.0
            work_s = waiting_s * window.width_s / self.terms.backlog_s + sum(recent) / max(1, len(recent))
            needed[name] = work_s / room_s if room_s > 0.0 else 0.0
        return needed

    def _ceiling(self, window: Window) -> tuple[float, str]:
        """What the ceiling should be, and why if it is another."""
        terms, now = self.terms, self.setting.ceiling
        shortfall = self._attainment.shortfall(terms)
        if shortfall is None:
            return now, ""
        waste = window.waste_tokens / window.output_tokens if window.output_tokens else 0.0
        if shortfall > terms.dead_band and waste > terms.waste_max and now > terms.ceiling_min:
            ceiling = max(now * terms.ceiling_cut, terms.ceiling_min)
            return ceiling, f"admitted work is {shortfall:.1%} under its target and {waste:.1%} of the output is waste"
        waiting = window.queued + sum(each.waiting for each in window.classes.values())
        if shortfall <= terms.dead_band and waiting and window.utilisation < now:
            return min(now + terms.ceiling_step, terms.ceiling_max), f"on target, {waiting} wait"
        return now, ""

    def _turns_too_soon(self, new: Setting, at_s: float) -> str:
        """Why this change can't be made yet, empty if it can: it turns round, as another did less than a minute ago."""
        recent_s = at_s - self.terms.reversal_period_s
        if self._ceiling_turns(new.ceiling) and self._ceiling_reversed_s > recent_s:
            return "the ceiling turned round less than a minute ago"
        if self._shares_turn(new.shares) and self._reversed_s > recent_s:
            return "shares turned round less than a minute ago"
        return ""

    def _shares_turn(self, shares: dict[str, float]) -> bool:
        moved = directions(self.setting.shares, shares)
        return any(self._directions.get(name, way) != way for name, way in moved.items())

    def _ceiling_turns(self, ceiling: float) -> bool:
        return self._ceiling_direction * (ceiling - self.setting.ceiling) < 0.0

    def _change(self, window: Window, new: Setting, kind: Kind, why: str) -> Step:
        """Puts a setting into force; nothing else changes before it is."""
        if self._shares_turn(new.shares):
            self._reversed_s = window.end_s
        if self._ceiling_turns(new.ceiling):
            self._ceiling_reversed_s = window.end_s
        self._directions |= directions(self.setting.shares, new.shares)
        rise = new.ceiling - self.setting.ceiling
        self._ceiling_direction = _sign(rise) or self._ceiling_direction
        self._number += 1
        revision = ShareRevision(
            pool=self._pool,
            number=self._number,
            at_s=window.end_s,
            kind=kind,
            old=self.setting,
            new=new,
            why=why,
        )
        if kind == "step":
            self._changes.append(revision)
        self.setting, self._applied_s, self._slow_windows = new, None, 0
        self._attainment.begin_anew()
        return Step(revision=revision)


def _sign(value: float) -> int:
    return (value > 0.0) - (value < 0.0)


def _alike(one: Window, other: Window, *, within: float) -> bool:
    """Whether as much was offered to each class, as a share of all: another mix brings another output."""
    offered = [{name: each.offered_s for name, each in window.classes.items()} for window in (one, other)]
    apart_s = max((abs(offered[0].get(n, 0.0) - offered[1].get(n, 0.0)) for n in offered[0] | offered[1]), default=0.0)
    return apart_s <= within * other.offered_s
