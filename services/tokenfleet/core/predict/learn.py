"""Learn: what one pool's outcomes teach about its predictions, published as its calibration."""

from collections import OrderedDict

from tokenfleet.core.accounts import PoolCalibration
from tokenfleet.core.policy import Model, TokenPilotPolicy
from tokenfleet.core.predict.coefficients import CoefficientLearner
from tokenfleet.core.predict.margin import Bias, HitChance, Margin
from tokenfleet.core.predict.sample import FirstTokens, Sample, Span, span_alone
from tokenfleet.core.predict.work import decode_iteration_s, prior_coefficients
from tokenfleet.core.records import PlacedOn

INSTANCES_MAX = 4096  # bounds memory; the instance unheard for longest goes first


class PoolLearner:
    """Coefficients, bias, margins and chance of hits of one pool.

    Feed first tokens in the order of their clock; a sample is learned from when the next first token of its instance
    shows what else its last iteration computed, so the newest of each instance is always held back.
    """

    def __init__(self, pool: str, model_name: str, *, model: Model, policy: TokenPilotPolicy) -> None:
        self._pool = pool
        self.model_name = model_name
        self._budget_tokens = model.budget_tokens
        self._prior = prior = prior_coefficients(model, factor=1.0)
        self._coefficients = CoefficientLearner(prior, start_factor=policy.unlearned_factor)
        self._bias = Bias()
        default = PoolCalibration(pool=pool, model=model_name, coefficients=prior)
        self._margin_idle = Margin(default.margin_idle)
        self._margin_queued = Margin(default.margin_queued)
        self._hits = HitChance(
            {"exact": policy.p_hit_events, "none": default.p_hit_dispatch, "approx": policy.p_hit_approx}
        )
        self._streams: OrderedDict[tuple[str, str], FirstTokens] = OrderedDict()

    def began_from(self, model: Model) -> bool:
        """Whether `model` describes the engines as they were described at the start."""
        return self._prior == prior_coefficients(model, factor=1.0) and self._budget_tokens == model.budget_tokens

    def observe(self, sample: Sample) -> None:
        """One first token. Margins, bias and hits count at once, work when it is known to have been alone."""
        placed = sample.placed
        self._judge(placed, sample.first_token_s - sample.dispatched_s)
        if sample.cached_tokens is not None:
            self._hits.observe(placed.kv_state, credited_tokens=placed.hit_tokens, cached_tokens=sample.cached_tokens)
        if not sample.clock:
            if placed.queued == 0:
                self._learn(span_alone(sample, budget_tokens=self._budget_tokens))
            return
        stream = self._streams.setdefault((sample.instance, sample.clock), FirstTokens(self._budget_tokens))
        self._streams.move_to_end((sample.instance, sample.clock))
        if len(self._streams) > INSTANCES_MAX:
            self._streams.popitem(last=False)
        if (span := stream.add(sample)) is not None:
            self._learn(span)

    def calibration(self) -> PoolCalibration:
        return PoolCalibration(
            pool=self._pool,
            model=self.model_name,
            coefficients=self._coefficients.coefficients(),
            bias_s=self._bias.value_s(),
            margin_idle=self._margin_idle.value(),
            margin_queued=self._margin_queued.value(),
            p_hit=self._hits.value("exact"),
            p_hit_dispatch=self._hits.value("none"),
            p_hit_approx=self._hits.value("approx"),
        )

    def _judge(self, placed: PlacedOn, actual_s: float) -> None:
        predicted_s = placed.wait_s + placed.work_s
        if not (predicted_s > 0.0 and 0.0 <= actual_s < float("inf")):
            return
        margin = self._margin_queued if placed.queued else self._margin_idle
        margin.observe(abs(actual_s - predicted_s - placed.bias_s) / predicted_s)
        if not placed.queued:
            self._bias.observe(actual_s, wait_s=placed.wait_s, work_s=placed.work_s)

    def _learn(self, span: Span) -> None:
        seconds = span.seconds
        if span.from_rest:
            seconds -= 0.5 * decode_iteration_s(
                decoding=span.decoding,
                context_tokens=span.context_tokens,
                coefficients=self._coefficients.coefficients(),
            )
        self._coefficients.observe(span, seconds=seconds)
