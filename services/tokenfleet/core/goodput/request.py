"""LogicalRequest: what all that was heard of one logical request adds up to.

Its postings are a function of the *set* of events heard, so duplicates, reordering and replay can't change them; a new
event replaces the old postings by new ones (a retraction and an addition).
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from tokenfleet.core.goodput.arms import Settled
from tokenfleet.core.goodput.judge import Attained, Execution, judge, terms_of, ttft_bound_s
from tokenfleet.core.goodput.labels import class_label, pool_label, tenant_label
from tokenfleet.core.policy import Policy
from tokenfleet.core.records import TERMINAL_KINDS, OutcomeEvent

Counts = tuple[tuple[str, int], ...]


class Posting(NamedTuple):
    """Counts for the row of every window that holds `at_s` (event time); names are columns of GoodputRow."""

    at_s: float
    request_class: str
    tenant: str
    pool: str
    counts: Counts


class Heard(NamedTuple):
    """One event and its event time. A `late` one counts only in `late_dropped`, where it was heard (`at_s`).

    `from_origin` tells that the origin reported it; the serving site may report the same execution too.
    """

    event: OutcomeEvent
    at_s: float
    from_origin: bool
    late: bool

    @property
    def rank(self) -> tuple[bool, float, float, float]:
        """Of two copies of one event the lesser rank is kept, whichever came first."""
        return (self.late, self.event.at_wall_s, self.event.elapsed_s, self.at_s)


class Account(NamedTuple):
    """The postings of a request, and the event time at which it is to be forgotten, or else swept."""

    postings: tuple[Posting, ...]
    due_s: float
    forget: bool


class LogicalRequest:
    """The events of one logical request, one for each (attempt, kind, reporter's role)."""

    def __init__(self) -> None:
        self._heard: dict[tuple[int, str, bool], Heard] = {}
        self.postings: tuple[Posting, ...] = ()  # what stands in the rows now
        self.due_s = math.inf  # of the account that stands
        self.forget = False

    def hear(self, heard: Heard) -> bool:
        """Take one event in; False if it was known."""
        key = (heard.event.attempt, heard.event.kind, heard.from_origin)
        known = self._heard.get(key)
        if known is not None and known.rank <= heard.rank:
            return False
        self._heard[key] = heard
        return True

    def account(self, policy: Policy, watermark_s: float) -> Account:
        """What the request counts for when attempts silent since `watermark_s` − open_sweep_s are taken for lost."""
        executions, open_attempts = self._executions(policy.goodput.open_sweep_s, watermark_s)
        settled = not open_attempts
        postings = (
            *_settlement(executions, policy, settled=settled),
            *_waste(executions, policy),
            *self._cohort(executions, policy, settled=settled),
            *self._late(policy),
        )
        if open_attempts:
            return Account(postings, min(open_attempts.values()), False)
        last_s = max(
            *(heard.at_s for heard in self._heard.values()), *(execution.at_s for execution in executions), 0.0
        )
        return Account(postings, last_s + policy.goodput.settled_keep_s, True)

    def settled(self, policy: Policy, watermark_s: float) -> Settled | None:
        """How it ended, for the trial of a policy; None while that is open and its level may be met."""
        executions, open_attempts = self._executions(policy.goodput.open_sweep_s, watermark_s)
        decided = _decided(executions, settled=not open_attempts)
        known = [heard for heard in self._heard.values() if not heard.late]
        if not known:
            return None
        if decided is None:
            if not self.misses_at_s(policy) <= watermark_s:
                return None
            last = max(known, key=lambda heard: (heard.event.attempt, heard.rank)).event
            return Settled(
                revision=last.policy_revision,
                arrived_s=_arrived_s(known),
                request_class=last.request_class,
                end="open",
                attained="missed",
                ttft_s=None,
            )
        return Settled(
            revision=decided.policy_revision,
            arrived_s=_arrived_s(known),
            request_class=decided.request_class,
            end=decided.end,
            attained=_attained(decided, policy),
            ttft_s=decided.ttft_s,
        )

    def misses_at_s(self, policy: Policy) -> float:
        """The event time from which it can't meet its level any more if nothing more is heard of it; infinite if it has
        no level, or one that nothing but its end can show missed."""
        known = [heard for heard in self._heard.values() if not heard.late]
        terms = terms_of(policy, known[0].event.request_class) if known else None
        if terms is None:
            return math.inf
        within_s = math.inf if terms.deadline_s is None else terms.deadline_s
        bound_s = ttft_bound_s(terms, _prompt_tokens(known))
        if bound_s is not None and not any(_first_token_s(heard.event) <= bound_s for heard in known):
            within_s = min(within_s, bound_s)
        return _arrived_s(known) + within_s

    def _executions(self, sweep_s: float, watermark_s: float) -> tuple[list[Execution], dict[int, float]]:
        """Ended attempts, and of the open ones the event time at which they will be swept."""
        ended: list[Execution] = []
        open_attempts: dict[int, float] = {}
        for attempt in sorted({key[0] for key in self._heard}):
            events = [heard for key, heard in self._heard.items() if key[0] == attempt]
            known = [heard for heard in events if not heard.late]
            terminals = [heard for heard in known if heard.event.kind in TERMINAL_KINDS]
            sweep_at_s = max((heard.at_s for heard in known), default=0.0) + sweep_s
            if terminals:
                ended.append(_execution(known, _deciding(terminals)))
            elif any(heard.event.kind in TERMINAL_KINDS for heard in events):
                continue  # its end came too late to be counted, but it did end
            elif known and sweep_at_s <= watermark_s:
                ended.append(_lost(known, at_s=sweep_at_s))
            elif known:
                open_attempts[attempt] = sweep_at_s
        return ended, open_attempts

    def _cohort(self, executions: list[Execution], policy: Policy, *, settled: bool) -> Iterable[Posting]:
        known = [heard for heard in self._heard.values() if not heard.late]
        if not known:
            return
        first = min(known, key=lambda heard: (heard.event.elapsed_s, heard.at_s))
        decided = _decided(executions, settled=settled)
        labels = decided or _execution(known, first)
        attained = _attained(decided, policy) if decided else None
        if attained == "excluded":
            return
        counts: Counts = (
            (("offered_arrived", 1), ("met_arrived", 1)) if attained == "met" else (("offered_arrived", 1),)
        )
        yield _posting(labels, policy, first.at_s - first.event.elapsed_s, counts)

    def _late(self, policy: Policy) -> Iterable[Posting]:
        for heard in self._heard.values():
            if heard.late:
                yield _posting(heard.event, policy, heard.at_s, (("late_dropped", 1),))


def _arrived_s(known: list[Heard]) -> float:
    return min(heard.at_s - heard.event.elapsed_s for heard in known)


def _prompt_tokens(known: list[Heard]) -> int | None:
    """As reported, else as believed when it was placed."""
    reported = _first_known(None, (heard.event.prompt_tokens for heard in known))
    placed = (heard.event.placed for heard in known)
    return _first_known(reported, (each.hit_tokens + each.uncached_tokens for each in placed if each is not None))


def _first_token_s(event: OutcomeEvent) -> float:
    """Seconds from arrival to the first token, infinite for an event that tells of none."""
    if event.ttft_s is not None:
        return event.ttft_s
    return event.elapsed_s if event.kind == "first_token" else math.inf


def _settlement(executions: list[Execution], policy: Policy, *, settled: bool) -> Iterable[Posting]:
    decided = _decided(executions, settled=settled)
    if decided is None:
        return
    if not decided.admitted:
        yield _posting(decided, policy, decided.at_s, (("rejected", 1),))
        return
    attained = _attained(decided, policy)
    counts = [(str(attained), 1)]
    if decided.end == "finished":
        unagreed = terms_of(policy, decided.request_class) is None
        column = "goodput_tokens" if attained == "met" or unagreed else "waste_tokens"
        counts += _tokens(decided.output_tokens, column)
    yield _posting(decided, policy, decided.at_s, tuple(counts))


def _waste(executions: list[Execution], policy: Policy) -> Iterable[Posting]:
    """All that was generated by attempts other than the first success."""
    success = _first_success(executions)
    for execution in executions:
        if execution is success or execution.end == "rejected" or not execution.ran:
            continue
        tokens = execution.output_tokens if execution.waste_output_tokens is None else execution.waste_output_tokens
        counts = _tokens(tokens, "waste_tokens")
        if not execution.streamed and execution.prompt_tokens is not None and execution.cached_tokens is not None:
            counts.append(("prefill_waste_tokens", max(0, execution.prompt_tokens - execution.cached_tokens)))
        yield _posting(execution, policy, execution.at_s, tuple(counts))


def _tokens(tokens: int | None, column: str) -> list[tuple[str, int]]:
    return [("unknown_tokens_requests", 1)] if tokens is None else [(column, tokens), ("output_tokens", tokens)]


def _decided(executions: list[Execution], *, settled: bool) -> Execution | None:
    """The execution that speaks for the logical request; None while an attempt is still open and none succeeded."""
    if success := _first_success(executions):
        return success
    if not settled or not executions:
        return None
    admitted = [execution for execution in executions if execution.admitted]
    return max(admitted or executions, key=lambda execution: (execution.at_s, execution.attempt))


def _first_success(executions: list[Execution]) -> Execution | None:
    successes = (execution for execution in executions if execution.end == "finished")
    return min(successes, key=lambda execution: (execution.at_s, execution.attempt), default=None)


def _attained(decided: Execution, policy: Policy) -> Attained:
    terms = terms_of(policy, decided.request_class)
    return judge(decided, terms, tpot_min_tokens=policy.goodput.tpot_min_tokens)


def _posting(of: Execution | OutcomeEvent, policy: Policy, at_s: float, counts: Counts) -> Posting:
    request_class, tenant = class_label(of.request_class, policy), tenant_label(of.tenant, policy)
    return Posting(at_s, request_class, tenant, pool_label(of.pool, policy), counts)


def _deciding(terminals: list[Heard]) -> Heard:
    """The origin's word goes first, since it measured what the client saw; then a success, then the earliest."""
    return min(terminals, key=lambda heard: (not heard.from_origin, heard.event.kind != "finished", *heard.rank))


def _execution(known: list[Heard], end: Heard) -> Execution:
    """One attempt as its deciding event tells it, completed by what earlier events knew."""
    event = end.event
    same_word = (heard.event for heard in known if heard.from_origin == end.from_origin)
    first_token = next((other for other in same_word if other.kind == "first_token"), None)
    ttft_s = event.ttft_s
    if ttft_s is None and first_token is not None:
        ttft_s = first_token.elapsed_s if first_token.ttft_s is None else first_token.ttft_s
    at_site = [heard.event for heard in known if not heard.from_origin and heard.event.kind in TERMINAL_KINDS]
    waste = [other.output_tokens for other in at_site if other.output_tokens is not None]
    return Execution(
        attempt=event.attempt,
        end=event.kind,
        at_s=end.at_s,
        request_class=event.request_class,
        tenant=event.tenant,
        pool=event.pool or next((heard.event.pool for heard in known if heard.event.pool), ""),
        elapsed_s=event.elapsed_s,
        ttft_s=ttft_s,
        tpot_s=event.tpot_s,
        prompt_tokens=_first_known(event.prompt_tokens, (heard.event.prompt_tokens for heard in known)),
        cached_tokens=_first_known(event.cached_tokens, (heard.event.cached_tokens for heard in known)),
        output_tokens=event.output_tokens,
        waste_output_tokens=max(waste, default=None),
        ran=bool(event.instance)
        or any(heard.event.placed is not None for heard in known)
        or any(heard.event.kind not in ("rejected", "cancelled", "timed_out") for heard in known),
        policy_revision=max(heard.event.policy_revision for heard in known),
    )


def _lost(known: list[Heard], *, at_s: float) -> Execution:
    """An attempt without an end: its last progress is a measured lower bound of what it generated."""
    last = max(known, key=lambda heard: (heard.at_s, heard.rank))
    execution = _execution(known, last)
    tokens = max((heard.event.output_tokens for heard in known if heard.event.output_tokens is not None), default=None)
    return Execution(
        attempt=execution.attempt,
        end="lost",
        at_s=at_s,
        request_class=execution.request_class,
        tenant=execution.tenant,
        pool=execution.pool,
        elapsed_s=execution.elapsed_s,
        ttft_s=execution.ttft_s,
        prompt_tokens=execution.prompt_tokens,
        cached_tokens=execution.cached_tokens,
        output_tokens=tokens,
        ran=True,
        policy_revision=execution.policy_revision,
    )


def _first_known(value: int | None, others: Iterable[int | None]) -> int | None:
    return value if value is not None else max((other for other in others if other is not None), default=None)
