"""Measure: what the requests of one origin came to on the engines of several sites."""

from collections.abc import Sequence

from msgspec import Struct

from tokenfleet.sim.measure import Quantiles, late_s, quantiles
from tokenfleet.sim.sites.layout import PINNED, Place
from tokenfleet.sim.sites.world import Trip

IN_TIME_S = 2.0


class Result(Struct, frozen=True, kw_only=True):
    """One run. Requests that arrive in [`warm_s`, `len_s`) are measured; times run from the arrival at the origin to
    where the token is there again, both ways included. One that no site took or that never finished counts as
    infinitely late. `share` is each site's part of the measured requests, `residency_violations` counts those of all
    requests that ran where they may not, `sent_back` those that a site had no room for.
    """

    seed: int
    design: str
    copies: float
    residency: float
    summary_age_s: float
    ingresses: int
    replicas: int
    event_delay_s: float
    profile: str
    len_s: float
    warm_s: float
    measured: int
    completed: int
    rejected: int
    unfinished: int
    sent_back: int
    ttft_s: Quantiles
    ttft_within_2s: float
    tpot_s: Quantiles
    e2e_s: Quantiles
    hit_ratio: float
    share: dict[str, float]
    residency_violations: int
    requests_per_cpu_s: float


class Times(Struct, frozen=True, kw_only=True):
    """One request as its origin sees it, in seconds; None: never."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


def times_of(trip: Trip, places: dict[str, Place]) -> Times:
    """The way there is in the engine's times already, since the request left when it arrived; the way back is added."""
    served, row = trip.served, trip.served.row
    first_s, finished_s = served.first_token_s, served.finished_s
    if first_s is None or not trip.site:
        return Times(ttft_s=None, tpot_s=None, e2e_s=None)
    back_s = places[trip.site].rtt_s / 2
    decoded = row.output_tokens - 1
    return Times(
        ttft_s=first_s + back_s - row.at_s,
        tpot_s=(finished_s - first_s) / decoded if finished_s is not None and decoded else None,
        e2e_s=None if finished_s is None else finished_s + back_s - row.at_s,
    )


def measured(trips: Sequence[Trip], *, warm_s: float, len_s: float) -> list[Trip]:
    """Arrivals in [warm_s, len_s)."""
    return [trip for trip in trips if warm_s <= trip.served.row.at_s < len_s]


def figures(trips: Sequence[Trip], places: dict[str, Place]) -> tuple[Quantiles, float, Quantiles, Quantiles]:
    """Percentiles of the time to first token, the share of it within 2 s, and of time per output token and the end."""
    times = [times_of(trip, places) for trip in trips]
    ttft_s = [late_s(each.ttft_s) for each in times]
    return (
        quantiles(ttft_s),
        sum(each <= IN_TIME_S for each in ttft_s) / max(1, len(ttft_s)),
        quantiles([each.tpot_s for each in times if each.tpot_s is not None]),
        quantiles([late_s(each.e2e_s) for each in times]),
    )


def shares(trips: Sequence[Trip], places: dict[str, Place]) -> dict[str, float]:
    """The part of the requests that ran at each site."""
    ran = [trip.site for trip in trips if trip.served.dispatched_s is not None]
    return {name: ran.count(name) / max(1, len(ran)) for name in places}


def violations(trips: Sequence[Trip], places: dict[str, Place], jurisdiction: str) -> int:
    """Requests of the pinned tenant that ran outside of its jurisdiction."""
    return sum(
        trip.served.dispatched_s is not None
        and trip.served.tenant == PINNED
        and places[trip.site].jurisdiction != jurisdiction
        for trip in trips
    )
