"""Fits: whether the instances of a profile could hold every request of a trace, asked before the run."""

from collections.abc import Iterable

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.traces.rows import TraceRow


def check_fits(rows: Iterable[TraceRow], profile: Profile) -> None:
    """Nothing, when each row's prompt and output fit the profile's KV memory less the watermark.

    Raises PolicyError with the largest row's place and size, the capacity, and how many rows are too large.
    """
    blocks_max = profile.kv_blocks - profile.watermark_blocks
    too_large = [row for row in rows if _blocks(row, profile) > blocks_max]
    if not too_large:
        return
    row = max(too_large, key=lambda row: row.prompt_tokens + row.output_tokens)
    raise PolicyError(
        f"line {row.line}, at {row.at_s:.1f} s: {row.prompt_tokens} prompt + {row.output_tokens} output tokens are "
        f"{_blocks(row, profile)} blocks of {profile.block_size}, an instance holds {blocks_max}; {len(too_large)} "
        "requests are too large for it: take a profile with more KV memory, or a trace without them"
    )


def _blocks(row: TraceRow, profile: Profile) -> int:
    """As the engine counts: the last output token is never written to the cache."""
    return -(-(row.prompt_tokens + row.output_tokens - 1) // profile.block_size)
