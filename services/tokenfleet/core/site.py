"""Site: all that one replica knows of its datacenter, and of the others, from the facts on the topics.

The one object with state. `heard` takes a fact in, `pool` joins the tables into what a decision sees, `settled` takes
in how a request went. core.schedule decides on it; the services and the stream processors drive it.
"""

from collections import Counter

from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.accounts import Feedback, PoolCalibration
from tokenfleet.core.capacity import CapacityTable
from tokenfleet.core.columns import Floats
from tokenfleet.core.correction import Corrections
from tokenfleet.core.decision import Request
from tokenfleet.core.duplicates import Duplicates
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.failures import FAILED, Failures
from tokenfleet.core.fleetmind.sends import Sends
from tokenfleet.core.ledger import Ledger
from tokenfleet.core.peers import Peers
from tokenfleet.core.policy import Policy, newer_policy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.pools import Pools
from tokenfleet.core.predict.output import OutputTable
from tokenfleet.core.predict.work import prior_coefficients
from tokenfleet.core.prefix import PrefixIndex
from tokenfleet.core.records import (
    TERMINAL_KINDS,
    CapacityShard,
    Control,
    KvDelta,
    KvSnapshot,
    OutcomeEvent,
    PlacementEnvelope,
    PlacementEvent,
    SiteSummary,
    SketchChunk,
)
from tokenfleet.core.repeats import Repeats
from tokenfleet.core.revisions import CanaryReport, PolicyRecord, PolicyRevision, Trial, check_covers, trial_of
from tokenfleet.core.sessions import Sessions
from tokenfleet.core.settled import change_of
from tokenfleet.core.shard.envelopes import Envelopes
from tokenfleet.core.shard.purse import Purse
from tokenfleet.core.slomax.gates import Gates
from tokenfleet.core.slomax.iterations import Iterations
from tokenfleet.core.slomax.lending import Wanting
from tokenfleet.core.slomax.queues import Queues
from tokenfleet.core.slomax.quota import Quotas, entry_of
from tokenfleet.core.slomax.reserve import Reserves
from tokenfleet.core.slomax.retry import RetryBudgets
from tokenfleet.core.slomax.returns import Returns
from tokenfleet.core.slomax.spending import Spending
from tokenfleet.core.slomax.tickets import Tickets
from tokenfleet.core.tokenpilot.held import Call, Held, Waiting

Fact = (
    CapacityShard
    | KvDelta
    | KvSnapshot
    | PlacementEnvelope
    | Control
    | PolicyRecord
    | Feedback
    | SiteSummary
    | SketchChunk
)


class Heard(Struct, frozen=True, kw_only=True):
    """Where and how a fact was heard: its place in the log, and whether it was read live or while catching up.

    `age_s` is the time since the log took it; only for what ends by itself (a canary), and 0 when read live.
    """

    partition: int = 0
    offset: int = 0
    now_s: float
    live: bool = True
    age_s: float = 0.0


class Site:
    """The tables of the site `name` under one policy."""

    def __init__(self, name: str, policy: Policy, *, policy_hash: str = "", replica: str = "") -> None:
        self.name = name
        self.replica = replica
        self.policy = policy
        self.policy_hash = policy_hash
        self.trial: Trial | None = None
        self.capacity = CapacityTable()
        self.prefix = PrefixIndex()
        self.ledger = Ledger(silent_max_s=policy.ledger.silent_max_s)
        self.corrections = Corrections(self.ledger, policy.ledger)
        self.failures = Failures(policy.liveness)
        self.peers = Peers()
        self.sends = Sends(kept_s=policy.fleetmind.sends_kept_s)
        self.quotas = Quotas()
        self.retries = RetryBudgets(policy.slomax.retry)
        self.returns = Returns()
        self.outputs = OutputTable()
        self.repeats = Repeats(lambda tenant: entry_of(tenant, self.policy))
        self.gates = Gates(policy)
        self.reserves = Reserves(policy)
        self.wanting = Wanting()
        self.spending = Spending()
        self.envelopes = Envelopes()
        self.purse: Purse | None = None
        self.tickets = Tickets()
        self.calibration_revision = 0
        self._calibrations: dict[str, PoolCalibration] = {}
        self.held = Held()
        self.duplicates = Duplicates(self.held, self.ledger)
        self._iterations = Iterations()
        self._queues: dict[str, Queues] = {}
        self._turns: Counter[str] = Counter()  # own placements by model
        self._pools = Pools(
            capacity=self.capacity,
            prefix=self.prefix,
            ledger=self.ledger,
            corrections=self.corrections,
            failures=self.failures,
            policy=policy.liveness,
        )
        self.sessions = Sessions(lambda tenant: entry_of(tenant, self.policy))

    def heard(self, fact: Fact, how: Heard) -> None:
        """Takes a fact in. Facts may come in any order and more than once.

        Raises PolicyError for a policy revision that can't be used; the one in force stays.
        """
        match fact:
            case CapacityShard():
                self._heard_capacity(fact, how)
            case KvDelta() | KvSnapshot():
                self.prefix.apply(fact)
            case PlacementEnvelope():
                if fact.replica != self.replica:
                    self.held.heard_another(how.now_s)
                    for event in fact.events:
                        self.gates.told(event)
                        self.returns.told(event)
                        if event.kind == "placed" and event.entry is not None:
                            self.spending.placed(event.entry, self.policy, how.now_s)
                    if how.live:
                        self.sends.heard(fact.sends, how.now_s)
                self.ledger.hear(fact, partition=how.partition, now_s=how.now_s)
                self.envelopes.read(fact)
            case SiteSummary():
                self.peers.heard_summary(fact, offset=how.offset, now_s=how.now_s, live=how.live)
            case SketchChunk():
                self.peers.heard_sketch(fact)
            case Control():
                self._pools.control(fact)
            case Feedback():
                self._heard_feedback(fact)
            case PolicyRevision():
                self._heard_policy(fact, how)
            case CanaryReport():
                pass  # for people

    def rules(self, request: str, now_s: float) -> tuple[Policy, str]:
        """The policy that decides the logical request, and its hash: the one in force, or the canary if there is one
        and the request falls to it."""
        if (trial := self.trial) is not None and trial.takes(request, now_s):
            return trial.policy, trial.policy_hash
        return self.policy, self.policy_hash

    def policy_of(self, model: str) -> Policy:
        """The policy under which a pool is planned as a whole: the one in force, the canary for a model that only it
        has."""
        trial = self.trial
        only_tried = trial is not None and model not in self.policy.models and model in trial.policy.models
        return trial.policy if trial is not None and only_tried else self.policy

    def pool(
        self, model: str, now_s: float, request: Request | None = None, *, policy: Policy | None = None
    ) -> PoolView:
        """All instances of `model` at this site; with the prefix credit of `request` when given.

        Under `policy`, by default the one in force. Raises UnknownModelError for a model that it lacks.
        """
        policy = policy or self.policy
        terms = policy.model(model)
        name = pool_name(model, self.name)
        calibration = self._calibrations.get(name) or _prior(name, model, policy)
        return PoolView(
            site=self.name,
            pool=name,
            model=model,
            columns=self._pools.columns(model, now_s, calibration, request),
            calibration=calibration,
            budget_tokens=terms.budget_tokens,
            seats_max=terms.seats_max,
            age_s=self.capacity.age_s(now_s),
            turn=self._turns[model],
        )

    def pools(self, now_s: float) -> tuple[PoolView, ...]:
        """The pools of all models of the policy that have an instance here."""
        served = {row.beat.model for row in self.capacity.rows()}
        return tuple(self.pool(model, now_s) for model in sorted(self.policy.models) if model in served)

    def queues(self, model: str) -> Queues:
        """What waits for the model's pool, where its classes share it."""
        found = self._queues.get(model)
        if found is None:
            found = self._queues[model] = Queues(
                self.policy, self._iterations, lambda: max(self.held.lag_s, self.ledger.lag_s)
            )
        return found

    def take(self, call: Call) -> Waiting | None:
        """The request of that id and attempt waits no longer: it goes out, or its caller left."""
        waiting = self.held.take(call)
        if waiting is not None and (queues := self._queues.get(waiting.request.model)) is not None:
            queues.take(call)
        return waiting

    def shares(self, purse: Purse) -> None:
        """From now on pools and quotas are spent from `purse`, where the policy wants books."""
        self.purse = self.quotas.purse = purse
        purse.enabled = self.policy.slomax.shard.enabled

    def hits(self, request: Request) -> Floats:
        """Cached tokens of the request's prompt on each instance, in the order of their names."""
        return self._pools.hits(request)

    def adopt(self, policy: Policy, policy_hash: str = "") -> None:
        """Puts a policy into force, in every table that follows one. Raises PolicyError if it lacks this site."""
        if self.name not in policy.sites:
            raise PolicyError(f"policy revision {policy.revision}: it has no site {self.name!r}")
        self.policy, self.policy_hash = policy, policy_hash
        self.ledger.silent_max_s = policy.ledger.silent_max_s
        self.corrections.policy = policy.ledger
        self.failures.policy = policy.liveness
        self._pools.follow(policy.liveness)
        self.sends.kept_s = policy.fleetmind.sends_kept_s
        self.quotas.retain(frozenset(policy.tenants))
        self.retries.follow(policy)
        self.returns.retain(frozenset(policy.models))
        self.duplicates.follow(policy)
        self.gates.follow(policy)
        self.reserves.follow(policy)
        if self.purse is not None:
            self.purse.enabled = policy.slomax.shard.enabled
        for queues in self._queues.values():
            queues.follow(policy)
        self.peers.retain(frozenset(policy.sites))
        self._keep_trial()

    def running_of(self, entry: str, policy: Policy) -> int:
        """Unfinished placements here, and held requests, of all callers that the entry of `policy` binds, as their
        tenant or as their team."""
        running = self.held.by_tenant() + Counter(self.ledger.running_by_tenant())
        total = 0
        for tenant, count in running.items():
            own = entry_of(tenant, policy)
            if own == entry or (own in policy.tenants and policy.tenants[own].team == entry):
                total += count
        return total

    def placed(
        self, event: PlacementEvent, *, partition: int, session: str, now_s: float, block_keys: bytes = b""
    ) -> None:
        """Counts an own placement at once, before it is read back, with the blocks that it will bring about."""
        self.ledger.apply(event, partition=partition, now_s=now_s)
        if event.kind == "placed":
            self.prefix.expect(event.instance, event.decision, block_keys, now_s=now_s)
        elif event.kind == "first_token":
            self.prefix.came(event.decision, now_s=now_s)
        elif event.kind == "ended" and not self.ledger.has_first_token(event.decision):
            self.prefix.unexpect(event.decision)
        if event.kind != "placed" or event.entry is None:
            return
        self.failures.probed(event.instance, now_s)
        self._turns[event.entry.model] += 1
        self.returns.told(event)
        self.spending.placed(event.entry, self.policy, now_s)
        self.sessions.served(event.entry.tenant, session, instance=event.instance)

    def settled(self, event: OutcomeEvent, *, now_s: float) -> tuple[OutcomeEvent, PlacementEvent | None]:
        """Takes in how a request goes: the event with what was believed, and the ledger's change."""
        entry = self.ledger.entry(event.decision, now_s)
        if entry is not None:
            event = replace(
                event,
                placed=entry.placed,
                predicted_ttft_s=entry.predicted_ttft_s,
                policy_revision=entry.policy_revision,
            )
            if event.kind == "first_token":
                lag_s = entry.age_s - event.attempt_s if event.attempt_s > 0.0 else None
                if not self.ledger.has_first_token(event.decision):
                    self.gates.first_token(entry, actual_s=event.attempt_s or entry.age_s)
                self.held.heard_first_token(entry.model, ttft_s=event.elapsed_s, lag_s=lag_s)
            elif event.kind == "finished":
                self.held.heard_end(told=self.ledger.has_first_token(event.decision))
                self.returns.ended(entry)
        if event.kind in TERMINAL_KINDS and event.model in self._queues and not self.ledger.has_ended(event.decision):
            self._queues[event.model].settled(event, self.policy, now_s)
        if event.kind in TERMINAL_KINDS:
            self.gates.ended(event, now_s=now_s)
            self.duplicates.settled(event, now_s=now_s)
        instance = event.instance or (entry.instance if entry else "")
        # A report sent twice is one failure, and a name that no table lists is nobody's.
        news = not self.ledger.has_ended(event.decision) and self.capacity.row(instance) is not None
        if news and (failed := FAILED.get(event.kind)) is not None:
            self.failures.settled(instance, failed=failed, now_s=now_s)
        return event, change_of(event, entry, instance)

    def advance(self, partition: int, now_s: float, *, live: bool) -> None:
        """Tells that a partition of `placements` is, or is not, being read at its end."""
        self.ledger.advance(partition, now_s, live=live)

    def versions(self, policy_hash: str = "") -> dict[str, str]:
        """The versions of the tables that a decision is made on, under the policy of that hash or the one in force."""
        told = {"policy": (policy_hash or self.policy_hash)[:12], "calibration": str(self.calibration_revision)}
        return self.capacity.versions | told

    def _heard_capacity(self, shard: CapacityShard, how: Heard) -> None:
        before = {row.beat.instance: self.capacity.row(row.beat.instance) for row in shard.rows}
        applied = self.capacity.apply(shard, offset=how.offset, now_s=how.now_s, live=how.live)
        if not applied.accepted:
            return
        for instance in applied.gone:
            self.prefix.drop(instance)
            self.corrections.forget(instance)
            self._iterations.forget(instance)
        for instance in (*applied.gone, *applied.rebooted):
            self.failures.forget(instance)
        for heard in shard.rows:
            if (row := self.capacity.row(heard.beat.instance)) is None:
                continue
            self.prefix.verify(row.beat.instance, row.beat.digest, boot=row.beat.boot, now_s=how.now_s)
            known = before[row.beat.instance]
            anew = known is None or known.order != row.order or known.agent != row.agent
            self.corrections.heard(row, how.now_s)
            beat = row.beat
            self._iterations.heard(beat.instance, boot=beat.boot, count=beat.iterations_total, at_s=row.born_s)
            self._pools.heard(row, anew=anew)

    def _heard_feedback(self, feedback: Feedback) -> None:
        if feedback.revision < self.calibration_revision:
            return
        self.calibration_revision = feedback.revision
        self._calibrations = {pool.pool: pool for pool in feedback.pools}
        self.outputs = OutputTable(feedback.outputs)

    def _heard_policy(self, heard: PolicyRevision, how: Heard) -> None:
        if heard.is_canary:
            if self.trial is None or heard.revision > self.trial.policy.revision:
                trial = trial_of(heard, self.policy, now_s=how.now_s, age_s=how.age_s)
                self.trial = trial or self.trial
            return
        if (policy := newer_policy(self.policy, revision=heard.revision, toml=heard.toml)) is not None:
            self.adopt(policy, heard.sha256)

    def _keep_trial(self) -> None:
        """A canary outlives a change of what is in force only if it is newer and still serves all requests."""
        if (trial := self.trial) is None:
            return
        try:
            check_covers(trial.policy, self.policy)
        except PolicyError:
            self.trial = None
        else:
            self.trial = trial if trial.policy.revision > self.policy.revision else None


def _prior(name: str, model: str, policy: Policy) -> PoolCalibration:
    weights = policy.tokenpilot
    return PoolCalibration(
        pool=name,
        model=model,
        coefficients=prior_coefficients(policy.model(model), factor=weights.unlearned_factor),
        p_hit=weights.p_hit_events,
        p_hit_approx=weights.p_hit_approx,
    )


def pool_name(model: str, site: str) -> str:
    """A pool is a model at a site."""
    return f"{model}@{site}"
