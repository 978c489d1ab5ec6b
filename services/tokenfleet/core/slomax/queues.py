"""Queues: the requests that wait at the control plane for a pool that several classes share, and who goes next.

Work that is held keeps its place in line by class; work that an engine has been given is served in the engine's order.
So nothing goes out before an instance is nearly free for it (core/slomax/pacing.py). Classes go by rank; inside one,
guarded requests by the latest start that still meets their service level, with those past it behind all others;
reserving ones by least work with ageing; filling ones by latest start.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import count

import numpy as np
from msgspec.structs import replace

from tokenfleet.core.asked import Turn
from tokenfleet.core.policy import ClassQueue, PacingPolicy, Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.allowance import Allowance
from tokenfleet.core.slomax.iterations import Iterations
from tokenfleet.core.slomax.pacing import Pace, open_to, pace_of, price_s, reserved_of
from tokenfleet.core.tokenpilot.cost import dense_work_s
from tokenfleet.core.tokenpilot.held import Call, Look, Waiting

OUTPUT_TOKEN_S = 0.06  # assumed of an output token when a deadline is counted back


class Line:
    """The requests of one class, in an order that time does not change."""

    def __init__(self) -> None:
        self._ordered: list[tuple[float, int, Waiting]] = []
        self._places: dict[Call, tuple[float, int]] = {}
        self._numbers = count()

    def put(self, waiting: Waiting, rank: float) -> None:
        place = (rank, next(self._numbers))
        self._places[waiting.call] = place
        insort(self._ordered, (*place, waiting))

    def take(self, call: Call) -> Waiting | None:
        place = self._places.pop(call, None)
        if place is None:
            return None
        return self._ordered.pop(bisect_left(self._ordered, place))[2]

    def first(self, most: int) -> list[Waiting]:
        return [waiting for _, _, waiting in self._ordered[:most]]

    def from_rank(self, rank: float, most: int) -> list[Waiting]:
        """The first of at least that rank, then those below it, so many in all."""
        at = bisect_left(self._ordered, (rank,))
        chosen = self._ordered[at : at + most]
        return [waiting for _, _, waiting in (*chosen, *self._ordered[: most - len(chosen)][:at])]

    def __contains__(self, call: Call) -> bool:
        return call in self._places

    def __len__(self) -> int:
        return len(self._ordered)


class Queues:
    """What waits for one pool, with what pacing remembers of it."""

    def __init__(self, terms: PacingPolicy, iterations: Iterations) -> None:
        self.allowance = Allowance(terms)
        self._iterations = iterations
        self._lines: dict[str, Line] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def waiting(self) -> dict[str, int]:
        """Waitings by class."""
        return {name: len(line) for name, line in self._lines.items()}

    def __contains__(self, call: Call) -> bool:
        return any(call in line for line in self._lines.values())

    def put(self, waiting: Waiting, policy: Policy) -> None:
        """It waits from now on in the line of its class."""
        terms = policy.classes[waiting.request_class]
        waiting.latest_start_s = latest_start_s(waiting, terms)
        rank = _rank(waiting, terms.queue, policy.slomax.pacing)
        self._lines.setdefault(waiting.request_class, Line()).put(waiting, rank)

    def admit(self, held: Collection[Waiting], policy: Policy) -> None:
        """Lines up all of the `held` that were held before classes had queues."""
        if len(held) != len(self):
            for waiting in held:
                if waiting.call not in self and waiting.request_class in policy.classes:
                    self.put(waiting, policy)

    def take(self, call: Call) -> Waiting | None:
        """The request waits no longer."""
        return next((found for line in self._lines.values() if (found := line.take(call)) is not None), None)

    def at_once(self, waiting: Waiting, pool: PoolView, policy: Policy, now_s: float) -> Turn | None:
        """The turn of a request that comes now, None if it must wait: another of its class goes first, or nothing is
        open to it."""
        if len(self._lines.get(waiting.request_class, ())):
            return None
        waiting.latest_start_s = latest_start_s(waiting, policy.classes[waiting.request_class])
        return self._turn(waiting, self._paced(pool, policy, now_s), policy, now_s)

    def turns(
        self, view: Callable[[], PoolView], look: Look, policy: Policy, now_s: float
    ) -> Iterator[tuple[Waiting, Turn]]:
        """The requests whose turn it is, in order; each must be placed before the next is asked for. `view` is the pool
        as it is then."""
        pool = view()
        pace = self._paced(pool, policy, now_s)
        known = [name for name in self._lines if name in policy.classes]
        for name in sorted(known, key=lambda name: policy.classes[name].rank):
            line, queue = self._lines[name], policy.classes[name].queue
            for waiting in self._in_order(line, queue, policy.slomax.pacing, now_s):
                if not self._any_open(name, pace, queue, policy, waiting, now_s):
                    break
                waiting.look(look, pool.columns.labels, now_s)
                turn = self._turn(waiting, pace, policy, now_s)
                if turn is None:
                    continue
                yield waiting, turn
                if waiting.call not in line:
                    pool = view()
                    pace = self._paced(pool, policy, now_s)

    def _any_open(
        self, name: str, pace: Pace, queue: ClassQueue, policy: Policy, waiting: Waiting, now_s: float
    ) -> bool:
        """Whether any instance is open to the least of requests; a late or overdue one goes in any case."""
        if _is_late(waiting, queue, now_s) or _is_overdue(waiting, now_s):
            return True
        queued = pace.pool.columns.classes_queued.get(name)
        slack_s = waiting.latest_start_s - now_s
        terms = policy.slomax.pacing
        return bool(open_to(pace, queue, queued, 0.0, 0.0, slack_s=slack_s, terms=terms).any())

    def _in_order(self, line: Line, queue: ClassQueue, terms: PacingPolicy, now_s: float) -> list[Waiting]:
        if queue.role == "guarded":
            return line.from_rank(now_s, terms.planned_max)
        return line.first(terms.planned_max)

    def _paced(self, pool: PoolView, policy: Policy, now_s: float) -> Pace:
        terms = policy.slomax.pacing
        self.allowance.advance(terms, now_s)
        recent = self._iterations.recent(pool.columns.labels, terms.window_s)
        pace = pace_of(pool, policy, recent=recent, allowance=self.allowance.share)
        waiting = self._reserving(policy, now_s)
        if waiting and self._filling_slack_s(policy, now_s) > terms.reserve_slack_s:
            reserved = reserved_of(pace, waiting, terms)
            if reserved is not None:
                return replace(pace, reserved=reserved)
        return pace

    def _reserving(self, policy: Policy, now_s: float) -> int:
        """Reserving requests that wait and can still make it."""
        return sum(
            waiting.latest_start_s >= now_s
            for name, line in self._lines.items()
            if name in policy.classes and policy.classes[name].queue.role == "reserving"
            for waiting in line.first(policy.slomax.pacing.planned_max)
        )

    def _filling_slack_s(self, policy: Policy, now_s: float) -> float:
        """Until the first filling request must start; ∞ when none waits."""
        firsts = [
            waiting.latest_start_s - now_s
            for name, line in self._lines.items()
            if name in policy.classes and policy.classes[name].queue.role == "filling"
            for waiting in line.first(1)
        ]
        return min(firsts, default=np.inf)

    def _turn(self, waiting: Waiting, pace: Pace, policy: Policy, now_s: float) -> Turn | None:
        pool, queue, terms = pace.pool, policy.classes[waiting.request_class].queue, policy.slomax.pacing
        if not len(pool):
            return None
        prompt_tokens = float(waiting.request.prompt_tokens)
        work_s = dense_work_s(np.array([[prompt_tokens]]), waiting.hits[None, :], pool)[0]
        uncached = np.maximum(prompt_tokens - waiting.hits, 1.0)
        iterations = np.ceil(uncached / pool.budget_tokens)
        overdue = _is_overdue(waiting, now_s)
        late = _is_late(waiting, queue, now_s) and not overdue
        queued = pool.columns.classes_queued.get(waiting.request_class)
        slack_s = waiting.latest_start_s - now_s
        allowed = open_to(pace, queue, queued, work_s, iterations, slack_s=slack_s, terms=terms)
        if not allowed.any() and not overdue and not late:
            return None
        return Turn(
            ahead_s=np.zeros(len(pool)),
            held_s=0.0,
            overdue=overdue,
            allowed=None if overdue else allowed,
            pace_s=price_s(pace, queue, work_s, iterations, terms),
            late=late,
        )


def _is_overdue(waiting: Waiting, now_s: float) -> bool:
    """It has waited for as long as its gateway can."""
    return now_s - waiting.since_s >= waiting.request.wait_max_s


def _is_late(waiting: Waiting, queue: ClassQueue, now_s: float) -> bool:
    """A reserving request past its latest start: its large prefill would gain nothing and cost the others."""
    return queue.role == "reserving" and now_s > waiting.latest_start_s


def latest_start_s(waiting: Waiting, terms: RequestClass) -> float:
    """When its prefill must begin at the latest to meet what is agreed, on the clock of `since_s`; else ∞."""
    request = waiting.request
    arrived_s = waiting.since_s - request.elapsed_s
    first_s = terms.ttft_max_s(request.prompt_tokens)
    start_s = np.inf if first_s is None else arrived_s + first_s - waiting.work_s
    deadline_s = request.deadline_s if request.deadline_s is not None else terms.deadline_s
    if deadline_s is None:
        return start_s
    return min(start_s, arrived_s + deadline_s - waiting.work_s - waiting.output_tokens * OUTPUT_TOKEN_S)


def _rank(waiting: Waiting, queue: ClassQueue, pacing: PacingPolicy) -> float:
    """Least first, on the clock of `since_s`."""
    if queue.role == "reserving":
        return waiting.since_s + pacing.ageing * waiting.work_s
    return waiting.latest_start_s
