"""Output: how many tokens a request will generate, learned per tenant, model and input length.

The budget bounds the estimate and never is it; the true length is never known beforehand.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from tokenfleet.core.accounts import OutputEstimate
from tokenfleet.core.policy import Model
from tokenfleet.core.predict.lengths import Lengths

SHRINK_SAMPLES = 50.0  # an estimate of n samples weighs n / (n + 50) against the wider one
PRIOR_Q90_RATIO = 2.5  # q90 / q50 of the recorded chat and code traces lies between 2 and 3
ROUTES_MAX = 4096  # bounds memory and the feedback message; the route unheard for longest goes first

Key = TypeVar("Key")
Route = tuple[str, str, int]  # tenant, model, input bucket


def input_bucket(prompt_tokens: int) -> int:
    """Powers of two: bucket b holds prompts of [2^(b−1), 2^b) tokens, 0 the empty one."""
    return max(prompt_tokens, 0).bit_length()


class OutputLearner:
    """Output lengths of finished requests, by route, by model and over all."""

    def __init__(self) -> None:
        self._routes: OrderedDict[Route, Lengths] = OrderedDict()
        self._models: OrderedDict[str, Lengths] = OrderedDict()
        self._all = Lengths()

    def observe(self, *, tenant: str, model: str, prompt_tokens: int, output_tokens: int) -> None:
        """One finished request."""
        route = (tenant, model, input_bucket(prompt_tokens))
        for lengths in (_kept(self._routes, route), _kept(self._models, model), self._all):
            lengths.add(output_tokens)

    def estimates(self) -> tuple[OutputEstimate, ...]:
        """What was learned, unshrunk; the readers shrink, since they know the policy's priors."""
        of_routes = [_estimate(lengths, *route) for route, lengths in self._routes.items()]
        of_models = [_estimate(lengths, model=model) for model, lengths in self._models.items()]
        return (*of_routes, *of_models, *([_estimate(self._all)] if self._all.samples else []))


class OutputTable:
    """The learned estimates as decisions read them; replaced whole by each calibration revision."""

    def __init__(self, estimates: Iterable[OutputEstimate] = ()) -> None:
        self._known = {(e.tenant, e.model, e.bucket): e for e in estimates}

    def quantiles(
        self, *, tenant: str, model: str, prior: Model, prompt_tokens: int, budget_tokens: int
    ) -> tuple[float, float]:
        """(q50, q90) in tokens, ≥ 1: the route's, shrunk to its model's, to the fleet's, to the policy's prior.

        `budget_tokens` caps both, 0 when the caller gave none; the model's context caps them in any case.
        """
        q50, q90 = prior.output_tokens_prior, prior.output_tokens_prior * PRIOR_Q90_RATIO
        for key in (("", "", -1), ("", model, -1), (tenant, model, input_bucket(prompt_tokens))):
            if (found := self._known.get(key)) is not None:
                weight = found.samples / (found.samples + SHRINK_SAMPLES)
                q50, q90 = q50 + weight * (found.q50 - q50), q90 + weight * (found.q90 - q90)
        room = max(prior.context_max_tokens - prompt_tokens, 1)
        most = float(min(budget_tokens, room) if budget_tokens > 0 else room)
        return min(max(q50, 1.0), most), min(max(q90, q50, 1.0), most)


def _kept(table: OrderedDict[Key, Lengths], key: Key) -> Lengths:
    lengths = table.setdefault(key, Lengths())
    table.move_to_end(key)
    if len(table) > ROUTES_MAX:
        table.popitem(last=False)
    return lengths


def _estimate(lengths: Lengths, tenant: str = "", model: str = "", bucket: int = -1) -> OutputEstimate:
    return OutputEstimate(
        tenant=tenant,
        model=model,
        bucket=bucket,
        q50=lengths.quantile(0.5),
        q90=lengths.quantile(0.9),
        samples=lengths.samples,
    )
