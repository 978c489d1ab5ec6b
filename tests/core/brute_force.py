"""Brute force: TokenPilot's filters and costs, one instance at a time, as tests hold the arrays against."""

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.decision import Candidate, Request
from tokenfleet.core.known import known
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.predict.work import prefill_work_s, uncached_tokens
from tokenfleet.core.tokenpilot.filters import Ask
from tokenfleet.core.view import InstanceView

AGE_NORMAL_S = 2.0  # two scrapes; inflating below it would herd every burst onto whoever was scraped last
AGE_MAX_S = 10.0  # beyond, an instance is suspect anyway; also stands for an unknown age
KV_USE_MAX = 0.98  # keeps the pressure term finite at full KV
SHARE_MIN, SHARE_MAX = 0.01, 10.0
SECONDS_MAX = 1e6  # a load beyond 11 days is a fault of the sender; bounds every sum


class Scale(Struct, frozen=True, kw_only=True):
    """What is the same for all candidates of one request.

    `kv_load_tokens` is prompt plus likely (q50) output; `reuse_price` is μ. The `*_typical` values are the pool's p75,
    assumed where an instance's own is unknown.
    """

    prompt_tokens: int
    kv_load_tokens: float
    reuse_price: float
    backlog_typical_s: float
    context_typical_tokens: float
    kv_use_typical: float
    calibration: PoolCalibration
    budget_tokens: int
    weights: TokenPilotPolicy


def scale_of(
    request: Request, pool: PoolView, policy: Policy, instances: Sequence[InstanceView], *, output_q50: float
) -> Scale:
    """Over the instances that may serve the request. μ = min(max, base + slope · mean backlog): reuse is worth
    more the longer everybody waits."""
    weights = policy.tokenpilot
    kv_load_tokens = request.prompt_tokens + (known(output_q50) or 0.0)
    backlogs_s = [min(b, SECONDS_MAX) for i in instances if (b := known(i.backlog_s)) is not None]
    mean_s = sum(min(i.behind_s, SECONDS_MAX) for i in instances) / len(instances) if instances else 0.0
    cold_s = prefill_work_s(
        uncached_tokens(request.prompt_tokens, 0),
        0,
        decoding=0,
        context_tokens=0.0,
        coefficients=pool.coefficients,
        budget_tokens=pool.budget_tokens,
    )
    return Scale(
        prompt_tokens=request.prompt_tokens,
        kv_load_tokens=kv_load_tokens,
        reuse_price=min(weights.reuse_max, weights.reuse_base + weights.reuse_slope_per_s * mean_s),
        backlog_typical_s=upper_quartile(backlogs_s, otherwise=cold_s),
        context_typical_tokens=upper_quartile((known(i.context_tokens) for i in instances), otherwise=0.0),
        kv_use_typical=upper_quartile((_kv_use(i, kv_load_tokens) for i in instances), otherwise=0.0),
        calibration=pool.calibration,
        budget_tokens=pool.budget_tokens,
        weights=weights,
    )


def weigh(instance: InstanceView, scale: Scale) -> Candidate:
    """All terms of one instance, finite; ttft and cost are ≥ 0, bias and operator's weight alone may be negative."""
    weights, calibration = scale.weights, scale.calibration
    age_s = known(instance.age_s)
    wait_s = _wait_s(instance, scale)
    work_s, saved_s, hit, p_hit = _work(instance, scale)
    # What was learned to come earlier than predicted is taken from the wait: no prompt beats its own prefill.
    bias_s = max(calibration.bias_s, -wait_s) if abs(calibration.bias_s) < SECONDS_MAX else 0.0
    ttft_s = wait_s + work_s + bias_s
    margin_s = weights.margin_weight * spread_s(wait_s + work_s, instance, calibration)
    reuse_s = scale.reuse_price * work_s
    kv_use = _kv_use(instance, scale.kv_load_tokens)
    kv_s = _kv_pressure_s(scale.kv_use_typical if kv_use is None else kv_use, weights)
    decode_s = weights.decode_price_s * instance.decoding
    weight_s = (1.0 / operator_share(instance) - 1.0) * ttft_s  # a share of 2 halves the time that counts
    return Candidate(
        instance=instance.instance,
        cost_s=ttft_s + margin_s + reuse_s + kv_s + decode_s + weight_s,
        ttft_s=ttft_s,
        wait_s=wait_s,
        work_s=work_s,
        bias_s=bias_s,
        margin_s=margin_s,
        reuse_s=reuse_s,
        kv_s=kv_s,
        decode_s=decode_s,
        weight_s=weight_s,
        hit_tokens=hit,
        uncached_tokens=uncached_tokens(scale.prompt_tokens, hit),
        p_hit=p_hit,
        saved_s=saved_s,
        age_s=age_s,
        suspect=instance.suspect or age_s is None,
        kv_use=kv_use,
    )


def spread_s(predicted_s: float, instance: InstanceView, calibration: PoolCalibration) -> float:
    """How far off the prediction may be (p90): ratio · prediction · (1 + age beyond normal / 1 s).

    A queue never makes a prediction surer, whatever was learned: the queued ratio is at least the idle one.
    """
    idle, queued = known(calibration.margin_idle) or 0.0, known(calibration.margin_queued) or 0.0
    ratio = max(idle, queued) if instance.queued > 0 else idle
    age_s = known(instance.age_s)
    old_s = (AGE_MAX_S if age_s is None else min(age_s, AGE_MAX_S)) - AGE_NORMAL_S
    return ratio * predicted_s * (1.0 + max(old_s, 0.0))


def operator_share(instance: InstanceView) -> float:
    """The operator's weight, within bounds; 1 when it is no number. Weight 0 is a filter's matter."""
    share = known(instance.weight)
    return 1.0 if share is None else min(max(share, SHARE_MIN), SHARE_MAX)


def _wait_s(instance: InstanceView, scale: Scale) -> float:
    backlog_s = known(instance.backlog_s)
    if backlog_s is None:
        return scale.backlog_typical_s
    if instance.age_s is None:  # never heard: not idle for all we know
        return max(min(backlog_s, SECONDS_MAX), scale.backlog_typical_s)
    return min(backlog_s, SECONDS_MAX)


def _work(instance: InstanceView, scale: Scale) -> tuple[float, float, int, float]:
    """Expected work, seconds saved by the cache, tokens of the hit and its chance.

    The prefix is there with chance p: p · work(hit) + (1 − p) · work(0). So a warm instance beats an idle cold one
    iff p · seconds saved > extra wait + extra margin.
    """
    context = known(instance.context_tokens)
    context_tokens = scale.context_typical_tokens if context is None else context

    def seconds(hit: int) -> float:
        return prefill_work_s(
            uncached_tokens(scale.prompt_tokens, hit),
            hit,
            decoding=instance.decoding,
            context_tokens=context_tokens,
            coefficients=scale.calibration.coefficients,
            budget_tokens=scale.budget_tokens,
        )

    cold_s = min(seconds(0), SECONDS_MAX)
    hit = min(max(instance.hit_tokens, 0), scale.prompt_tokens)
    if hit == 0:
        return cold_s, 0.0, 0, 0.0
    p_hit = min(known(instance.p_hit) or 0.0, 1.0)
    saved_s = p_hit * max(cold_s - seconds(hit), 0.0)
    return cold_s - saved_s, saved_s, hit, p_hit


def _kv_use(instance: InstanceView, load_tokens: float) -> float | None:
    """Projected share of the instance's KV once the request is there; None when held or total is unknown."""
    total, held = known(instance.kv_total_tokens), known(instance.kv_held_tokens)
    return (held + load_tokens) / total if total and held is not None else None


def _kv_pressure_s(use: float, weights: TokenPilotPolicy) -> float:
    """slope · max(0, use − knee) + λ · use / (1 − use): the nearer KV is to full, the likelier a preemption."""
    capped = min(use, KV_USE_MAX)
    return weights.kv_slope_s * max(0.0, min(use, 2.0) - weights.kv_knee) + weights.kv_lambda_s * capped / (
        1.0 - capped
    )


def upper_quartile(values: Iterable[float | None], *, otherwise: float) -> float:
    have = sorted(value for value in values if value is not None)
    return have[math.ceil(0.75 * len(have)) - 1] if have else otherwise


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
