"""Measure: what one run came to, as figures and as the rows behind them."""

import math
from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.core.predict.work import prefill_work_s, prior_coefficients, uncached_tokens
from tokenfleet.sim.pilot import model_of
from tokenfleet.sim.profiles import Profile
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.rows import TraceRow


class Quantiles(Struct, frozen=True, kw_only=True):
    """Nearest-rank percentiles in seconds, and the mean; None where so many requests never got there."""

    p50: float | None
    p95: float | None
    p99: float | None
    mean: float | None


class InstanceLoad(Struct, frozen=True, kw_only=True):
    """One instance over the whole run: requests, their tokens, and its stand-alone prefill seconds."""

    instance: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_s: float


class RequestFigures(Struct, frozen=True, kw_only=True):
    """One request; seconds, None where it never got there."""

    at_s: float
    gateway: int
    instance: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    refused: str


class Result(Struct, frozen=True, kw_only=True):
    """One run. Requests that arrive in [`warm_s`, `len_s`) are measured, all are served to their ends.

    `rho` is the offered load: the stand-alone prefill seconds of all that was admitted had nothing been cached, per
    instance and second, so alike for all policies that refuse nothing; `rho_cached` the same less what the engines
    found cached. A rejected or unfinished request counts as infinitely late in every percentile of `ttft_s` and `e2e_s`
    and makes their mean None; `tpot_s` is over those that finished with 2 tokens or more. `hit_ratio` is cached tokens
    over prompt tokens, `throughput_tokens_per_s` counts the output of all that ended within the window. `bad_lines` of
    the trace were left out, `repeated_rows` are equal to the one before (traces.rows).
    """

    seed: int
    policy: str
    trace: str
    bad_lines: int
    repeated_rows: int
    copies: float
    instances: int
    gateways: int
    event_delay_s: float
    profile: str
    len_s: float
    warm_s: float
    rho: float
    rho_cached: float
    measured: int
    completed: int
    unfinished: int
    rejected: int
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    hit_ratio: float
    throughput_tokens_per_s: float
    requests_per_cpu_s: float
    loads: tuple[InstanceLoad, ...]


def quantiles(values: Sequence[float]) -> Quantiles:
    """Nearest rank: the least value that at least the share p of all does not exceed."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(p50=None, p95=None, p99=None, mean=None)

    def at(share: float) -> float | None:
        return _finite(ordered[max(0, math.ceil(share * len(ordered)) - 1)])

    return Quantiles(p50=at(0.50), p95=at(0.95), p99=at(0.99), mean=_finite(math.fsum(ordered) / len(ordered)))


def figures_of(served: Served) -> RequestFigures:
    row, first_s, finished_s = served.row, served.first_token_s, served.finished_s
    decoded = row.output_tokens - 1
    return RequestFigures(
        at_s=row.at_s,
        gateway=served.gateway,
        instance=served.instance,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=served.cached_tokens,
        output_tokens=row.output_tokens,
        ttft_s=None if first_s is None else first_s - row.at_s,
        tpot_s=(finished_s - first_s) / decoded if finished_s is not None and first_s is not None and decoded else None,
        e2e_s=None if finished_s is None else finished_s - row.at_s,
        refused=served.refused,
    )


def in_window(served: Sequence[Served], *, warm_s: float, len_s: float) -> list[Served]:
    """Those that are measured: arrivals in [warm_s, len_s)."""
    return [each for each in served if warm_s <= each.row.at_s < len_s]


def prefill_s(served: Served, profile: Profile, *, cached_tokens: int) -> float:
    """Stand-alone seconds of one prefill on an idle engine."""
    return prefill_row_s(served.row, profile, cached_tokens=cached_tokens)


def prefill_row_s(row: TraceRow, profile: Profile, *, cached_tokens: int) -> float:
    """The same before it is served."""
    return prefill_work_s(
        uncached_tokens(row.prompt_tokens, cached_tokens),
        cached_tokens,
        decoding=0.0,
        context_tokens=0.0,
        coefficients=prior_coefficients(model_of(profile), factor=1.0),
        budget_tokens=profile.token_budget,
    )


def loads_of(served: Sequence[Served], profile: Profile, names: Sequence[str]) -> tuple[InstanceLoad, ...]:
    """What each instance was given."""
    given: list[list[Served]] = [[] for _ in names]
    for each in served:
        if each.instance >= 0:
            given[each.instance].append(each)
    return tuple(
        InstanceLoad(
            instance=name,
            requests=len(its),
            prompt_tokens=sum(each.row.prompt_tokens for each in its),
            cached_tokens=sum(each.cached_tokens for each in its),
            output_tokens=sum(each.row.output_tokens for each in its),
            prefill_s=math.fsum(prefill_s(each, profile, cached_tokens=each.cached_tokens) for each in its),
        )
        for name, its in zip(names, given, strict=True)
    )


def late_s(value: float | None) -> float:
    """A time that never came is later than all others."""
    return math.inf if value is None else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
