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
from tokenfleet.sim.mixed.service_levels import BATCH_DEADLINE_S
from tokenfleet.sim.mixed.workload import BULK_SPREAD_S, BULK_STARTS_S, USUAL_CHAT, workload
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.wire.v1 import decision_pb2

OUTPUT_BUDGET_FACTOR = 2  # callers ask for more than they get
OUTPUT_BUDGET_MIN = 64
BYTES_A_TOKEN = 4  # of prompt text on the network
BULK_COMES_IN_S = 40.0
OWN_BLOCKS_FROM = 1 << 40  # no recorded block has such an id


def laid_rows(config: LoadConfig) -> list[TraceRow]:
    """The trace as often as asked, or the mixed workload, by arrival. Takes half a second."""
    if config.mixed:
        return mixed_rows(config)
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
    if row.request_class:
        return _mixed_request(config, row, id=id, number=number)
    conversation = row.hash_ids[1] if len(row.hash_ids) > 1 else number  # the first block is a prompt that all share
    rng = Random(conversation)
    tenant = _drawn(rng, config.tenants)
    batch = rng.random() < config.batch_share or tenant in config.batch_tenants
    model = _drawn(rng, config.models)
    origin = _drawn(rng, config.origin_shares)
    request, tokens = _asks(config, row, id=id, model=model, tenant=tenant, origin=origin)
    request.stream = not batch
    request.task = "batch" if batch else ""
    request.session = f"conversation-{conversation}" if len(row.hash_ids) > 1 else ""
    return request, tokens


def mixed_rows(config: LoadConfig) -> list[TraceRow]:
    """Ten minutes of the simulator's mixed workload, without prompts that are too long for these engines.

    Rows without blocks get one of their own: their prompts have nothing in common. A bulk of jobs comes over some
    seconds more, or two cores would do nothing but take it in.
    """
    rows = workload(
        load=config.mixed,
        instances=config.instances,
        seed=config.seed,
        chat=USUAL_CHAT,
        batch_deadline_s=BATCH_DEADLINE_S,
    )
    fitting = [row for row in rows if row.prompt_tokens <= config.prompt_tokens_max]
    laid = [
        msgspec.structs.replace(row, at_s=_slower(row), hash_ids=row.hash_ids or (OWN_BLOCKS_FROM + number,))
        for number, row in enumerate(fitting)
    ]
    return sorted(laid, key=lambda row: row.at_s)


def _slower(row: TraceRow) -> float:
    """When the row arrives: of a bulk, later by as much as it takes to come in."""
    if row.request_class != "batch":
        return row.at_s
    start_s = max(start_s for start_s in BULK_STARTS_S if start_s <= row.at_s)
    return start_s + (row.at_s - start_s) * BULK_COMES_IN_S / BULK_SPREAD_S


def _mixed_request(
    config: LoadConfig, row: TraceRow, *, id: str, number: int
) -> tuple[decision_pb2.Request, NDArray[np.uint32]]:
    """The request of a row that knows its class; each is of a tenant of its own draw."""
    rng = Random(number)
    tenant, origin = _drawn(rng, config.tenants), _drawn(rng, config.origin_shares)
    model = config.model_of.get(row.request_class) or _drawn(rng, config.models)
    request, tokens = _asks(config, row, id=id, model=model, tenant=tenant, origin=origin)
    request.declared_class = row.request_class
    request.stream = row.deadline_s is None
    if row.deadline_s is not None:
        request.deadline_s = row.deadline_s
    return request, tokens


def _asks(
    config: LoadConfig, row: TraceRow, *, id: str, model: str, tenant: str, origin: str
) -> tuple[decision_pb2.Request, NDArray[np.uint32]]:
    tokens = prompt_tokens(row)
    seed = chain_seed(config.site_secret.encode(), model=model)
    request = decision_pb2.Request(
        id=id,
        model=model,
        tenant=tenant,
        origin=origin,
        prompt_tokens=row.prompt_tokens,
        max_tokens=max(OUTPUT_BUDGET_FACTOR * row.output_tokens, OUTPUT_BUDGET_MIN),
        block_keys=block_keys(tokens, seed=seed, block_tokens=config.block_tokens),
        block_tokens=config.block_tokens,
        upload_bytes=BYTES_A_TOKEN * row.prompt_tokens,
        wait_max_s=config.wait_max_s,
    )
    return request, tokens


def _drawn(rng: Random, shares: Mapping[str, float]) -> str:
    return rng.choices(tuple(shares), weights=tuple(shares.values()))[0]
