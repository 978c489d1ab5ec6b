"""Accounts: what outcomes add up to, as records on `goodput` and `feedback`. The conventions are core.records'."""

from msgspec import Struct

from tokenfleet.core.records import Count, Name


class Coefficients(Struct, frozen=True, kw_only=True):
    """Engine time model of one pool (see core.predict.ttft): an iteration takes
    c0 + max(w_min, a·tokens) + b·pairs + d·decode context, in seconds."""

    c0_s: float
    w_min_s: float
    a_s: float
    b_s: float
    d_s: float
    samples: float = 0.0


class PoolCalibration(Struct, frozen=True, kw_only=True):
    """What outcomes taught about one pool: coefficients, median residual of prompts that found no queue, p90 of the
    residual ratio when idle and queued, and the chance that a cached prefix is really there, by source: KV events, own
    dispatches, an approximate index."""

    pool: Name
    model: Name
    coefficients: Coefficients
    bias_s: float = 0.0
    margin_idle: float = 0.3
    margin_queued: float = 0.6
    p_hit: float = 0.97
    p_hit_dispatch: float = 0.8
    p_hit_approx: float = 0.5


class OutputEstimate(Struct, frozen=True, kw_only=True):
    """Learned output length of one (tenant, model, input bucket), in tokens; empty names mean all."""

    tenant: str = ""
    model: str = ""
    bucket: int = -1
    q50: float
    q90: float
    samples: float


class Feedback(Struct, frozen=True, kw_only=True, tag="feedback"):
    """A calibration revision, published by the goodput worker that owns outcomes partition 0."""

    revision: Count
    at_wall_s: float
    pools: tuple[PoolCalibration, ...] = ()
    outputs: tuple[OutputEstimate, ...] = ()


class GoodputRow(Struct, frozen=True, kw_only=True):
    """Partial sums of one (window, class, tenant, pool) over one outcomes partition; readers add up.

    The window is [start_s, start_s + width_s) in event time. Counts are of logical requests by their finish
    window; `*_arrived` count by arrival cohort. `met`/`missed` are of admitted ones; `rejected` were offered only;
    `excluded` count for neither. `gpu_seconds` (ready instances x time) and `cost` (money, idle included) stand in rows
    of a pool with empty class and tenant.
    """

    start_s: float
    width_s: float
    request_class: str
    tenant: str
    pool: str
    version: Count
    goodput_tokens: Count = 0
    output_tokens: Count = 0
    waste_tokens: Count = 0
    prefill_waste_tokens: Count = 0
    unknown_tokens_requests: Count = 0
    met: Count = 0
    missed: Count = 0
    rejected: Count = 0
    excluded: Count = 0
    met_arrived: Count = 0
    offered_arrived: Count = 0
    late_dropped: Count = 0
    gpu_seconds: float = 0.0
    cost: float = 0.0


class GoodputPartial(Struct, frozen=True, kw_only=True, tag="goodput"):
    """Rows that changed in one outcomes partition, with that partition's watermark (event time, Unix seconds).

    `cluster` is the Kafka cluster whose outcomes were summed: a broker that lost its log starts another one, and the
    sums of both logs add up.
    """

    site: Name
    partition: Count
    watermark_s: float
    rows: tuple[GoodputRow, ...]
    cluster: str = ""
