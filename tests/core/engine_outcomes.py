"""Engine outcomes: first tokens of simulated engines under a recorded trace, with what a ledger believed of each.

for event in Engines(profile, rows, count=8, seed=1).run(60.0, rate_per_s=11.0, believed=pool.calibration): ...
"""

from collections.abc import Callable, Iterator, Sequence
from random import Random

from msgspec.structs import replace

from tokenfleet.core.accounts import Coefficients, PoolCalibration
from tokenfleet.core.placed import InstancePlacements, Placed
from tokenfleet.core.policy import Model
from tokenfleet.core.predict.work import prefill_work_s, uncached_tokens
from tokenfleet.core.records import Entry, OutcomeEvent, PlacedOn
from tokenfleet.sim.engine.events import Admitted, BlocksRemoved, BlocksStored, Event, Finished, FirstToken, Job
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.rows import TraceRow

OUTPUT_Q90_TOKENS = 700  # of the recorded chat


def truth(profile: Profile) -> Coefficients:
    """What the profile's engines follow, if its floor is flat."""
    return Coefficients(
        c0_s=profile.prefill_base_s,
        w_min_s=profile.floor_points[0][1] - profile.prefill_base_s,
        a_s=profile.token_s,
        b_s=profile.pair_s,
        d_s=profile.context_s,
    )


def model_of(profile: Profile, *, prior_factor: float = 1.0) -> Model:
    """The model that a policy would name, with a prior wrong by `prior_factor`."""
    exact = truth(profile)
    return Model(
        context_max_tokens=200_000,
        budget_tokens=profile.token_budget,
        c0_s=exact.c0_s * prior_factor,
        w_min_s=exact.w_min_s * prior_factor,
        a_s=exact.a_s * prior_factor,
        b_s=exact.b_s * prior_factor,
        d_s=exact.d_s * prior_factor,
    )


def slowed(profile: Profile, factor: float) -> Profile:
    """An engine that takes `factor` times as long for everything."""
    return replace(
        profile,
        prefill_base_s=profile.prefill_base_s * factor,
        decode_base_s=profile.decode_base_s * factor,
        floor_points=tuple((tokens, seconds * factor) for tokens, seconds in profile.floor_points),
        token_s=profile.token_s * factor,
        pair_s=profile.pair_s * factor,
        context_s=profile.context_s * factor,
    )


def work_s(placed: PlacedOn, coefficients: Coefficients, profile: Profile) -> float:
    return prefill_work_s(
        placed.uncached_tokens,
        placed.hit_tokens,
        decoding=placed.decoding,
        context_tokens=placed.context_tokens,
        coefficients=coefficients,
        budget_tokens=profile.token_budget,
    )


class Engines:
    """Engines of one profile; each prompt goes where the fewest wait, as a least-requests rule would send it."""

    def __init__(
        self,
        profile: Profile,
        rows: Sequence[TraceRow],
        *,
        count: int,
        seed: int,
        reporters: int = 1,
        start_s: float = 0.0,
    ) -> None:
        self._profile = profile
        self._rows = rows
        self._rng = Random(seed)
        self._reporters = reporters
        self._now_s = start_s
        self._engines = [_Engine(f"i-{number}", profile) for number in range(count)]

    def run(
        self, until_s: float, *, rate_per_s: float, believed: Callable[[], PoolCalibration]
    ) -> Iterator[OutcomeEvent]:
        """First tokens in order of time, while the trace's rows, from a random one on, arrive at random times."""
        number = self._rng.randrange(len(self._rows))
        while self._now_s < until_s:
            self._now_s += self._rng.expovariate(rate_per_s)
            events = [event for engine in self._engines for event in engine.advance(self._now_s)]
            yield from sorted(events, key=lambda event: event.clock_s or 0.0)
            number += 1
            self._place(self._rows[number % len(self._rows)], f"r-{number}", believed())

    def _place(self, row: TraceRow, id: str, calibration: PoolCalibration) -> None:
        now_s = self._now_s
        engine = min(self._engines, key=lambda each: (each.placements.standing().load.queued, self._rng.random()))
        hashes = row.hash_ids[: row.prompt_tokens // self._profile.block_size]
        job = Job(
            id=id,
            prompt_tokens=row.prompt_tokens,
            output_tokens=max(row.output_tokens, 1),
            max_tokens=max(row.output_tokens, 1),
            block_hashes=hashes,
        )
        if not engine.machine.fits(job):
            return
        load = engine.placements.standing().at(now_s)
        hit_tokens = engine.cached_blocks(hashes) * self._profile.block_size
        placed = PlacedOn(
            hit_tokens=hit_tokens,
            uncached_tokens=uncached_tokens(row.prompt_tokens, hit_tokens),
            queued=load.queued,
            decoding=load.decoding,
            context_tokens=load.context_tokens,
            wait_s=load.backlog_s,
            bias_s=max(calibration.bias_s, -load.backlog_s),
            kv_state="exact",
        )
        placed = replace(placed, work_s=work_s(placed, calibration.coefficients, self._profile))
        engine.place(job, placed, now_s, reporter=f"g-{self._rng.randrange(self._reporters)}")


class _Engine:
    """One engine, the ledger's entries of it and the index of its cache."""

    def __init__(self, name: str, profile: Profile) -> None:
        self.machine = EngineMachine(profile)
        self.placements = InstancePlacements()
        self._name = name
        self._blocks: set[int] = set()
        self._cached_tokens: dict[str, int] = {}
        self._sent: dict[str, tuple[Job, PlacedOn, float, str]] = {}

    def cached_blocks(self, hashes: Sequence[int]) -> int:
        return next((depth for depth, block in enumerate(hashes) if block not in self._blocks), len(hashes))

    def place(self, job: Job, placed: PlacedOn, now_s: float, *, reporter: str) -> None:
        self.machine.submit(job, now_s)
        self._sent[job.id] = (job, placed, now_s, reporter)
        entry = Entry(
            decision=job.id,
            request=job.id,
            attempt=0,
            instance=self._name,
            model="m",
            request_class="chat",
            work_s=placed.work_s,
            uncached_tokens=placed.uncached_tokens,
            kv_tokens=job.prompt_tokens + OUTPUT_Q90_TOKENS,
            replica="d",
            placed=placed,
        )
        self.placements.put(Placed(entry=entry, placed_at_s=now_s))

    def advance(self, now_s: float) -> Iterator[OutcomeEvent]:
        """Run until then; the first tokens. The ledger hears each event when it happens."""
        for event in self.machine.advance(now_s):
            if (outcome := self._hear(event)) is not None:
                yield outcome

    def _hear(self, event: Event) -> OutcomeEvent | None:
        if isinstance(event, BlocksStored):
            self._blocks.update(event.hashes)
        elif isinstance(event, BlocksRemoved):
            self._blocks.difference_update(event.hashes)
        elif isinstance(event, Admitted):
            self._cached_tokens.setdefault(event.job_id, event.cached_tokens)
        elif isinstance(event, FirstToken):
            self.placements.first_token(event.job_id, event.at_s)
            return self._outcome(event)
        elif isinstance(event, Finished):
            self.placements.remove(event.job_id, event.at_s)
            del self._sent[event.job_id], self._cached_tokens[event.job_id]
        return None

    def _outcome(self, event: FirstToken) -> OutcomeEvent:
        job, placed, at_s, reporter = self._sent[event.job_id]
        return OutcomeEvent(
            request=job.id,
            attempt=0,
            kind="first_token",
            decision=job.id,
            tenant="acme",
            request_class="chat",
            model="m",
            origin="b",
            instance=self._name,
            pool="m@b",
            at_wall_s=event.at_s,
            elapsed_s=event.at_s - at_s,
            attempt_s=event.at_s - at_s,
            prompt_tokens=job.prompt_tokens,
            cached_tokens=self._cached_tokens[job.id],
            clock=reporter,
            clock_s=event.at_s,
            placed=placed,
        )
