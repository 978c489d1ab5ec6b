"""Several sites: requests travel, stay where they must, and come back from a site that has no room."""

from time import process_time

import pytest
from msgspec.structs import replace

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.profiles import load_profile
from tokenfleet.sim.sites.dispatchers import DESIGNS, SPILL_AT
from tokenfleet.sim.sites.layout import FREE, PINNED, PLACES, Place
from tokenfleet.sim.sites.measure import times_of
from tokenfleet.sim.sites.run import SitesOptions, SitesRun, run_sites
from tokenfleet.sim.sites.world import Trip, World, WorldTerms
from tokenfleet.sim.traces.rows import TraceRow

B, C, D = PLACES
SHORT = SitesOptions(len_s=40.0, warm_s=10.0)


def run(options: SitesOptions) -> SitesRun:
    return run_sites(options, cpu_s=process_time)


def served(
    *rows: TraceRow, design: str = "fleetmind", places: tuple[Place, ...] = PLACES, kv_blocks: int | None = None
) -> list[Trip]:
    profile = load_profile("L70").sized(block_size=512, kv_blocks=kv_blocks)
    return World(WorldTerms(profile=profile, design=design, places=places), seed=1).serve(rows)


def row(at_s: float, *, tenant: str = FREE, prompt_tokens: int = 1_000, output_tokens: int = 10) -> TraceRow:
    return TraceRow(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens, tenant=tenant)


def test_the_first_token_of_a_farther_site_is_later_by_the_round_trip_and_the_upload() -> None:
    def ttft_s(place: Place) -> float:
        [trip] = served(row(1.0), design="local_only", places=(replace(place, instances=1),))
        return times_of(trip, {place.name: place}).ttft_s or 0.0

    own_s = B.rtt_s + B.upload_s(1_000), D.rtt_s + D.upload_s(1_000)
    assert ttft_s(D) - ttft_s(B) == pytest.approx(own_s[1] - own_s[0])


@pytest.mark.parametrize("design", sorted(DESIGNS))
def test_no_design_moves_a_request_that_must_stay(design: str) -> None:
    result = run(replace(SHORT, design=design, residency=0.5))
    pinned = [trip for trip in result.trips if trip.served.tenant == PINNED and trip.served.dispatched_s is not None]
    assert len(pinned) > 50
    assert {trip.site for trip in pinned} == {"b"}
    assert result.result.residency_violations == 0


def test_equal_seeds_run_alike_and_others_do_not() -> None:
    def sites(seed: int) -> list[str]:
        return [trip.site for trip in run(replace(SHORT, seed=seed)).trips]

    assert sites(3) == sites(3) != sites(4)


def test_a_site_that_refuses_sends_the_request_back_and_another_takes_it() -> None:
    """Nobody tells of KV use in between: the origin's rule sends more than the near site holds."""
    places = (replace(B, instances=1), replace(C, instances=1))
    rows = [row(1.0 + 0.001 * n, prompt_tokens=6_000, output_tokens=200) for n in range(SPILL_AT)]
    trips = served(*rows, design="spill", places=places, kv_blocks=40)
    assert {trip.site for trip in trips} == {"b", "c"}
    assert all(trip.served.finished_s is not None for trip in trips)
    assert any(trip.tried == ["b"] and trip.site == "c" for trip in trips)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (SitesOptions(design="best"), "--design 'best': there is"),
        (SitesOptions(residency=1.5), "--residency 1.5: it is 0 to 1"),
        (SitesOptions(copies=0.0), "--copies 0: it is more than 0"),
        (SitesOptions(summary_age_s=float("nan")), "--summary-age nan: it is more than 0"),
        (SitesOptions(ingresses=0), "--ingresses 0: it is 1 to 16"),
        (SitesOptions(len_s=10.0, warm_s=20.0), "--warm 20 s must be"),
    ],
)
def test_options_that_make_no_run_are_refused_before_it(options: SitesOptions, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        run(options)
