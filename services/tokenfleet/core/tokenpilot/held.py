"""Held: requests that wait at their gateway until an instance is near enough to idle (late binding).

A request that is bound at once waits behind whatever its engine was given before, in the engine's order. A held one
keeps its choice of instance, and the fleet its choice of order: least work first, but for those that are nearly due
(due.py), with ageing, so that cache hits go at once and misses don't starve. On each first token and every 50 ms the
first in that order are planned over virtual backlogs, and those whose best instance is open go out.
"""

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator

import numpy as np
from msgspec import Struct

from tokenfleet.core.asked import Asked, Steps, Turn
from tokenfleet.core.columns import SECONDS_MAX, Floats, Labels
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import LateBindingPolicy, RequestClass, TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.slomax.quota import Charge
from tokenfleet.core.slomax.returns import Standing
from tokenfleet.core.tokenpilot.cost import dense_work_s, kv_pressure_s, reuse_price
from tokenfleet.core.tokenpilot.due import Due, rank

PERIOD_S = 0.05  # between two plans without a first token
LOOKED_AT_MAX_S = 0.25  # a held prompt's cached prefixes are looked up anew at least as often
GAIN = 0.005  # the last two hundred reports tell
OTHERS_HEARD_S = 60.0

Look = Callable[[Request], Floats]  # the cached tokens of a prompt, by slot of its pool
Call = tuple[str, int]  # a held request's id and attempt


class Waiting(Struct, kw_only=True, eq=False):
    """One held request: its least work (seconds) on any instance and its cached tokens on each, as of `looked_s`.

    `charge` is what it took from its tenant's quota and keeps, `output_tokens` the likely (q50) length of its output.
    `hits` are by slot of the instances that `labels` name. `latest_start_s` is when its prefill must begin at the
    latest to meet what is agreed, ∞ if nothing is, `joined_ns` its class's virtual time and `position` its place when
    it came; the class queues set them. `standing` is from before, by its return ticket.
    """

    request: Request
    steps: Steps
    request_class: str
    charge: Charge
    since_s: float
    work_s: float = 0.0
    output_tokens: float = 0.0
    hits: Floats
    labels: Labels
    looked_s: float
    latest_start_s: float = math.inf
    joined_ns: int = 0
    position: int = 1
    standing: Standing = Standing()

    @property
    def came_s(self) -> float:
        """Since when it has stood in line, also while it was sent away."""
        return self.since_s - self.standing.stood_s

    def look(self, look: Look, labels: Labels, now_s: float) -> None:
        """Looks its cached prefixes up anew, if that is due or the instances are others."""
        if now_s - self.looked_s >= LOOKED_AT_MAX_S or self.labels is not labels:
            self.hits, self.labels, self.looked_s = look(self.request), labels, now_s

    @property
    def call(self) -> Call:
        return self.request.id, self.request.attempt


def waiting_of(asked: Asked) -> Waiting:
    """The request as it waits, from now on."""
    request, pool = asked.request, asked.pool
    hits = np.zeros(len(pool)) if pool.columns.hits is None else pool.columns.hits
    work_s = dense_work_s(np.array([[float(request.prompt_tokens)]]), hits[None, :], pool)
    return Waiting(
        request=request,
        steps=asked.steps,
        request_class=asked.classified.request_class,
        charge=asked.charge,
        since_s=asked.now_s,
        work_s=float(work_s.min(initial=SECONDS_MAX)),
        output_tokens=asked.output_q50,
        hits=hits,
        labels=pool.columns.labels,
        looked_s=asked.now_s,
        standing=asked.standing,
    )


class Held:
    """The requests that one replica holds, by model."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Call, Waiting]] = {}
        self._due: defaultdict[str, Due] = defaultdict(Due)
        self._told_share = 1.0
        self._lag_s = 0.0
        self._others_heard_s = -math.inf

    def heard_first_token(self, model: str, *, ttft_s: float, lag_s: float | None) -> None:
        """A first token came `ttft_s` after the request, and was reported `lag_s` after it came (None: unknown)."""
        self._due[model].heard(ttft_s)
        if lag_s is not None:
            self._lag_s += GAIN * (max(lag_s, 0.0) - self._lag_s)

    def heard_end(self, *, told: bool) -> None:
        """A request ended that had a first token; `told`: it was reported when it came."""
        self._told_share += GAIN * (told - self._told_share)

    def heard_another(self, now_s: float) -> None:
        """Another replica placed something: it releases work that this one can't see."""
        self._others_heard_s = now_s

    def off(self, weights: TokenPilotPolicy, now_s: float) -> str:
        """Why nothing is held here at present, empty if it may be."""
        terms = weights.late
        if not terms.enabled:
            return "late binding is off"
        if weights.rule != "cost":
            return f"the rule {weights.rule} holds nothing back"
        if now_s - self._others_heard_s <= OTHERS_HEARD_S:
            return "another replica places too, and there is one queue or none"
        if self._told_share < terms.events_share_min:
            return f"{self._told_share:.0%} of requests report their first token, {terms.events_share_min:.0%} must"
        if self._lag_s * terms.lags_in_backlog > terms.backlog_max_s:
            return f"first tokens are reported {self._lag_s:.2f} s late"
        return ""

    @property
    def lag_s(self) -> float:
        """How late first tokens are reported, lately."""
        return self._lag_s

    def open_s(self, terms: LateBindingPolicy) -> float:
        """The backlog up to which an instance is open: the least that is still there when a late report arrives."""
        return min(terms.backlog_max_s, max(terms.backlog_min_s, self._lag_s * terms.lags_in_backlog))

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __contains__(self, call: Call) -> bool:
        return any(call in waiting for waiting in self._waiting.values())

    def models(self) -> tuple[str, ...]:
        """Models that any request is held for."""
        return tuple(self._waiting)

    def of(self, model: str) -> Collection[Waiting]:
        """All that are held of a model."""
        return self._waiting.get(model, {}).values()

    def of_class(self, model: str, request_class: str) -> int:
        """How many of a model and class are held."""
        return sum(waiting.request_class == request_class for waiting in self._waiting.get(model, {}).values())

    def ahead_s(
        self, model: str, request_class: str, classes: dict[str, RequestClass], *, came_s: float = math.inf
    ) -> float:
        """Σ least work of the held of a model that came before `came_s` and whose class is as urgent as this one, or
        more."""
        rank = classes[request_class].rank
        as_urgent = {name for name, terms in classes.items() if terms.rank <= rank}
        held = self._waiting.get(model, {}).values()
        return sum(w.work_s for w in held if w.request_class in as_urgent and w.came_s < came_s)

    def by_tenant(self) -> Counter[str]:
        """How many are held of each tenant."""
        return Counter(w.request.tenant for waiting in self._waiting.values() for w in waiting.values())

    def put(self, waiting: Waiting) -> None:
        self._waiting.setdefault(waiting.request.model, {})[waiting.call] = waiting

    def take(self, call: Call) -> Waiting | None:
        """The request of that id and attempt is held no longer: it goes out, or its caller left."""
        for model, waiting in self._waiting.items():
            if (found := waiting.pop(call, None)) is not None:
                if not waiting:
                    del self._waiting[model]
                return found
        return None

    def work_s(self, model: str) -> float:
        """Σ least work of the held."""
        return sum(waiting.work_s for waiting in self._waiting.get(model, {}).values())

    def goes_first(self, request: Request, work_s: float, now_s: float, terms: LateBindingPolicy) -> bool:
        """Whether a request of so much work that comes now would be the first in order."""
        place = self._place(terms, now_s, request.model)
        own = rank(work_s, request.elapsed_s, self._due[request.model].due_s, terms)
        return all(own <= place(waiting) for waiting in self._waiting.get(request.model, {}).values())

    def turns(
        self, pool: PoolView, look: Look, weights: TokenPilotPolicy, now_s: float
    ) -> Iterator[tuple[Waiting, Turn]]:
        """The held requests of the pool's model whose turn it is now, in order. Between two of them the caller `take`s
        the one that goes out; what it leaves counts as ahead of those behind. From an empty pool only those go that
        have waited for as long as they can: it may be filled again."""
        terms, columns, open_s = weights.late, pool.columns, self.open_s(weights.late)
        held = self._waiting.get(pool.model, {})
        overdue = [w for w in held.values() if now_s - w.since_s >= w.request.wait_max_s]
        usable = columns.usable() & ~np.isnan(columns.backlog_s)
        backlog_s = np.where(usable, columns.backlog_s, np.inf)
        if not overdue and not (backlog_s <= open_s).any():
            return
        if not len(columns):
            yield from [(waiting, Turn(overdue=True)) for waiting in overdue]
            return
        first = heapq.nsmallest(terms.planned_max, held.values(), key=self._place(terms, now_s, pool.model))
        planned = [*overdue, *[w for w in first if w not in overdue]] if overdue else first
        for waiting in planned:
            waiting.look(look, columns.labels, now_s)
        prompts = np.array([[float(w.request.prompt_tokens)] for w in planned])
        work_s = dense_work_s(prompts, np.array([w.hits for w in planned]), pool)
        for waiting, least_s in zip(planned, work_s.min(axis=1).tolist(), strict=True):
            waiting.work_s = least_s
        held_s = self.work_s(pool.model) / len(columns)
        price = reuse_price(columns.behind_s, held_s, weights)
        kv_use = np.nan_to_num((columns.kv_held + prompts) / np.maximum(columns.fixed.kv_total, 1.0))
        cost_s = (1.0 + price) * work_s + kv_pressure_s(kv_use, weights)
        ahead_s = np.zeros(len(columns))
        for number, waiting in enumerate(planned):
            slot = int((backlog_s + ahead_s + cost_s[number]).argmin())
            late = number < len(overdue)
            if late or backlog_s[slot] + ahead_s[slot] <= open_s:
                yield waiting, Turn(ahead_s=ahead_s.copy(), held_s=held_s, overdue=late)
                if waiting.call not in held:
                    backlog_s[slot] += work_s[number, slot]
                    continue
            ahead_s[slot] += work_s[number, slot]
            if number + 1 >= len(overdue) and not (backlog_s + ahead_s <= open_s).any():
                return

    def _place(self, terms: LateBindingPolicy, now_s: float, model: str) -> Callable[[Waiting], float]:
        """The place of a held request of the model in the order, as of now."""
        due_s = self._due[model].due_s
        return lambda w: rank(w.work_s, w.request.elapsed_s + now_s - w.since_s, due_s, terms)
