"""Engine: one inference instance as a clock-free machine; what it does next and what came of it.

Continuous batching, chunked prefill and a prefix cache by the scheduler rules of the engines themselves: each
step gives every decode one token and fills the token budget with prefill chunks, first come first served. Time is an
argument; the same jobs at the same times give the same events. Steps that only decode are leapt over: their ends
are closed-form from the stretch's start, so leaping and stepping give the same figures to the last bit.
"""

from collections import deque

from tokenfleet.sim.engine.events import (
    Admitted,
    Cleared,
    Event,
    Finished,
    FinishReason,
    FirstToken,
    Job,
    Load,
    Preempted,
    Stepped,
)
from tokenfleet.sim.engine.kv_memory import KvMemory
from tokenfleet.sim.engine.sequences import DecodeBatch, Sequence
from tokenfleet.sim.engine.stretch import Stretch
from tokenfleet.sim.profiles import Profile


class EngineMachine:
    """One engine. Callers advance it to a moment before they submit, cancel or change anything at that moment."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._memory = KvMemory(profile)
        self._waiting: deque[Sequence] = deque()  # bounded by the caller's own admission
        self._prefilling: dict[str, Sequence] = {}
        self._decodes = DecodeBatch(profile.block_size)
        self._sequences: dict[str, Sequence] = {}
        self._stretch: Stretch | None = None
        self._free_from_s = 0.0  # no step starts earlier
        self._slowdown = 1.0
        self._cleared = False
        self._prompt_tokens = self._cached_tokens = self._queried_tokens = self._hit_tokens = 0
        self._generation_tokens = self._iterations = self._iteration_tokens = self._preemptions = 0

    def fits(self, job: Job) -> bool:
        """Whether the job could ever run: its prompt and output within the KV memory less the watermark."""
        tokens = job.prompt_tokens + min(job.output_tokens, job.max_tokens) - 1
        return self._memory.blocks(tokens) + self.profile.watermark_blocks <= self.profile.kv_blocks

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a job that fits and whose id is not in the engine."""
        output_tokens = min(job.output_tokens, job.max_tokens)
        assert self.fits(job), f"job {job.id} does not fit"
        assert job.id not in self._sequences, f"job {job.id} is here already"
        assert min(output_tokens, job.prompt_tokens) >= 1, "a job has at least one token in and out"
        assert len(job.block_hashes) <= job.prompt_tokens // self.profile.block_size, "only full blocks have a hash"
        self._interrupt(now_s)
        sequence = Sequence(job=job, output_tokens=output_tokens, prefill_tokens=job.prompt_tokens)
        self._sequences[job.id] = sequence
        self._waiting.append(sequence)

    def cancel(self, job_id: str, now_s: float) -> Finished | None:
        """End a job whose caller left; None if it is not here (any more). Its step in flight takes its full time."""
        sequence = self._sequences.get(job_id)
        if sequence is None:
            return None
        self._interrupt(now_s)
        if sequence.joined_tick >= 0 or job_id in self._prefilling:
            self._release(sequence)
        else:
            self._waiting.remove(sequence)
        return self._end(sequence, now_s, FinishReason.ABORT)

    def clear_cache(self, now_s: float) -> bool:
        """Empty the prefix cache; refused while any job holds blocks. Cleared comes with the next step."""
        self._interrupt(now_s)
        cleared = self._memory.cache.clear()
        self._cleared = self._cleared or cleared
        return cleared

    def slow_down(self, factor: float, now_s: float) -> None:
        """Steps that start from now on take factor times as long; 1 is healthy."""
        self._interrupt(now_s)
        self._slowdown = factor

    def generated_tokens(self, job_id: str) -> int:
        """Output tokens so far of a job in the engine; 0 if it is not here."""
        sequence = self._sequences.get(job_id)
        if sequence is None:
            return 0
        return sequence.generated if sequence.joined_tick < 0 else self._decodes.generated(sequence)

    def next_step_at_s(self) -> float | None:
        """When the next step ends or, if none runs, may start; None when there is nothing to do."""
        if self._stretch is not None:
            return self._stretch.end_s(self._stretch.done + 1)
        return self._free_from_s if self._waiting or self._prefilling or len(self._decodes) else None

    def next_event_at_s(self) -> float | None:
        """When something other than a further token of a running decode happens next; None when idle."""
        return self._stretch.end_s(self._stretch.steps) if self._stretch is not None else self.next_step_at_s()

    def advance(self, now_s: float) -> list[Event]:
        """Run until now_s, inclusive; what happened, in order."""
        events: list[Event] = []
        while True:
            stretch = self._stretch
            if stretch is None:
                start_s = self.next_step_at_s()
                if start_s is None or start_s > now_s:
                    return events
                self._stretch = self._plan(start_s, events)
                continue
            steps = stretch.steps_by(now_s)
            if steps > stretch.done:
                self._apply(stretch, steps, events)
            if stretch.done < stretch.steps:
                return events
            self._complete(stretch, events)
            self._stretch, self._free_from_s = None, stretch.end_s(stretch.steps)

    def load(self) -> Load:
        """Gauges and counters as of the last advance."""
        cache = self._memory.cache
        return Load(
            running=len(self._prefilling) + len(self._decodes),
            waiting=len(self._waiting),
            kv_used_blocks=cache.used,
            kv_total_blocks=cache.blocks_total,
            kv_cached_blocks=cache.cached,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            generation_tokens=self._generation_tokens,
            iterations=self._iterations,
            iteration_tokens=self._iteration_tokens,
            preemptions=self._preemptions,
        )

    def _interrupt(self, now_s: float) -> None:
        """The batch is planned anew at the next step boundary, or now if no step runs."""
        if self._stretch is not None:
            assert now_s < self._stretch.end_s(self._stretch.done + 1), "advance to now_s first"
            self._stretch.steps = self._stretch.done + 1
            return
        start_s = self.next_step_at_s()
        assert start_s is None or now_s <= start_s, "advance to now_s first"
        self._free_from_s = max(self._free_from_s, now_s)

    def _plan(self, at_s: float, events: list[Event]) -> Stretch:
        """Choose the batch that starts at at_s: room for the decodes, then chunks in order, then the queue's head."""
        if self._cleared:
            events.append(Cleared(at_s=at_s))
            self._cleared = False
        self._make_room(at_s, events)
        budget = self.profile.token_budget - len(self._decodes)
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling.values():
            if budget > 0:
                budget -= self._chunk(sequence, budget, chunks)
        while budget > 0:
            admitted = self._admit_head(at_s, events)
            if admitted is None:
                break
            budget -= self._chunk(admitted, budget, chunks)
        return self._stretch_of(chunks, at_s)

    def _make_room(self, at_s: float, events: list[Event]) -> None:
        """Hold a KV block for each decode that needs one this step; where there are too few, preempt the newest decode.

        It cannot come back in the same step: it needs more blocks than the others have left of its own.
        """
        while self._decodes.growth(1) > self._memory.cache.available:
            sequence = self._decodes.newest()
            self._release(sequence)
            sequence.prefill_tokens = sequence.job.prompt_tokens + sequence.generated
            sequence.computed = 0
            self._waiting.appendleft(sequence)
            self._preemptions += 1
            events.append(Preempted(job_id=sequence.job.id, at_s=at_s))
        self._memory.grow(self._decodes, 1, at_s, events)

    def _chunk(self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, int]]) -> int:
        tokens = min(budget, sequence.prefill_tokens - sequence.computed)
        chunks.append((sequence, tokens))
        return tokens

    def _admit_head(self, at_s: float, events: list[Event]) -> Sequence | None:
        """Take the head of the queue in if its uncached blocks and the watermark fit; else all behind it wait."""
        running = len(self._prefilling) + len(self._decodes)
        if not self._waiting or running >= self.profile.sequences_max:
            return None
        sequence = self._waiting[0]
        cached_tokens = self._memory.admit(sequence, at_s, events)
        if cached_tokens is None:
            return None
        self._waiting.popleft()
        self._prefilling[sequence.job.id] = sequence
        self._queried_tokens += sequence.prefill_tokens
        self._hit_tokens += cached_tokens
        events.append(Admitted(job_id=sequence.job.id, at_s=at_s, cached_tokens=cached_tokens))
        return sequence

    def _stretch_of(self, chunks: list[tuple[Sequence, int]], at_s: float) -> Stretch:
        prefill_tokens = sum(tokens for _, tokens in chunks)
        assert prefill_tokens or len(self._decodes), "work is waiting, yet nothing can run"
        seconds = self._slowdown * self.profile.step_s(
            prefill_tokens=prefill_tokens,
            pairs=sum(tokens * (sequence.computed + tokens / 2) for sequence, tokens in chunks),
            decodes=len(self._decodes),
            context_tokens=self._decodes.context_tokens,
        )
        steps = 1
        if not chunks:
            steps += self._decodes.ticks_within(self._memory.cache.available, self._decodes.ticks_to_next_end() - 1)
        return Stretch(
            start_s=at_s,
            first_s=seconds,
            growth_s=self._slowdown * self.profile.context_s * len(self._decodes),
            steps=steps,
            chunks=chunks,
            prefill_tokens=prefill_tokens,
        )

    def _apply(self, stretch: Stretch, steps: int, events: list[Event]) -> None:
        """The stretch's first `steps` steps have ended: tokens, counters, and room for the step that runs on."""
        ended, decodes, end_s = steps - stretch.done, len(self._decodes), stretch.end_s(steps)
        seconds = end_s - stretch.end_s(stretch.done)
        stretch.done = steps
        self._decodes.advance(ended)
        self._generation_tokens += ended * decodes
        self._iterations += ended
        self._iteration_tokens += ended * decodes + stretch.prefill_tokens
        running_on = steps < stretch.steps
        unallocated = self._decodes.tick + running_on - self._decodes.allocated_tick
        self._memory.grow(self._decodes, unallocated, end_s, events)
        events.append(
            Stepped(at_s=end_s, steps=ended, seconds=seconds, prefill_tokens=stretch.prefill_tokens, decodes=decodes)
        )

    def _complete(self, stretch: Stretch, events: list[Event]) -> None:
        """The stretch's last step has ended: jobs that are through leave, computed chunks become visible."""
        at_s = stretch.end_s(stretch.steps)
        for sequence in self._decodes.ended():
            self._release(sequence)
            events.append(self._end(sequence, at_s))
        for sequence, tokens in stretch.chunks:
            if sequence.job.id not in self._prefilling:
                continue  # cancelled while its chunk was computed
            sequence.computed += tokens
            self._memory.publish(sequence, at_s, events)
            if sequence.computed == sequence.prefill_tokens:
                self._leave_prefill(sequence, at_s, events)

    def _leave_prefill(self, sequence: Sequence, at_s: float, events: list[Event]) -> None:
        sequence.generated += 1
        self._generation_tokens += 1
        if not sequence.first_token_sent:
            sequence.first_token_sent = True
            self._prompt_tokens += sequence.job.prompt_tokens
            self._cached_tokens += sequence.cached_tokens or 0
            events.append(FirstToken(job_id=sequence.job.id, at_s=at_s))
        if sequence.generated == sequence.output_tokens:
            self._release(sequence)
            events.append(self._end(sequence, at_s))
        else:
            del self._prefilling[sequence.job.id]
            self._decodes.join(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Take a running job out of the batch; all its blocks go back."""
        if sequence.joined_tick >= 0:
            blocks = self._decodes.leave(sequence)
        else:
            del self._prefilling[sequence.job.id]
            blocks = self._memory.blocks(sequence.prefill_tokens)
        self._memory.release(sequence, blocks)

    def _end(self, sequence: Sequence, at_s: float, reason: FinishReason | None = None) -> Finished:
        del self._sequences[sequence.job.id]
        natural = FinishReason.LENGTH if sequence.output_tokens == sequence.job.max_tokens else FinishReason.STOP
        return Finished(
            job_id=sequence.job.id,
            at_s=at_s,
            output_tokens=sequence.generated,
            cached_tokens=sequence.cached_tokens or 0,
            reason=reason or natural,
        )
