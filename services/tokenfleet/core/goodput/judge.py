"""Judge: did one execution meet its class's service level.

A term that can't be shown to be met counts as missed, so an unknown value never becomes a success.
"""

from typing import Literal

from msgspec import Struct

from tokenfleet.core.policy import Policy, RequestClass
from tokenfleet.core.records import OutcomeEvent, OutcomeKind

Attained = Literal["met", "missed", "excluded"]
End = OutcomeKind | Literal["lost"]  # `lost`: no terminal event until the sweep
NO_SLO = "no_slo"  # the class under which requests without an agreed term are accounted


class Execution(Struct, frozen=True, kw_only=True):
    """How one attempt ended, as far as it is known; None is unknown, 0 is zero.

    `at_s` is event time (Unix seconds by the broker's clock). `elapsed_s` and `ttft_s` run from the first arrival of
    the logical request. `waste_output_tokens` is what the serving site generated, which counts when the attempt is
    waste. `ran` tells that it reached an instance, `policy_revision` what decided it (0: unknown).
    """

    attempt: int
    end: End
    at_s: float
    request_class: str
    tenant: str
    pool: str
    elapsed_s: float
    ttft_s: float | None = None
    tpot_s: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    waste_output_tokens: int | None = None
    ran: bool = False
    policy_revision: int = 0

    @property
    def streamed(self) -> bool:
        """True once a first token is known to have come."""
        return self.ttft_s is not None or bool(self.output_tokens)

    @property
    def admitted(self) -> bool:
        """False for a refusal, and for one whose time ran out in the queue: offered, but never let in."""
        return self.end != "rejected" and (self.ran or self.end != "timed_out")


def execution_of(event: OutcomeEvent) -> Execution:
    """One attempt as its terminal event alone tells it."""
    return Execution(
        attempt=event.attempt,
        end=event.kind,
        at_s=event.at_wall_s,
        request_class=event.request_class,
        tenant=event.tenant,
        pool=event.pool,
        elapsed_s=event.elapsed_s,
        ttft_s=event.ttft_s,
        tpot_s=event.tpot_s,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        output_tokens=event.output_tokens,
        ran=bool(event.instance),
    )


def terms_of(policy: Policy, request_class: str) -> RequestClass | None:
    """The agreed terms of a class; None when the policy has no such class or the class no term."""
    terms = policy.classes.get(request_class)
    if terms is None or (terms.ttft_s is None and terms.tpot_s is None and terms.deadline_s is None):
        return None
    return terms


def judge(execution: Execution, terms: RequestClass | None, *, tpot_min_tokens: int) -> Attained:
    """What the execution counts for in attainment, if it is the one that decides its logical request."""
    if terms is None:
        return "excluded"
    if execution.end == "finished":
        return "met" if _all_met(execution, terms, tpot_min_tokens) else "missed"
    if execution.end == "cancelled":
        return "excluded" if _was_being_met(execution, terms, tpot_min_tokens) else "missed"
    return "missed"


def _was_being_met(execution: Execution, terms: RequestClass, tpot_min_tokens: int) -> bool:
    if execution.streamed:
        return _all_met(execution, terms, tpot_min_tokens)
    bound = ttft_bound_s(terms, execution.prompt_tokens)
    first_token_due = bound is not None and execution.elapsed_s >= bound
    return not first_token_due and _deadline_met(execution, terms)


def _all_met(execution: Execution, terms: RequestClass, tpot_min_tokens: int) -> bool:
    return (
        _ttft_met(execution, terms) and _tpot_met(execution, terms, tpot_min_tokens) and _deadline_met(execution, terms)
    )


def attained_of(event: OutcomeEvent, policy: Policy) -> Attained:
    """Judge one ended attempt under the terms that its class has now."""
    terms = policy.classes.get(event.request_class)
    return judge(execution_of(event), terms, tpot_min_tokens=policy.goodput.tpot_min_tokens)


def ttft_bound_s(terms: RequestClass, prompt_tokens: int | None) -> float | None:
    """a₀ + a₁·N_in in seconds; None when no first-token term is agreed. An unknown prompt is given no allowance."""
    return terms.ttft_max_s(prompt_tokens or 0)


def _ttft_met(execution: Execution, terms: RequestClass) -> bool:
    bound = ttft_bound_s(terms, execution.prompt_tokens)
    # An answer that wasn't streamed shows its first token at its end: elapsed is an upper bound.
    ttft_s = execution.elapsed_s if execution.ttft_s is None else execution.ttft_s
    return bound is None or ttft_s <= bound


def _tpot_met(execution: Execution, terms: RequestClass, tpot_min_tokens: int) -> bool:
    tokens = execution.output_tokens
    if terms.tpot_s is None or (tokens is not None and tokens < tpot_min_tokens):
        return True
    if execution.tpot_s is not None:
        return execution.tpot_s <= terms.tpot_s
    if tokens is None or execution.ttft_s is None:
        return False
    return (execution.elapsed_s - execution.ttft_s) / (tokens - 1) <= terms.tpot_s


def _deadline_met(execution: Execution, terms: RequestClass) -> bool:
    return terms.deadline_s is None or execution.elapsed_s <= terms.deadline_s
