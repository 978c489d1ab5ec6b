"""Trial: the judge of a canary, from the records of the `policy` topic and the counts of both arms.

What it says are records, to be written to that topic; read back, or by another life of the judge, they are the state.
"""

from tokenfleet.core.canary import Judgement, judged
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.arms import Arms
from tokenfleet.core.policy import Policy, newer_policy
from tokenfleet.core.revisions import (
    CanaryReport,
    PolicyLog,
    PolicyRecord,
    PolicyRevision,
    check_covers,
    promotion_of,
    rollback_to,
)

PROMOTED_BY = "automatic promotion"
ROLLED_BACK_BY = "automatic rollback"


class Judge:
    """Knows the policy in force with its file `toml`, and the trial beside it with its arms, if there is one."""

    def __init__(self, policy: Policy, toml: str) -> None:
        self.policy = policy
        self.arms: Arms | None = None
        self._toml = toml
        self._log = PolicyLog()
        self._unusable = ""
        self._decided: tuple[CanaryReport, PolicyRevision] | None = None  # a verdict stands

    def hear(self, record: PolicyRecord, *, at_s: float) -> None:
        """`at_s` is when the log took it. Raises PolicyError for a revision that can't be used: nothing changes."""
        if not isinstance(record, PolicyRevision) or record.revision <= self.policy.revision:
            return
        if not record.is_canary:
            policy = newer_policy(self.policy, revision=record.revision, toml=record.toml) or self.policy
            self._log.hear(record, at_s=at_s)
            self.policy, self._toml = policy, record.toml
        elif record.revision > self._log.greatest:
            self._log.hear(record, at_s=at_s)
            self._unusable = self._why_unusable(record)
        else:
            return
        self._follow()

    def due(self, *, complete_s: float, at_wall_s: float) -> tuple[CanaryReport, PolicyRevision | None] | None:
        """How the trial stands, with the revision that ends it if it is to end; None without a trial.

        `complete_s` is the event time up to which the counts are complete, `at_wall_s` labels the records.
        """
        canary, arms = self._log.canary, self.arms
        if canary is None or arms is None:
            return None
        if self._decided is not None:
            return self._decided
        base, tried = arms.of[self.policy.revision], arms.of[canary.revision]
        elapsed_s = max(0.0, complete_s - self._log.canary_at_s)
        judgement = (
            Judgement("rolled_back", self._unusable)
            if self._unusable
            else judged(base, tried, elapsed_s=elapsed_s, for_s=canary.canary_for_s)
        )
        report = CanaryReport(
            base=base.figures(self.policy.revision),
            canary=tried.figures(canary.revision),
            elapsed_s=elapsed_s,
            for_s=canary.canary_for_s,
            verdict=judgement.verdict,
            reason=judgement.reason,
            at_wall_s=at_wall_s,
        )
        if (end := self._end(canary, judgement, at_wall_s)) is None:
            return report, None
        self._decided = report, end
        return self._decided

    def _end(self, canary: PolicyRevision, judgement: Judgement, at_wall_s: float) -> PolicyRevision | None:
        reason = judgement.reason
        match judgement.verdict:
            case "running":
                return None
            case "promoted":
                return promotion_of(canary, by=PROMOTED_BY, reason=reason, at_wall_s=at_wall_s)
            case "rolled_back":
                return rollback_to(self._toml, canary, by=ROLLED_BACK_BY, reason=reason, at_wall_s=at_wall_s)

    def _why_unusable(self, canary: PolicyRevision) -> str:
        """Why replicas refuse the canary, empty if they don't."""
        try:
            policy = newer_policy(self.policy, revision=canary.revision, toml=canary.toml)
            check_covers(policy or self.policy, self.policy)
        except PolicyError as error:
            return str(error)
        return ""

    def _follow(self) -> None:
        """Arms of the present trial; those of the same trial go on."""
        canary = self._log.canary
        self._decided = None
        if canary is None:
            self.arms = None
        elif self.arms is None or self.arms.of.keys() != {self.policy.revision, canary.revision}:
            self.arms = Arms(base=self.policy.revision, canary=canary.revision, since_s=self._log.canary_at_s)
