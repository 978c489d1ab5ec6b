"""Filters: which instances may take this request at all, and what removed the others.

Hard filters leave a typed refusal when they leave nothing. A soft filter that would leave nothing is lifted and
named; the ones behind it still count, so that no more is given up than must be.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tokenfleet.core.decision import Candidate, Reason, Request
from tokenfleet.core.policy import Policy, RequestClass
from tokenfleet.core.tokenpilot.known import known
from tokenfleet.core.view import InstanceView, PoolView


class Ask(Struct, frozen=True, kw_only=True):
    """One request as the filters see it: `kv_need_tokens` is prompt plus the cautious (q90) output estimate.

    `ttft_max_s` is what the service level leaves of the time to first token from dispatch, None if not agreed.
    """

    model: str
    digests: tuple[str, ...]
    request_class: str
    terms: RequestClass
    context_tokens: int
    prompt_tokens: int
    context_max_tokens: int
    kv_need_tokens: float
    seats_max: int
    ttft_max_s: float | None
    last_instance: str


def ask_of(
    request: Request,
    pool: PoolView,
    policy: Policy,
    *,
    request_class: str,
    output_q90: float,
    network_s: float,
    last_instance: str,
) -> Ask:
    """Raises UnknownModelError for a model that the policy lacks, KeyError for a class that it lacks."""
    model, terms = policy.model(request.model), policy.classes[request_class]
    agreed_s = terms.ttft_max_s(request.prompt_tokens)
    ttft_max_s = None if agreed_s is None else agreed_s - request.elapsed_s - network_s
    return Ask(
        model=request.model,
        digests=model.digests,
        request_class=request_class,
        terms=terms,
        # Engines refuse prompt + max_tokens beyond their context; without a budget one token must fit.
        context_tokens=request.prompt_tokens + max(request.max_tokens, 1),
        prompt_tokens=request.prompt_tokens,
        context_max_tokens=model.context_max_tokens,
        kv_need_tokens=request.prompt_tokens + (known(output_q90) or 0.0),
        seats_max=pool.seats_max,
        ttft_max_s=ttft_max_s,
        last_instance=last_instance,
    )


# What a refusal says when a filter of that name removed the last instance, and how near its instances came to
# serving: the reason of the nearest speaks (waiting helps the one behind a full instance, nothing else does).
REFUSALS: dict[str, tuple[int, Reason]] = {
    "class_full": (3, "all_busy"),
    "seats_full": (3, "all_busy"),
    "kv_full": (3, "all_busy"),
    "half_open": (3, "all_busy"),
    "context": (2, "context_too_long"),
    "model": (1, "filtered_by_policy"),
    "revision": (1, "filtered_by_policy"),
    "quarantined": (1, "filtered_by_policy"),
    "weight": (1, "filtered_by_policy"),
    "draining": (0, "no_instances"),
    "starting": (0, "no_instances"),
    "sleeping": (0, "no_instances"),
    "out": (0, "no_instances"),
}


def removed_by(instance: InstanceView, ask: Ask) -> str:
    """Name of the first hard filter that removes the instance, a key of REFUSALS; empty when it may serve."""
    if instance.model != ask.model:
        return "model"
    if ask.digests and instance.model_digest not in ask.digests:
        return "revision"  # also when it tells none: a listed revision is demanded, not assumed
    if instance.availability != "ready" and not _keeps_its_session(instance, ask):
        return instance.availability
    if instance.weight == 0.0:
        return "weight"
    if not _context_fits(instance, ask):
        return "context"
    if instance.probe and instance.queued > 0:
        return "half_open"  # one request at a time until one succeeds
    if instance.class_running.get(ask.request_class, 0) >= ask.terms.running_max_per_instance:
        return "class_full"
    if instance.queued + instance.decoding + (known(instance.foreign) or 0.0) >= ask.seats_max:
        return "seats_full"
    if not _kv_fits(instance, ask):
        return "kv_full"
    return ""


def refusal_of(excluded: dict[str, int]) -> Reason:
    """Why nothing is left, from the counts of the hard filters; `no_instances` for a pool without any."""
    return max((REFUSALS[name] for name in excluded), default=(0, "no_instances"))[1]


Weighed = tuple[InstanceView, Candidate]


def soften(weighed: Sequence[Weighed], ask: Ask) -> tuple[Sequence[Weighed], dict[str, str], tuple[str, ...]]:
    """The soft filters in their order: who is left (never nobody), what removed each other one, names of the lifted."""
    removed: dict[str, str] = {}
    relaxed: list[str] = []
    left = weighed
    for name, passes in SOFT_FILTERS:
        passing = [pair for pair in left if passes(*pair, ask)]
        if not passing:
            relaxed.append(name)
        elif len(passing) < len(left):
            kept = {instance.instance for instance, _ in passing}
            removed |= {instance.instance: name for instance, _ in left if instance.instance not in kept}
            left = passing
    return left, removed, tuple(relaxed)


def trusted(instance: InstanceView) -> bool:
    """False for a suspect: agent silent, age unknown, or a load that is no number. It is chosen last."""
    return not instance.suspect and known(instance.age_s) is not None and known(instance.backlog_s) is not None


def count(names: Iterable[str]) -> dict[str, int]:
    """How many of each name, in the order of first sight."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def _keeps_its_session(instance: InstanceView, ask: Ask) -> bool:
    return instance.availability == "draining" and instance.instance == ask.last_instance


def _context_fits(instance: InstanceView, ask: Ask) -> bool:
    if ask.context_tokens > (instance.context_max_tokens or ask.context_max_tokens):
        return False
    kv_total = known(instance.kv_total_tokens)
    return not kv_total or ask.prompt_tokens < kv_total  # else it could never be admitted, however empty


def _kv_fits(instance: InstanceView, ask: Ask) -> bool:
    kv_total, kv_held = known(instance.kv_total_tokens), known(instance.kv_held_tokens)
    if not kv_total or not kv_held:
        return True  # unknown vetoes nothing, and an empty instance takes whatever its context permits
    return kv_held + ask.kv_need_tokens <= kv_total


def _is_trusted(instance: InstanceView, candidate: Candidate, ask: Ask) -> bool:
    return trusted(instance)


def _unpressed(instance: InstanceView, candidate: Candidate, ask: Ask) -> bool:
    if candidate.wait_s > ask.terms.backlog_max_s:
        return False
    kv_total, kv_held = known(instance.kv_total_tokens), known(instance.kv_held_tokens)
    if not kv_total or kv_held is None:
        return True
    return kv_held + ask.kv_need_tokens <= ask.terms.kv_share_max * kv_total


def _within_slo(instance: InstanceView, candidate: Candidate, ask: Ask) -> bool:
    return ask.ttft_max_s is None or candidate.ttft_s <= ask.ttft_max_s


SOFT_FILTERS: tuple[tuple[str, Callable[[InstanceView, Candidate, Ask], bool]], ...] = (
    ("confidence", _is_trusted),
    ("pressure", _unpressed),
    ("slo", _within_slo),
)
