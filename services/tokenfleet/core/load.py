"""Load: what one instance has to do, as a decision sees it."""

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace


class Load(Struct, frozen=True, kw_only=True):
    """Sums over the sequences of one instance.

    `backlog_s` is the stand-alone prefill time not yet done: Σ work of entries before their first token − min(time
    since the head began, work of the head); `behind_s` is the work of those behind the head. `queued` sequences wait
    for their first token with `queued_tokens` uncached tokens, `decoding` are past it with `context_tokens` of
    context. `kv_held_tokens` is what all of them will hold in KV. `foreign` sequences, counted in the others, are
    explained by no placement. `class_running` counts the entries of each class, queued and decoding, `class_queued`
    those before their first token, `class_kv_tokens` is what the entries of each class will hold in KV.
    """

    backlog_s: float = 0.0
    behind_s: float = 0.0
    queued: int = 0
    queued_tokens: int = 0
    decoding: int = 0
    context_tokens: float = 0.0
    kv_held_tokens: float = 0.0
    foreign: float = 0.0
    class_running: Mapping[str, int] = {}
    class_queued: Mapping[str, int] = {}
    class_kv_tokens: Mapping[str, int] = {}


class Standing(Struct, frozen=True, kw_only=True):
    """A load with what time alone takes off it: `load.backlog_s` is the work as if the head had not begun.

    The head began its `head_work_s` at `head_began_s`; without a head both are 0.
    """

    load: Load
    head_began_s: float = 0.0
    head_work_s: float = 0.0

    def at(self, now_s: float) -> Load:
        done_s = min(max(0.0, now_s - self.head_began_s), self.head_work_s)
        return replace(self.load, backlog_s=max(0.0, self.load.backlog_s - done_s)) if done_s else self.load


class MeanWork(Struct, frozen=True, kw_only=True):
    """What a sequence of unknown origin is taken for: the mean of what was placed lately."""

    work_s: float = 0.0
    uncached_tokens: float = 0.0
    kv_tokens: float = 0.0
    samples: int = 0

    def then(self, work_s: float, uncached_tokens: int, kv_tokens: int) -> "MeanWork":
        """The mean after one more placement: of all at first, fading by MEAN_GAIN later."""
        gain = max(1.0 / (self.samples + 1), MEAN_GAIN)
        return MeanWork(
            work_s=self.work_s + gain * (work_s - self.work_s),
            uncached_tokens=self.uncached_tokens + gain * (uncached_tokens - self.uncached_tokens),
            kv_tokens=self.kv_tokens + gain * (kv_tokens - self.kv_tokens),
            samples=self.samples + 1,
        )


MEAN_GAIN = 1e-3  # about the last thousand placements
