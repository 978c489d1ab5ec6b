"""Run: requests that reach origins and run at several sites, from the options to what came of it."""

import math
from collections.abc import Callable, Sequence
from random import Random

import xxhash
from msgspec import Struct
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError, listed
from tokenfleet.sim.profiles import load_profile
from tokenfleet.sim.sites.dispatchers import DESIGNS
from tokenfleet.sim.sites.layout import FREE, HERE, PINNED, PLACES
from tokenfleet.sim.sites.measure import Result, figures, measured, shares, violations
from tokenfleet.sim.sites.world import Trip, World, WorldTerms
from tokenfleet.sim.traces.fits import check_fits
from tokenfleet.sim.traces.read import read_trace
from tokenfleet.sim.traces.rows import TraceRow
from tokenfleet.sim.traces.scale import scaled

LEN_S, WARM_S = 500.0, 200.0
TRACE = "conversation"


class SitesOptions(Struct, frozen=True, kw_only=True):
    """One run. `residency` is the share of conversations that must stay in the origin's jurisdiction, `summary_age_s`
    the time between two summaries of a site, `ingresses` the origins, `replicas` those of each decision service."""

    design: str = "fleetmind"
    copies: float = 2.6
    residency: float = 0.2
    summary_age_s: float = 0.5
    ingresses: int = 1
    replicas: int = 1
    event_delay_s: float = 0.02
    trace: str = TRACE
    profile: str = "L70"
    len_s: float = LEN_S
    warm_s: float = WARM_S
    seed: int = 1

    @property
    def label(self) -> str:
        return f"{self.design}, seed {self.seed}"


class SitesRun(Struct, frozen=True, kw_only=True):
    """A run's figures, and all of its requests in the order of arrival."""

    result: Result
    trips: list[Trip]


def run_sites(
    options: SitesOptions, *, cpu_s: Callable[[], float], progress: Callable[[float], None] | None = None
) -> SitesRun:
    """Serve the trace and measure. `cpu_s` reads the processor time spent, for `requests_per_cpu_s` alone.

    Raises PolicyError for an unknown design, trace or profile, and for figures out of range.
    """
    _refuse_impossible(options)
    rows = rows_of(options)
    profile = load_profile(options.profile).sized(block_size=rows[0].block_tokens)
    check_fits(rows, profile)
    terms = WorldTerms(
        profile=profile,
        design=options.design,
        places=PLACES,
        origins=options.ingresses,
        replicas=options.replicas,
        event_delay_s=options.event_delay_s,
        summary_period_s=options.summary_age_s,
    )
    began_s = cpu_s()
    world = World(terms, seed=options.seed)
    trips = world.serve(rows, progress=progress)
    spent_s = cpu_s() - began_s
    return SitesRun(result=_result(options, world, trips, spent_s=spent_s), trips=trips)


def rows_of(options: SitesOptions) -> list[TraceRow]:
    """The requests of a run, a share of the conversations as the pinned tenant's."""
    trace = read_trace(options.trace)
    rows = scaled(
        trace.rows,
        copies=options.copies,
        quantum_s=trace.quantum_s,
        rng=Random(f"{options.seed}/trace"),
        shared_first_block=trace.shared_first_block,
    )
    own = 1 if trace.shared_first_block else 0  # the first block that tells conversations apart
    return [replace(row, tenant=_tenant(row, own, options.residency)) for row in rows if row.at_s < options.len_s]


def _tenant(row: TraceRow, own: int, residency: float) -> str:
    block = row.hash_ids[min(own, len(row.hash_ids) - 1)] if row.hash_ids else row.line
    drawn = xxhash.xxh3_64_intdigest(block.to_bytes(8, "little")) / 2**64
    return PINNED if drawn < residency else FREE


def _refuse_impossible(options: SitesOptions) -> None:
    if options.design not in DESIGNS:
        raise PolicyError(f"--design {options.design!r}: there is {listed(tuple(DESIGNS))}")
    if not 0.0 <= options.residency <= 1.0:
        raise PolicyError(f"--residency {options.residency:g}: it is 0 to 1")
    for name, value in (("--copies", options.copies), ("--summary-age", options.summary_age_s)):
        if not 0.0 < value < math.inf:
            raise PolicyError(f"{name} {value:g}: it is more than 0")
    for name, value, most in (("--ingresses", options.ingresses, 16), ("--replicas", options.replicas, 64)):
        if not 1 <= value <= most:
            raise PolicyError(f"{name} {value}: it is 1 to {most}")
    if not 0.0 <= options.warm_s < options.len_s < math.inf:
        raise PolicyError(f"--warm {options.warm_s:g} s must be at least 0 and less than --len {options.len_s:g} s")


def _result(options: SitesOptions, world: World, trips: Sequence[Trip], *, spent_s: float) -> Result:
    counted = measured(trips, warm_s=options.warm_s, len_s=options.len_s)
    ttft_s, within, tpot_s, e2e_s = figures(counted, world.places)
    completed = [trip for trip in counted if trip.served.finished_s is not None]
    prompt_tokens = sum(trip.served.row.prompt_tokens for trip in completed)
    return Result(
        seed=options.seed,
        design=options.design,
        copies=options.copies,
        residency=options.residency,
        summary_age_s=options.summary_age_s,
        ingresses=options.ingresses,
        replicas=options.replicas,
        event_delay_s=options.event_delay_s,
        profile=options.profile,
        len_s=options.len_s,
        warm_s=options.warm_s,
        measured=len(counted),
        completed=len(completed),
        rejected=sum(bool(trip.served.refused) for trip in counted),
        unfinished=sum(trip.served.finished_s is None and not trip.served.refused for trip in counted),
        sent_back=sum(len(trip.tried) for trip in trips),
        ttft_s=ttft_s,
        ttft_within_2s=within,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        hit_ratio=sum(trip.served.cached_tokens for trip in completed) / prompt_tokens if prompt_tokens else 0.0,
        share=shares(counted, world.places),
        residency_violations=violations(trips, world.places, HERE),
        requests_per_cpu_s=len(trips) / max(spent_s, 1e-9),
    )
