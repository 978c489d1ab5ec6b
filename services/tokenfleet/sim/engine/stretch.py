"""A stretch of engine steps with one and the same batch, and when each of them ends."""

import math
from dataclasses import dataclass

from tokenfleet.sim.engine.sequences import Sequence


@dataclass(slots=True)
class Stretch:
    """Steps of one batch: one step if it holds prefill chunks, else until the batch must be planned anew."""

    start_s: float
    first_s: float  # seconds of its first step
    growth_s: float  # seconds each step is longer than the one before: the context grows
    steps: int
    chunks: list[tuple[Sequence, int]]
    prefill_tokens: int
    done: int = 0

    def end_s(self, steps: int) -> float:
        return self.start_s + steps * self.first_s + self.growth_s * (steps * (steps - 1) // 2)

    def steps_by(self, now_s: float) -> int:
        """How many of its steps have ended by now_s."""
        if self.end_s(self.steps) <= now_s:
            return self.steps
        elapsed_s, slope_s = now_s - self.start_s, self.growth_s / 2
        linear_s = self.first_s - slope_s
        # root of slope * k^2 + linear * k = elapsed, in the form that stays exact when slope is tiny
        guess = int(2 * elapsed_s / (linear_s + math.sqrt(linear_s * linear_s + 4 * slope_s * max(elapsed_s, 0.0))))
        steps = min(max(guess, self.done), self.steps)
        while steps > self.done and self.end_s(steps) > now_s:
            steps -= 1
        while steps < self.steps and self.end_s(steps + 1) <= now_s:
            steps += 1
        return steps
