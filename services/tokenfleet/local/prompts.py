"""Prompts: token ids for trace rows, so that equal block ids give equal tokens and engines really find them cached."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tokenfleet.sim.traces.rows import TraceRow

VOCABULARY = 32_000
BLOCKS_KEPT = 4_000  # 512 tokens of 4 bytes each: 8 MB at most


def prompt_tokens(row: TraceRow) -> NDArray[np.uint32]:
    """The token ids of the row's prompt; what its block ids don't cover is of its last block's kind."""
    ids = row.hash_ids or (0,)
    needed = -(-row.prompt_tokens // row.block_tokens)
    blocks = [_block(ids[min(i, len(ids) - 1)], i, row.block_tokens) for i in range(needed)]
    if not blocks:
        return np.empty(0, dtype=np.uint32)
    return np.concatenate(blocks)[: row.prompt_tokens]


@lru_cache(maxsize=BLOCKS_KEPT)
def _block(hash_id: int, position: int, tokens: int) -> NDArray[np.uint32]:
    return np.random.default_rng((hash_id, position)).integers(1, VOCABULARY, tokens, dtype=np.uint32)
