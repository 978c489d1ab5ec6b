"""Order: who of one class goes first, until when a request can start, and when it has waited long enough."""

import numpy as np

from tokenfleet.core.policy import ClassQueue, PacingPolicy, RequestClass
from tokenfleet.core.tokenpilot.held import Waiting

OUTPUT_TOKEN_S = 0.06  # assumed of an output token when a deadline is counted back


def first_rank(queue: ClassQueue, now_s: float) -> float | None:
    """The rank that goes first: guarded requests that can still make it go before those that can't."""
    return now_s if queue.role == "guarded" else None


def is_overdue(waiting: Waiting, now_s: float) -> bool:
    """It has waited for as long as its gateway can."""
    return now_s - waiting.since_s >= waiting.request.wait_max_s


def is_late(waiting: Waiting, queue: ClassQueue, now_s: float) -> bool:
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


def rank_of(waiting: Waiting, queue: ClassQueue, pacing: PacingPolicy) -> float:
    """Least first, on the clock of `since_s`."""
    if queue.role == "reserving":
        return waiting.came_s + pacing.ageing * waiting.work_s
    return waiting.latest_start_s
