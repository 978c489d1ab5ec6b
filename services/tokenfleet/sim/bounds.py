"""Bounds: what no routing policy can pass on the same requests, each computed alone on an idle engine.

`pooled` has one cache of all instances' KV memory, `zero` one without an end; in both a prompt is cached at the moment
it arrives and generated tokens take no room. So `pooled` is a floor for caches that live in the engines' memory (each
copy of a block on a second instance takes room from another, and waiting is not in it), `zero` a floor for any cache.
"""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.sim.engine.kv_memory import COMPUTED_TOKENS_MIN
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.rows import TraceRow


class Alone(Struct, frozen=True, kw_only=True):
    """One request without any other: tokens found cached, seconds to the first token, a token thereafter and in all.

    `tpot_s` is None for a single token.
    """

    cached_tokens: int
    ttft_s: float
    tpot_s: float | None
    e2e_s: float


class SharedCache:
    """Prompt blocks by id, the least recently used leaves first, a prompt's deepest block before its front."""

    def __init__(self, blocks_max: int | None) -> None:
        """`blocks_max` None: room for everything."""
        self._blocks_max = blocks_max
        self._blocks: dict[int, None] = {}  # oldest first

    def use(self, ids: Sequence[int], *, reusable: int) -> int:
        """Blocks of the longest cached prefix, at most `reusable`; thereafter all are cached and newest."""
        hit = next((depth for depth, block in enumerate(ids[:reusable]) if block not in self._blocks), reusable)
        for block in reversed(ids):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while self._blocks_max is not None and len(self._blocks) > self._blocks_max:
            del self._blocks[next(iter(self._blocks))]
        return hit


def bounded(rows: Sequence[TraceRow], profile: Profile, *, blocks_max: int | None) -> list[Alone]:
    """Every request, in the order of arrival, with a cache of so many blocks for all of them. Rows are by arrival."""
    cache = SharedCache(blocks_max)
    alone: list[Alone] = []
    for row in rows:
        ids = row.hash_ids[: row.prompt_tokens // profile.block_size]
        reusable = min(len(ids), max(0, row.prompt_tokens - COMPUTED_TOKENS_MIN) // profile.block_size)
        cached_tokens = cache.use(ids, reusable=reusable) * profile.block_size
        ttft_s = prefill_alone_s(profile, prompt_tokens=row.prompt_tokens, cached_tokens=cached_tokens)
        decode_s = decode_alone_s(profile, prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
        alone.append(
            Alone(
                cached_tokens=cached_tokens,
                ttft_s=ttft_s,
                tpot_s=decode_s / (row.output_tokens - 1) if row.output_tokens > 1 else None,
                e2e_s=ttft_s + decode_s,
            )
        )
    return alone


def prefill_alone_s(profile: Profile, *, prompt_tokens: int, cached_tokens: int) -> float:
    """Seconds of the steps, each of at most the token budget, that compute what is not cached."""
    computed, seconds = cached_tokens, 0.0
    while computed < prompt_tokens:
        chunk = min(profile.token_budget, prompt_tokens - computed)
        seconds += profile.step_s(
            prefill_tokens=chunk, pairs=chunk * (computed + chunk / 2), decodes=0, context_tokens=0
        )
        computed += chunk
    return seconds


def decode_alone_s(profile: Profile, *, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds from the first token to the last: a step each, the context growing by a token a step."""
    steps = output_tokens - 1
    first_s = profile.step_s(prefill_tokens=0, pairs=0.0, decodes=1, context_tokens=prompt_tokens)
    return steps * first_s + profile.context_s * (steps * (steps - 1) // 2)
