"""Lessons: what outcomes teach decisions, as one calibration revision."""

from collections.abc import Iterable

from tokenfleet.core.accounts import Feedback
from tokenfleet.core.goodput.labels import is_pool
from tokenfleet.core.policy import Policy
from tokenfleet.core.predict.learn import PoolLearner
from tokenfleet.core.predict.output import OutputLearner
from tokenfleet.core.predict.sample import sample_of
from tokenfleet.core.records import OutcomeEvent
from tokenfleet.core.slomax.quota import entry_of

POOLS_MAX = 1024  # bounds the feedback message; pools past it keep the policy's priors


class Lessons:
    """The learners of all pools and of output lengths. Feed each event once, in the order of its log.

    `revision` is the greatest ever published: the next one is greater, so a restart never hands out an old number.
    """

    def __init__(self, *, revision: int = 0) -> None:
        self.revision = revision
        self._pools: dict[str, PoolLearner] = {}
        self._outputs = OutputLearner()

    def observe(self, events: Iterable[OutcomeEvent], policy: Policy) -> None:
        """Events that were not heard before; those of names that the policy lacks teach nothing, and the tenants under
        the default tenant teach as one."""
        for event in events:
            entry = entry_of(event.tenant, policy)
            if event.model not in policy.models or not entry:
                continue
            if event.kind == "first_token":
                self._observe_first_token(event, policy)
            elif event.kind == "finished" and event.prompt_tokens is not None and event.output_tokens is not None:
                self._outputs.observe(
                    tenant=entry,
                    model=event.model,
                    prompt_tokens=event.prompt_tokens,
                    output_tokens=event.output_tokens,
                )

    def follow(self, policy: Policy) -> tuple[str, ...]:
        """Starts over where `policy` has other engines in mind (coefficients, batch budget) or lacks the model: the
        pools that were forgotten. Decisions believe the policy's values until a pool's outcomes have taught anew."""
        forgotten = tuple(
            pool
            for pool, learner in self._pools.items()
            if (model := policy.models.get(learner.model_name)) is None or not learner.began_from(model)
        )
        for pool in forgotten:
            del self._pools[pool]
        return forgotten

    def feedback(self, *, at_wall_s: float) -> Feedback:
        """The next revision; `at_wall_s` labels it."""
        self.revision += 1
        return Feedback(
            revision=self.revision,
            at_wall_s=at_wall_s,
            pools=tuple(learner.calibration() for _, learner in sorted(self._pools.items())),
            outputs=self._outputs.estimates(),
        )

    def _observe_first_token(self, event: OutcomeEvent, policy: Policy) -> None:
        sample, model = sample_of(event), policy.models[event.model]
        if sample is None or not is_pool(event.pool, policy):
            return
        learner = self._pools.get(event.pool)
        if learner is None:
            if len(self._pools) >= POOLS_MAX:
                return
            learner = PoolLearner(event.pool, event.model, model=model, policy=policy.tokenpilot)
            self._pools[event.pool] = learner
        learner.observe(sample)
