"""SLOMax: may this request run now, wait, come later, or not at all?

Checks in order, the first that fails answers: the tenant's class and model, instances, context length, quota, deadline,
the class's concurrent requests, its backlog and its share of the pool where it has no queue, the feasibility gate where
the policy has one. Only the first two hold when the product is switched off: they are rights, not load. Failure mode:
closed for rights, open for load: a wait, KV size or age that nobody knows refuses nothing.
"""

from random import Random

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.columns import Slots
from tokenfleet.core.decision import Admission, Reason, Request, Verdict
from tokenfleet.core.policy import Policy, RequestClass
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import decode_iteration_s, prefill_work_s, uncached_tokens
from tokenfleet.core.slomax.budget import bounded_tokens
from tokenfleet.core.slomax.classify import Classification
from tokenfleet.core.slomax.feasible import Ahead, Gate
from tokenfleet.core.slomax.quota import Charge
from tokenfleet.core.slomax.retry import retry_after_s
from tokenfleet.core.slomax.returns import Kept
from tokenfleet.core.tokenpilot.filters import refusal_of

NOTHING_KEPT = Kept()
DEFER_SLACK_SHARE = 0.5  # a deferred job comes back with at least half of its slack left


class Ruling(Struct, frozen=True, kw_only=True):
    """SLOMax's answer: `admission` is its evidence, `detail` says for a refusal what exists or what to do. `waits`: it
    had better wait, if its gateway can."""

    verdict: Verdict
    reason: Reason = ""
    admission: Admission
    detail: str = ""
    waits: bool = False


class Room(Struct, frozen=True, kw_only=True):
    """What a class finds in a pool now: its concurrent requests against their bound, and the shortest way through.

    `wait_s` is the least predicted wait, `work_s` the prefill where the most is cached, `output_s` the time of the
    median output at the pace of the instance that decodes least: so many sequences, with so much context.
    `instances` are those that could serve.
    """

    instances: int
    running: int
    bound: int
    wait_s: float
    work_s: float
    output_s: float
    decoding: float
    context_tokens: float

    @property
    def stay_s(self) -> float:
        """All of it, from now to the likely end."""
        return self.wait_s + self.work_s + self.output_s


def admit(
    request: Request,
    classified: Classification,
    pool: PoolView,
    policy: Policy,
    *,
    charge: Charge,
    held: int = 0,
    held_s: float = 0.0,
    queues: bool = False,
    kept: Kept = NOTHING_KEPT,
    kept_free: str = "",
    full: str = "",
    gate: Gate | None = None,
    rtt_s: float = 0.0,
    output_q50_tokens: float,
    output_q90_tokens: float,
    rng: Random,
) -> Ruling:
    """The ruling on one request at the pool of its site.

    `charge` is what the tenant's quota said (quota.Quotas.charge); the caller refunds it unless the verdict is admit.
    `held` requests of the class wait to be bound to an instance of the pool: they have their places among its running.
    `held_s` is the work of all that are held and go before it, `rtt_s` the way to the client; both are for the `gate`,
    None where it is not to be asked. `queues`: what finds no room waits in the queue of its class. `kept` are places of
    others, who were told to come again, `kept_free` says why the request must leave room, `full` why its class may take
    no more of the pool now. Output estimates are learned ones, cut here at the caller's budget. `rng` spreads
    Retry-After. Raises UnknownModelError and UnknownTenantError for names that the policy lacks.
    """
    terms = policy.classes[classified.request_class]
    evidence = Admission(
        request_class=classified.request_class,
        rule=classified.rule,
        output_q50_tokens=bounded_tokens(output_q50_tokens, request.max_tokens),
        output_q90_tokens=bounded_tokens(output_q90_tokens, request.max_tokens),
    )
    if (forbidden := barred(request, classified, policy)) or not policy.products.slomax:
        return Ruling(
            verdict="reject" if forbidden else "admit",
            reason="filtered_by_policy" if forbidden else "",
            admission=evidence,
            detail=forbidden or "slomax is off: admitted unseen",
        )
    columns, usable = pool.columns, pool.columns.usable().nonzero()[0]
    if not len(usable):
        removed = columns.availabilities()
        listed = ", ".join(f"{n} {name}" for name, n in removed.items()) or "none known"
        return _rejected(refusal_of(removed), evidence, f"no instance of {request.model} can serve: {listed}")
    need_tokens = request.prompt_tokens + max(request.max_tokens, 1)  # without a budget one token must fit
    told_tokens = columns.fixed.context_max[usable]
    context_tokens = np.where(np.isnan(told_tokens), policy.model(request.model).context_max_tokens, told_tokens)
    most_tokens = int(context_tokens.max())
    if need_tokens > most_tokens:
        return _rejected("context_too_long", evidence, f"{need_tokens} tokens needed, context holds {most_tokens}")
    room = _room(request, usable, pool, terms, evidence, held=held)
    evidence = replace(evidence, running=room.running, bound=room.bound, kept=kept.places)
    if charge.refused:
        wait_s = charge.retry_after_s if charge.retry_after_s is not None else _first_end_s(room)
        return _rejected("quota", replace(evidence, retry_after_s=retry_after_s(wait_s, policy, rng)), charge.refused)
    slack_s = _slack_s(request, terms, room)
    # A prediction may be wrong: where there is a gate it is that which refuses on one.
    if slack_s is not None and slack_s + (0.0 if gate is None else room.stay_s) < 0.0:
        if slack_s + room.wait_s >= 0.0:  # an idle pool could serve it
            evidence = replace(evidence, retry_after_s=retry_after_s(-slack_s, policy, rng))
        return _rejected("infeasible", evidence, f"the deadline passes {-slack_s:.1f} s before the likely end")
    if queues:
        ruling = Ruling(verdict="admit", admission=evidence)
    else:
        ruling = _by_load(
            evidence, room, terms, policy, kept=kept, kept_free=kept_free, full=full, slack_s=slack_s, rng=rng
        )
    if gate is None or ruling.verdict != "admit":
        return ruling
    ahead = _ahead(request, evidence, room, terms, pool, held_s=held_s, rtt_s=rtt_s)
    judged = gate.judge(request.id, ahead)
    evidence = replace(evidence, gate=judged.answer, gate_why=judged.why, chance=judged.chance)
    if judged.answer == "reject":
        evidence = replace(evidence, retry_after_s=retry_after_s(ahead.wait_s, policy, rng))
        return _rejected("infeasible", evidence, judged.why)
    return Ruling(verdict="admit", admission=evidence, waits=judged.answer == "queue")


def barred(request: Request, classified: Classification, policy: Policy) -> str:
    """Why the tenant may not ask this at all, whatever the load (class or model not open to it); else empty."""
    allowed = policy.tenant(request.tenant).models
    if classified.refused or not allowed or request.model in allowed:
        return classified.refused
    return f"model {request.model!r} is not open to the tenant; it may use {', '.join(sorted(allowed))}"


def _by_load(
    evidence: Admission,
    room: Room,
    terms: RequestClass,
    policy: Policy,
    *,
    kept: Kept,
    kept_free: str,
    full: str,
    slack_s: float | None,
    rng: Random,
) -> Ruling:
    """Room now: admit. None: a job with a deadline comes later if it still can make it, all others are all_busy."""
    wait_s = room.wait_s + kept.work_s / room.instances
    others = f", with those {kept.places} who were told to come again" if kept.places else ""
    if room.running + kept.places >= room.bound:
        name = evidence.request_class
        problem = f"{room.running} {name} requests running, {room.bound} allowed on {room.instances} ready{others}"
        free_in_s = (room.running + kept.places + 1 - room.bound) * _first_end_s(room)
    elif wait_s > terms.backlog_max_s:
        problem = f"the least wait is {wait_s:.1f} s{others}, the class may wait {terms.backlog_max_s:.1f} s"
        free_in_s = wait_s + room.work_s - terms.backlog_max_s  # an instance drains 1 s a second
    elif kept_free:
        problem, free_in_s = kept_free, _first_end_s(room)
    elif full:
        problem, free_in_s = full, _first_end_s(room)
    else:
        return Ruling(verdict="admit", admission=evidence)
    if terms.ttft_s is None and slack_s is not None and slack_s * DEFER_SLACK_SHARE > policy.slomax.retry_after_max_s:
        later_s = min(max(free_in_s, policy.slomax.retry_after_max_s), slack_s * DEFER_SLACK_SHARE)
        return Ruling(
            verdict="defer",
            reason="all_busy",
            admission=replace(evidence, not_before_s=later_s),
            detail=f"{problem}; {slack_s:.0f} s of slack to the deadline",
        )
    return _rejected("all_busy", replace(evidence, retry_after_s=retry_after_s(free_in_s, policy, rng)), problem)


def _room(
    request: Request, usable: Slots, pool: PoolView, terms: RequestClass, evidence: Admission, *, held: int
) -> Room:
    columns = pool.columns
    most = 0.0 if columns.hits is None else float(columns.hits[usable].max())
    hit = int(min(most, request.prompt_tokens))
    decoding, contexts = columns.decoding[usable], np.nan_to_num(columns.context_tokens[usable])
    least = float(decoding.min())  # the calmest instance: fewest decodes, of those the least context
    context_tokens = float(contexts[decoding == least].min())
    pace_s = decode_iteration_s(decoding=least + 1, context_tokens=context_tokens, coefficients=pool.coefficients)
    wait_s = float(np.fmin.reduce(columns.backlog_s[usable], initial=np.inf))
    running = columns.classes.get(evidence.request_class)
    return Room(
        instances=len(usable),
        running=held + (0 if running is None else int(running[usable].sum())),
        bound=terms.running_max_per_instance * len(usable),
        wait_s=wait_s if wait_s < np.inf else 0.0,  # no wait known at all vetoes nothing
        work_s=prefill_work_s(
            uncached_tokens(request.prompt_tokens, hit),
            hit,
            decoding=least,
            context_tokens=context_tokens,
            coefficients=pool.coefficients,
            budget_tokens=pool.budget_tokens,
        ),
        output_s=evidence.output_q50_tokens * pace_s,
        decoding=least,
        context_tokens=context_tokens,
    )


def _slack_s(request: Request, terms: RequestClass, room: Room) -> float | None:
    """Seconds between the likely end and the deadline, None without one.

    Judged on the good side (least wait, best hit, median output at the calmest pace): a wrong early reject costs a
    request that could have been served, a wrong admission only its own tokens.
    """
    deadline_s = request.deadline_s if request.deadline_s is not None else terms.deadline_s
    if deadline_s is None:
        return None
    return deadline_s - request.elapsed_s - room.stay_s


def _ahead(
    request: Request,
    evidence: Admission,
    room: Room,
    terms: RequestClass,
    pool: PoolView,
    *,
    held_s: float,
    rtt_s: float,
) -> Ahead:
    """What lies ahead on the good side, as `_slack_s` judges, but for its own part in the pace."""
    own_tokens = request.prompt_tokens + evidence.output_q50_tokens
    return Ahead(
        wait_s=room.wait_s + held_s / room.instances,
        prefill_s=room.work_s,
        elapsed_s=request.elapsed_s,
        rtt_s=rtt_s,
        tpot_s=decode_iteration_s(
            decoding=room.decoding + 1,
            context_tokens=room.context_tokens + own_tokens,
            coefficients=pool.coefficients,
        ),
        output_q50_tokens=evidence.output_q50_tokens,
        output_q90_tokens=evidence.output_q90_tokens,
        ttft_max_s=terms.ttft_max_s(request.prompt_tokens),
        tpot_max_s=terms.tpot_s,
        deadline_s=request.deadline_s if request.deadline_s is not None else terms.deadline_s,
    )


def _first_end_s(room: Room) -> float:
    """Expected time until one of the class's running requests ends: one median stay over their number."""
    return (room.work_s + room.output_s) / max(1, room.running)


def _rejected(reason: Reason, evidence: Admission, detail: str) -> Ruling:
    return Ruling(verdict="reject", reason=reason, admission=evidence, detail=detail)
