"""Run: one routing run from its options, and what came of it."""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import Policy, TokenPilotPolicy
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links
from tokenfleet.sim.measure import (
    InstanceLoad,
    Result,
    figures_of,
    in_window,
    late_s,
    loads_of,
    prefill_s,
    quantiles,
)
from tokenfleet.sim.pilot import policy_of
from tokenfleet.sim.policies import policy_named
from tokenfleet.sim.profiles import Profile, load_profile
from tokenfleet.sim.router import MakeRouter
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.fits import check_fits
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import Trace, TraceRow
from tokenfleet.sim.traces.scale import scaled


class RunOptions(Struct, frozen=True, kw_only=True):
    """One run. `len_s` and `warm_s` None: by the fleet's size. `make_router` is taken instead of the policy's own and
    keeps its name. `kv_blocks` are an instance's, in blocks of the trace; None: its profile's memory. `event_delay_s`
    is the delay of placements, `links` all else of the links, `telemetry_period_s` the time between two scrapes, which
    without `engine_counts` tell neither requests nor KV use.
    """

    trace: str = "synthetic"
    copies: float = 2.0
    instances: int = 8
    policy: str = "tokenpilot"
    gateways: int = 1
    event_delay_s: float = 0.02
    profile: str = "L70"
    kv_blocks: int | None = None
    telemetry_period_s: float = 0.25
    engine_counts: bool = True
    seed: int = 1
    len_s: float | None = None
    warm_s: float | None = None
    links: Links = Links()
    weights: TokenPilotPolicy | None = None
    prior_factor: float = 1.0
    learning: bool = False
    make_router: MakeRouter | None = None
    skip_bad: bool = False
    drain_max_s: float = 3_600.0


class Run(Struct, frozen=True, kw_only=True):
    """A run's figures and all of its requests, in the order of arrival."""

    result: Result
    served: list[Served]


# Fleets up to so many instances: length and warm-up in seconds. Larger ones take longer to simulate a second.
WINDOWS: Final = ((8, 700.0, 250.0), (16, 500.0, 200.0))
WINDOW_LARGE: Final = (240.0, 120.0)
REQUESTS_MAX: Final = 2_000_000  # all copies laid over each other: about 1 KiB each where prompts are long


def run(
    options: RunOptions,
    *,
    cpu_s: Callable[[], float],
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Serve the trace and measure. `cpu_s` reads the processor time spent, for `requests_per_cpu_s` alone.

    Raises PolicyError for an unknown trace, policy or profile, for figures out of range, and for a fleet that can't
    hold a request of the trace.
    """
    make_router = options.make_router or policy_named(options.policy)
    trace, rows, profile = ready(options)
    len_s, warm_s = window(options)
    began_s = cpu_s()
    fleet = Fleet(_terms(options, profile), make_router, seed=options.seed, lessons_policy=_lessons(options, profile))
    served = fleet.serve(rows, progress=progress)
    spent_s = cpu_s() - began_s
    names = [engine.name for engine in fleet.engines]
    loads = loads_of(served, profile, names)
    result = _result(options, trace, served, profile, loads, len_s=len_s, warm_s=warm_s, spent_s=spent_s)
    return Run(result=result, served=served)


def ready(options: RunOptions) -> tuple[Trace, list[TraceRow], Profile]:
    """What a run of these options needs whatever its policy: the trace, its scaled requests, the profile in its blocks.

    Raises PolicyError as run does, in a small part of the time.
    """
    _refuse_impossible(options)
    len_s, warm_s = window(options)
    profile = load_profile(options.profile)
    trace = trace_of(options)
    rows = rows_of(trace, options, len_s=len_s, warm_s=warm_s)
    profile = profile.sized(block_size=rows[0].block_tokens, kv_blocks=options.kv_blocks)
    try:
        check_fits(rows, profile)
    except PolicyError as error:
        raise PolicyError(f"trace {options.trace} on {options.profile}: {error}") from error
    return trace, rows, profile


def window(options: RunOptions) -> tuple[float, float]:
    """(length, warm-up) in seconds. Raises PolicyError if the one leaves no room for the other."""
    usual_len_s, usual_warm_s = next((w[1:] for w in WINDOWS if options.instances <= w[0]), WINDOW_LARGE)
    len_s = usual_len_s if options.len_s is None else options.len_s
    warm_s = usual_warm_s if options.warm_s is None else options.warm_s
    if not 0.0 <= warm_s < len_s < math.inf:
        raise PolicyError(f"--warm {warm_s:g} s must be at least 0 and less than --len {len_s:g} s")
    return len_s, warm_s


def trace_of(options: RunOptions) -> Trace:
    """The trace as it was recorded. Raises PolicyError as read_trace does."""
    return read_trace(options.trace, skip_bad=options.skip_bad)


def rows_of(trace: Trace, options: RunOptions, *, len_s: float, warm_s: float) -> list[TraceRow]:
    """The requests of a run: the scaled trace's first `len_s` seconds. Raises PolicyError if none is measured."""
    if len(trace.rows) * options.copies > REQUESTS_MAX:
        raise PolicyError(
            f"--copies {options.copies:g} of the {len(trace.rows):,} requests of trace {options.trace}: "
            f"at most {REQUESTS_MAX:,} requests fit into a run"
        )
    rows = scaled(
        trace.rows,
        copies=options.copies,
        quantum_s=trace.quantum_s,
        rng=Random(f"{options.seed}/trace"),
        shared_first_block=trace.shared_first_block,
    )
    within = [row for row in rows if row.at_s < len_s]
    if not within:
        raise PolicyError(f"trace {options.trace}: no request arrives within {len_s:.0f} s")
    if within[-1].at_s < warm_s:
        raise PolicyError(
            f"trace {options.trace}: nothing to measure, the last request within --len {len_s:g} s arrives at "
            f"{within[-1].at_s:.1f} s; give a longer --len, or a --warm below that"
        )
    return within


def _refuse_impossible(options: RunOptions) -> None:
    for name, value, most in (("--instances", options.instances, 10_000), ("--gateways", options.gateways, 1_000)):
        if not 1 <= value <= most:
            raise PolicyError(f"{name} {value}: it is 1 to {most}")
    if not 0.0 <= options.event_delay_s < math.inf:
        raise PolicyError(f"--event-delay {options.event_delay_s:g}: it is 0.0 or more")
    for name, value in (("--copies", options.copies), ("--prior-factor", options.prior_factor)):
        if not 0.0 < value < math.inf:
            raise PolicyError(f"{name} {value:g}: it is more than 0")


def _terms(options: RunOptions, profile: Profile) -> FleetTerms:
    links = options.links
    placements = msgspec.structs.replace(links.placements, delay_s=options.event_delay_s)
    return FleetTerms(
        profile=profile,
        instances=options.instances,
        gateways=options.gateways,
        telemetry_period_s=options.telemetry_period_s,
        engine_counts=options.engine_counts,
        links=msgspec.structs.replace(links, placements=placements),
        weights=options.weights,
        prior_factor=options.prior_factor,
        learning=options.learning,
        drain_max_s=options.drain_max_s,
    )


def _lessons(options: RunOptions, profile: Profile) -> Policy | None:
    if not options.learning:
        return None
    return policy_of(profile, weights=options.weights, prior_factor=options.prior_factor, learning=True)


def _result(
    options: RunOptions,
    trace: Trace,
    served: Sequence[Served],
    profile: Profile,
    loads: tuple[InstanceLoad, ...],
    *,
    len_s: float,
    warm_s: float,
    spent_s: float,
) -> Result:
    measured = in_window(served, warm_s=warm_s, len_s=len_s)
    figures = [figures_of(each) for each in measured]
    completed = [each for each in measured if each.finished_s is not None]
    ended = [each for each in served if warm_s <= late_s(each.finished_s) < len_s]
    prompt_tokens = sum(each.row.prompt_tokens for each in completed)
    cold_s = math.fsum(prefill_s(each, profile, cached_tokens=0) for each in served if each.instance >= 0)
    capacity_s = options.instances * len_s
    return Result(
        seed=options.seed,
        policy=options.policy,
        trace=options.trace,
        bad_lines=trace.bad,
        repeated_rows=trace.repeats,
        copies=options.copies,
        instances=options.instances,
        gateways=options.gateways,
        event_delay_s=options.event_delay_s,
        profile=options.profile,
        len_s=len_s,
        warm_s=warm_s,
        rho=cold_s / capacity_s,
        rho_cached=math.fsum(load.prefill_s for load in loads) / capacity_s,
        measured=len(measured),
        completed=len(completed),
        unfinished=sum(each.finished_s is None and not each.refused for each in measured),
        rejected=sum(bool(each.refused) for each in measured),
        ttft_s=quantiles([late_s(each.ttft_s) for each in figures]),
        tpot_s=quantiles([each.tpot_s for each in figures if each.tpot_s is not None]),
        e2e_s=quantiles([late_s(each.e2e_s) for each in figures]),
        hit_ratio=sum(each.cached_tokens for each in completed) / prompt_tokens if prompt_tokens else 0.0,
        throughput_tokens_per_s=sum(each.row.output_tokens for each in ended) / (len_s - warm_s),
        requests_per_cpu_s=len(served) / max(spent_s, 1e-9),
        loads=loads,
    )
