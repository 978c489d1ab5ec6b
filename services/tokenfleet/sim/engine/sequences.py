"""The jobs inside one engine, and the batch of those that decode."""

import heapq
from dataclasses import dataclass

from tokenfleet.sim.engine.events import Job


@dataclass(slots=True, eq=False)
class Sequence:
    """One job's progress; tokens unless named otherwise."""

    job: Job
    output_tokens: int
    prefill_tokens: int  # prompt, plus what was generated before a preemption
    generated: int = 0  # as of joining the decode batch; see DecodeBatch.generated
    computed: int = 0  # of prefill_tokens
    shared_blocks: int = 0  # leading prompt blocks held in the index
    cached_tokens: int | None = None  # None until first admitted
    joined_tick: int = -1
    first_token_sent: bool = False


class DecodeBatch:
    """Decoding sequences in joining order; one tick is one step in which each gets a token.

    Nothing here loops over the sequences per tick: a sequence's progress is the distance from its joining
    tick, its end a tick known in advance, its need for a new KV block a phase of the tick modulo the block size.
    """

    def __init__(self, block_size: int) -> None:
        self.tick = 0  # steps completed
        self.allocated_tick = 0  # KV blocks are held for all tokens up to this step
        self.context_tokens = 0  # sum of the contexts the next step reads
        self._block_size = block_size
        self._sequences: dict[str, Sequence] = {}
        self._phases = [0] * block_size  # sequences that need a block at ticks = index modulo block size
        self._ends: list[tuple[int, int, str]] = []  # (last tick, joining tick, job id); stale entries are skipped

    def __len__(self) -> int:
        return len(self._sequences)

    def newest(self) -> Sequence:
        """The sequence that joined last."""
        return next(reversed(self._sequences.values()))

    def join(self, sequence: Sequence) -> None:
        """From the next tick on the sequence gets a token a tick; it has more than one to go."""
        sequence.joined_tick = self.tick
        self._sequences[sequence.job.id] = sequence
        self._phases[self._phase(sequence)] += 1
        self.context_tokens += sequence.prefill_tokens
        last_tick = self.tick + sequence.output_tokens - sequence.generated
        heapq.heappush(self._ends, (last_tick, self.tick, sequence.job.id))

    def leave(self, sequence: Sequence) -> int:
        """Take the sequence out and settle its generated count; returns the KV blocks it holds."""
        blocks = -(-(sequence.prefill_tokens + self.allocated_tick - sequence.joined_tick) // self._block_size)
        del self._sequences[sequence.job.id]
        self._phases[self._phase(sequence)] -= 1
        self.context_tokens -= sequence.prefill_tokens + self.tick - sequence.joined_tick
        sequence.generated = self.generated(sequence)
        sequence.joined_tick = -1
        return blocks

    def generated(self, sequence: Sequence) -> int:
        """Tokens generated so far by a sequence of this batch."""
        return sequence.generated + self.tick - sequence.joined_tick

    def advance(self, ticks: int) -> None:
        self.tick += ticks
        self.context_tokens += ticks * len(self._sequences)

    def ticks_to_next_end(self) -> int:
        """Ticks until the first sequence has all its tokens; the batch is not empty."""
        while not self._is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] - self.tick

    def ended(self) -> list[Sequence]:
        """Sequences that have all their tokens, first joined first; they are still in the batch."""
        done: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self.tick:
            end = heapq.heappop(self._ends)
            if self._is_current(end):
                done.append(self._sequences[end[2]])
        return done

    def growth(self, ticks: int) -> int:
        """KV blocks the batch needs for so many ticks more than are allocated."""
        cycles, rest = divmod(ticks, self._block_size)
        start = (self.allocated_tick + 1) % self._block_size
        wrapped = max(0, start + rest - self._block_size)
        partial = sum(self._phases[start : start + rest]) + sum(self._phases[:wrapped])
        return cycles * len(self) + partial

    def ticks_within(self, blocks: int, ticks: int) -> int:
        """The most ticks, at most so many, whose growth fits in blocks."""
        if not len(self) or -(-ticks // self._block_size) * len(self) <= blocks:
            return ticks
        cycles = blocks // len(self)
        fitting, left = cycles * self._block_size, blocks - cycles * len(self)
        while fitting < ticks:
            left -= self._phases[(self.allocated_tick + 1 + fitting) % self._block_size]
            if left < 0:
                break
            fitting += 1
        return min(fitting, ticks)

    def _phase(self, sequence: Sequence) -> int:
        # the step at tick t stores token prefill + t - joined - 1, counted from 0: a block's first when divisible
        return (sequence.joined_tick + 1 - sequence.prefill_tokens) % self._block_size

    def _is_current(self, end: tuple[int, int, str]) -> bool:
        sequence = self._sequences.get(end[2])
        return sequence is not None and sequence.joined_tick == end[1]
