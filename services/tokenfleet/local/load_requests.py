"""Load requests: the recorded rows as requests of tenants, with prompts whose prefixes engines really find cached."""

from collections.abc import Iterator, Mapping
from random import Random

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenfleet.core.blocks import block_keys, chain_seed
from tokenfleet.local.data_files import trace_rows
from tokenfleet.local.load_config import LoadConfig
from tokenfleet.local.prompts import prompt_tokens
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.wire.v1 import decision_pb2

OUTPUT_BUDGET_FACTOR = 2  # callers ask for more than they get
OUTPUT_BUDGET_MIN = 64
BYTES_A_TOKEN = 4  # of prompt text on the network


def laid_rows(config: LoadConfig) -> list[TraceRow]:
    """The trace as often as asked, by arrival. Takes half a second."""
    return trace_rows(copies=config.copies, rng=Random(config.seed), prompt_tokens_max=config.prompt_tokens_max)


def numbered(laid: list[TraceRow]) -> Iterator[tuple[int, TraceRow]]:
    """Numbered rows by arrival since the start: the trace over and over."""
    number, began_s = 0, 0.0
    while True:
        for row in laid:
            yield number, msgspec.structs.replace(row, at_s=began_s + row.at_s)
            number += 1
        began_s += laid[-1].at_s


def request_of(
    config: LoadConfig, row: TraceRow, *, id: str, number: int
) -> tuple[decision_pb2.Request, NDArray[np.uint32]]:
    """The request of a row, and its prompt's token ids. Model, tenant and origin belong to the conversation."""
    conversation = row.hash_ids[1] if len(row.hash_ids) > 1 else number  # the first block is a prompt that all share
    rng = Random(conversation)
    tenant = _drawn(rng, config.tenants)
    batch = rng.random() < config.batch_share or tenant in config.batch_tenants
    model = _drawn(rng, config.models)
    tokens = prompt_tokens(row)
    seed = chain_seed(config.site_secret.encode(), model=model)
    request = decision_pb2.Request(
        id=id,
        model=model,
        tenant=tenant,
        origin=_drawn(rng, config.origin_shares),
        prompt_tokens=row.prompt_tokens,
        max_tokens=max(OUTPUT_BUDGET_FACTOR * row.output_tokens, OUTPUT_BUDGET_MIN),
        block_keys=block_keys(tokens, seed=seed, block_tokens=config.block_tokens),
        block_tokens=config.block_tokens,
        stream=not batch,
        task="batch" if batch else "",
        session=f"conversation-{conversation}" if len(row.hash_ids) > 1 else "",
        upload_bytes=BYTES_A_TOKEN * row.prompt_tokens,
        wait_max_s=config.wait_max_s,
    )
    return request, tokens


def _drawn(rng: Random, shares: Mapping[str, float]) -> str:
    return rng.choices(tuple(shares), weights=tuple(shares.values()))[0]
