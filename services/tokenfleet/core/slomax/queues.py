"""Queues: the requests that wait at the control plane for a pool that several classes share, and who goes next.

Work that is held keeps its place in line by class; work that an engine has been given is served in the engine's order.
So nothing goes out before an instance is nearly free for it (core/slomax/pacing.py). Classes go by rank, but none is
passed over for ever (core/slomax/floor.py); inside one, tenants by their fair shares (core/slomax/fair.py); of one
tenant guarded requests by the latest start that still meets their service level, with those past it behind all others,
reserving ones by least work with ageing, filling ones by latest start. Who uses more than its share of the pool goes
behind all others, whatever the class, as filling work does, and not at all while others' reserving requests wait
(core/slomax/usage.py).
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Set
from itertools import islice
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from tokenfleet.core.asked import Turn
from tokenfleet.core.decision import Place
from tokenfleet.core.goodput.judge import attained_of
from tokenfleet.core.policy import ClassQueue, Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import decode_iteration_s
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.core.slomax.allowance import Allowance
from tokenfleet.core.slomax.fair import Fair
from tokenfleet.core.slomax.fair import Waiting as InLine
from tokenfleet.core.slomax.floor import Floor
from tokenfleet.core.slomax.iterations import Iterations
from tokenfleet.core.slomax.line import Line
from tokenfleet.core.slomax.order import first_rank, is_late, is_overdue, latest_start_s, rank_of
from tokenfleet.core.slomax.pacing import Pace, has_room, open_to, pace_of, price_s, reserved_of
from tokenfleet.core.slomax.quota import entry_of
from tokenfleet.core.slomax.usage import Usage
from tokenfleet.core.slomax.waits import Waits
from tokenfleet.core.tokenpilot.cost import dense_work_s
from tokenfleet.core.tokenpilot.held import Call, Look, Waiting

CHARGES_MAX = 100_000  # what runs of one pool; the oldest is taken for as long as predicted


class _Charge(NamedTuple):
    """What a placed request was charged, in GPU seconds, and the prices of a token to prefill and of one to decode."""

    request_class: str
    tenant: str
    seconds: float
    prefill_s: float
    output_s: float


class Queues:
    """What waits for one pool, with what pacing and fairness remember of it."""

    def __init__(self, policy: Policy, iterations: Iterations, late_s: Callable[[], float]) -> None:
        """`late_s` tells how late first tokens are heard of."""
        self.allowance = Allowance(policy.slomax.pacing)
        self._iterations = iterations
        self._late_s = late_s
        self._lines: dict[str, Line] = {}
        self._fairs: dict[str, Fair] = {}
        self._floor = Floor(policy.slomax.fair)
        self._usage = Usage()
        self._waits: defaultdict[str, Waits] = defaultdict(Waits)
        self._charges: OrderedDict[str, _Charge] = OrderedDict()  # by decision

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, call: Call) -> bool:
        return any(call in line for line in self._lines.values())

    def follow(self, policy: Policy) -> None:
        """Another policy is in force."""
        self._floor.terms = policy.slomax.fair
        for fair in self._fairs.values():
            fair.follow(policy.slomax.fair, policy.tenants, default_tenant=policy.default_tenant)

    def full(self, tenant: str, policy: Policy, *, kept: int = 0) -> bool:
        """Whether no more of the tenant's can wait: all that may wait do, and it has its even part of them. `kept` of
        their places are others'."""
        most = policy.slomax.pacing.waiting_max - kept
        if len(self) < most:
            return False
        entry = entry_of(tenant, policy)
        own = sum(line.count(entry) for line in self._lines.values())
        return own * len(self._tenants() | {entry}) >= most

    def put(self, waiting: Waiting, policy: Policy, now_s: float) -> Place:
        """It waits from now on in the line of its class, at this place."""
        terms = policy.classes[waiting.request_class]
        waiting.latest_start_s = latest_start_s(waiting, terms)
        waiting.joined_ns = self.virtual_ns(waiting.request_class, policy, before_ns=waiting.standing.virtual_ns)
        tenant = entry_of(waiting.request.tenant, policy)
        rank = rank_of(waiting, terms.queue, policy.slomax.pacing)
        line = self._lines.setdefault(waiting.request_class, Line())
        line.put(waiting, rank, tenant)
        waiting.position = _position(line, waiting.call, terms.queue, now_s)
        return self._place(waiting.request_class, waiting.position)

    def virtual_ns(self, request_class: str, policy: Policy, *, before_ns: int | None = None) -> int:
        """The virtual time at which a request of the class joins now, or joined before."""
        now_ns = self._fair(request_class, policy).virtual_ns
        return now_ns if before_ns is None else min(before_ns, now_ns)

    def place(self, call: Call, policy: Policy, now_s: float) -> Place | None:
        """Where a request stands in the line of its class, None if it is in none."""
        for name, line in self._lines.items():
            if call in line and name in policy.classes:
                return self._place(name, _position(line, call, policy.classes[name].queue, now_s))
        return None

    def admit(self, held: Collection[Waiting], policy: Policy, now_s: float) -> None:
        """Lines up all of the `held` that were held before classes had queues."""
        if len(held) != len(self):
            for waiting in held:
                if waiting.call not in self and waiting.request_class in policy.classes:
                    self.put(waiting, policy, now_s)

    def take(self, call: Call) -> Waiting | None:
        """The request waits no longer."""
        return next((found for line in self._lines.values() if (found := line.take(call)) is not None), None)

    def went(self, waiting: Waiting, decision: str, pool: PoolView, policy: Policy, now_s: float) -> None:
        """The request waits no longer, it was placed by that decision: its tenant and its class are charged for it."""
        name, tenant = waiting.request_class, waiting.request.tenant
        if (waited_s := now_s - waiting.since_s) > 0.0:
            self._waits[name].went(position=waiting.position, waited_s=waited_s)
        line = self._lines.get(name, ())
        output_s = output_price_s(pool)
        seconds = waiting.work_s + waiting.output_tokens * output_s
        self._fair(name, policy).dispatched(tenant, seconds, joined_ns=waiting.joined_ns, waiting=len(line))
        others = [each for each, its in self._lines.items() if len(its)]
        self._floor.dispatched(name, seconds, waiting=others)
        self._usage.spent(entry_of(tenant, policy), seconds, policy.slomax.fair, now_s)
        uncached = max(waiting.request.prompt_tokens - float(waiting.hits.max(initial=0.0)), 1.0)
        self._charges[decision] = _Charge(name, tenant, seconds, waiting.work_s / uncached, output_s)
        if len(self._charges) > CHARGES_MAX:
            self._charges.popitem(last=False)

    def settled(self, event: OutcomeEvent, policy: Policy, now_s: float) -> None:
        """What was placed by that decision has ended: what it cost is corrected by what was computed for it. Whether a
        request of a guarded class got what was agreed steers what the others may cost it."""
        terms = policy.classes.get(event.request_class)
        if terms is not None and terms.queue.role == "guarded":
            attained = attained_of(event, policy)
            if attained != "excluded" and entry_of(event.tenant, policy) not in self.over(policy, now_s):
                self.allowance.settled(met=attained == "met", now_s=now_s)
        charge = self._charges.pop(event.decision, None)
        if charge is None or event.output_tokens is None or event.prompt_tokens is None:
            return  # what it cost is unknown: the prediction stands
        computed = event.prompt_tokens - (event.cached_tokens or 0)
        actual_s = computed * charge.prefill_s + event.output_tokens * charge.output_s
        if (fair := self._fairs.get(charge.request_class)) is not None:
            fair.settled(charge.tenant, predicted_s=charge.seconds, actual_s=actual_s)
        self._usage.corrected(entry_of(charge.tenant, policy), predicted_s=charge.seconds, actual_s=actual_s)

    def over(self, policy: Policy, now_s: float) -> frozenset[str]:
        """The entries of tenants that use more than their share of the pool."""

        def weight(entry: str) -> float:
            tenant = policy.tenants.get(entry)
            return 1.0 if tenant is None else tenant.weight  # it has left the policy

        return self._usage.over(weight, self._waiting_s, policy.slomax.fair, now_s)

    def at_once(self, waiting: Waiting, pool: PoolView, policy: Policy, now_s: float) -> Turn | None:
        """The turn of a request that comes now, None if it must wait: another of its class goes first, or nothing is
        open to it."""
        over = self.over(policy, now_s)
        terms = policy.classes[waiting.request_class]
        if entry_of(waiting.request.tenant, policy) in over:
            if len(self):
                return None
            terms = _as_filling(terms, policy)
        elif self._ahead(waiting.request_class, over) or self._owed(policy, now_s) - {waiting.request_class}:
            return None
        waiting.latest_start_s = latest_start_s(waiting, policy.classes[waiting.request_class])
        return self._turn(waiting, self._paced(pool, policy, now_s), policy, now_s, terms)

    def turns(
        self, view: Callable[[], PoolView], look: Look, policy: Policy, now_s: float
    ) -> Iterator[tuple[Waiting, Turn]]:
        """The requests whose turn it is, in order; each must be placed before the next is asked for. `view` is the pool
        as it is then."""
        pool = view()
        pace = self._paced(pool, policy, now_s)
        by_rank = sorted(
            (name for name in self._lines if name in policy.classes), key=lambda name: policy.classes[name].rank
        )
        over = self.over(policy, now_s)
        in_order = self._floor.order(by_rank, self._waited_s(policy, now_s))
        within = [(name, self._lines[name].tenants - over) for name in in_order]
        beyond = [(name, self._lines[name].tenants & over) for name in by_rank] if over else []
        for name, tenants in (*within, *beyond):
            line = self._lines[name]
            terms, its_pace = self._terms(name, tenants, pace, policy, now_s)
            for waiting in self._in_order(line, name, policy, now_s, tenants):
                if not self._any_open(name, its_pace, terms, policy, waiting, now_s):
                    break
                waiting.look(look, pool.columns.labels, now_s)
                turn = self._turn(waiting, its_pace, policy, now_s, terms)
                if turn is None:
                    continue
                yield waiting, turn
                if waiting.call not in line:
                    pool = view()
                    pace = self._paced(pool, policy, now_s)
                    terms, its_pace = self._terms(name, tenants, pace, policy, now_s)

    def _terms(
        self, name: str, tenants: Set[str], pace: Pace, policy: Policy, now_s: float
    ) -> tuple[RequestClass, Pace]:
        """The terms of the class and the pace that hold for these tenants: no gate for a class until it has had what it
        is owed; what is beyond a tenant's share waits until no other's reserving request does."""
        terms = policy.classes[name]
        if tenants and tenants <= self.over(policy, now_s):
            if self._reserving(policy, now_s):
                pace = replace(pace, reserved=np.ones(len(pace.pool), np.bool_))
            return _as_filling(terms, policy), pace
        if name in self._owed(policy, now_s):
            terms = replace(terms, queue=replace(terms.queue, gate_share=np.inf))
        return terms, pace

    def _any_open(
        self, name: str, pace: Pace, terms: RequestClass, policy: Policy, waiting: Waiting, now_s: float
    ) -> bool:
        """Whether any instance is open to the least of requests; a late or overdue one goes in any case."""
        if is_late(waiting, terms.queue, now_s) or is_overdue(waiting, now_s):
            return True
        queued = pace.pool.columns.classes_queued.get(name)
        slack_s = waiting.latest_start_s - now_s
        allowed = open_to(pace, terms.queue, queued, 0.0, 0.0, slack_s=slack_s, terms=policy.slomax.pacing)
        return bool((allowed & has_room(pace.pool, terms, name, 0.0)).any())

    def _waited_s(self, policy: Policy, now_s: float) -> dict[str, float]:
        """How long the oldest request of each class that waits has waited."""
        over = self.over(policy, now_s)
        oldest = {name: line.oldest(without=over) for name, line in self._lines.items() if name in policy.classes}
        return {name: now_s - waiting.since_s for name, waiting in oldest.items() if waiting is not None}

    def _owed(self, policy: Policy, now_s: float) -> set[str]:
        """Classes that have been passed over for too long."""
        return {name for name, waited_s in self._waited_s(policy, now_s).items() if self._floor.owed(name, waited_s)}

    def _place(self, name: str, position: int) -> Place:
        q50_s, q90_s = self._waits[name].expected_s(position) or (None, None)
        return Place(position=position, wait_p50_s=q50_s, wait_p90_s=q90_s)

    def _fair(self, name: str, policy: Policy) -> Fair:
        fair = self._fairs.get(name)
        if fair is None:
            terms = policy.slomax.fair
            fair = self._fairs[name] = Fair(terms, policy.tenants, default_tenant=policy.default_tenant)
        return fair

    def _waiting_s(self, tenant: str) -> float:
        """Σ least work of the tenant's that waits."""
        return sum(line.work_s(tenant) for line in self._lines.values())

    def _has_claim(self, waiting: Waiting, policy: Policy, now_s: float) -> bool:
        """Whether it goes out when it is overdue, though nothing is open to it."""
        over = entry_of(waiting.request.tenant, policy) in self.over(policy, now_s)
        return not over and now_s <= waiting.latest_start_s

    def _tenants(self) -> Set[str]:
        """Those of which anything waits."""
        return {tenant for line in self._lines.values() for tenant in line.tenants}

    def _ahead(self, name: str, over: Set[str]) -> bool:
        """Whether any of the class waits that goes before one who comes now."""
        line = self._lines.get(name)
        return line is not None and bool(line.tenants - over)

    def _in_order(self, line: Line, name: str, policy: Policy, now_s: float, tenants: Set[str]) -> list[Waiting]:
        """The first of these tenants in line: tenants by their fair shares, each one's by the order of the class."""
        most, first = policy.slomax.pacing.planned_max, first_rank(policy.classes[name].queue, now_s)
        heads = [(tenant, its) for tenant, its in line.by_tenant(most, rank=first) if tenant in tenants]
        if not heads:
            return []
        if len(heads) == 1:
            return heads[0][1]
        listed = [waiting for _, its in heads for waiting in its]
        ranks = [place for _, its in heads for place, _ in enumerate(its)]
        fair = self._fair(name, policy)
        waiting = [
            InLine(each.request.tenant, each.joined_ns, float(rank), each.work_s)
            for each, rank in zip(listed, ranks, strict=True)
        ]
        return [listed[place] for place in islice(fair.order(waiting), most)]

    def _paced(self, pool: PoolView, policy: Policy, now_s: float) -> Pace:
        terms = policy.slomax.pacing
        self.allowance.advance(terms, now_s)
        recent = self._iterations.recent(pool.columns.labels, terms.window_s)
        pace = pace_of(pool, policy, recent=recent, allowance=self.allowance.share, late_s=self._late_s())
        waiting = self._reserving(policy, now_s)
        if waiting and self._filling_slack_s(policy, now_s) > terms.reserve_slack_s:
            reserved = reserved_of(pace, waiting, terms)
            if reserved is not None:
                return replace(pace, reserved=reserved)
        return pace

    def _reserving(self, policy: Policy, now_s: float) -> int:
        """Reserving requests that wait and can still make it."""
        firsts = self._firsts("reserving", policy.slomax.pacing.planned_max, policy, now_s)
        return sum(waiting.latest_start_s >= now_s for waiting in firsts)

    def _filling_slack_s(self, policy: Policy, now_s: float) -> float:
        """Until the first filling request must start; ∞ when none waits."""
        firsts = self._firsts("filling", 1, policy, now_s)
        return min((waiting.latest_start_s - now_s for waiting in firsts), default=np.inf)

    def _firsts(self, role: str, most: int, policy: Policy, now_s: float) -> Iterator[Waiting]:
        """The first of each tenant within its share that wait in classes of that role."""
        over = self.over(policy, now_s)
        for name, line in self._lines.items():
            if name in policy.classes and policy.classes[name].queue.role == role:
                for tenant, its in line.by_tenant(most):
                    if tenant not in over:
                        yield from its

    def _turn(self, waiting: Waiting, pace: Pace, policy: Policy, now_s: float, terms: RequestClass) -> Turn | None:
        """Its turn under the `terms` that hold for it now, None if nothing is open to it."""
        pool, queue, pacing = pace.pool, terms.queue, policy.slomax.pacing
        if not len(pool):
            return None
        prompt_tokens = float(waiting.request.prompt_tokens)
        work_s = dense_work_s(np.array([[prompt_tokens]]), waiting.hits[None, :], pool)[0]
        uncached = np.maximum(prompt_tokens - waiting.hits, 1.0)
        iterations = np.ceil(uncached / pool.budget_tokens)
        overdue = is_overdue(waiting, now_s)
        late = is_late(waiting, queue, now_s) and not overdue
        queued = pool.columns.classes_queued.get(waiting.request_class)
        slack_s = waiting.latest_start_s - now_s
        allowed = open_to(pace, queue, queued, work_s, iterations, slack_s=slack_s, terms=pacing)
        kv_tokens = prompt_tokens + waiting.output_tokens
        allowed &= has_room(pool, terms, waiting.request_class, kv_tokens)
        shut = not allowed.any()
        if shut and not overdue and not late:
            return None
        return Turn(
            ahead_s=np.zeros(len(pool)),
            held_s=0.0,
            overdue=overdue,
            allowed=None if overdue and shut else allowed,
            pace_s=price_s(pace, queue, work_s, iterations, pacing),
            late=late,
            busy=overdue and shut and not self._has_claim(waiting, policy, now_s),
        )


def _as_filling(terms: RequestClass, policy: Policy) -> RequestClass:
    """The terms of a class for what is beyond its tenant's share."""
    filling = next((each for each in policy.classes.values() if each.queue.role == "filling"), terms)
    gate_share = min(filling.queue.gate_share, policy.slomax.fair.flood_gate_share)
    queue = replace(filling.queue, prefills_max=terms.queue.prefills_max, gate_share=gate_share)
    return replace(terms, queue=queue, kv_share_max=min(terms.kv_share_max, filling.kv_share_max))


def _position(line: Line, call: Call, queue: ClassQueue, now_s: float) -> int:
    return 1 + line.before(call, rank=first_rank(queue, now_s))


def output_price_s(pool: PoolView) -> float:
    """GPU seconds of an output token: its part of an iteration of the pool's mean batch."""
    decoding = max(float(pool.columns.decoding.mean()) if len(pool) else 0.0, 1.0)
    context_tokens = float(np.nan_to_num(pool.columns.context_tokens).mean()) if len(pool) else 0.0
    step_s = decode_iteration_s(decoding=decoding, context_tokens=context_tokens, coefficients=pool.coefficients)
    return step_s / decoding
