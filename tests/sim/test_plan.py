"""A day of plans: fewer accelerators than sites that always have what their peak needs, for the same work."""

from time import process_time

import pytest

from tokenfleet.core.errors import PolicyError
from tokenfleet.sim.plan.fleet import Fleet
from tokenfleet.sim.plan.run import PlanOptions, run_plan


def test_two_hours_of_plans_serve_what_peaks_would_with_less() -> None:
    result = run_plan(PlanOptions(design="perfect", hours=2.0), now_s=process_time)
    assert result.attainment >= 0.999
    assert result.saved > 0.2
    assert (result.plans, len(result.ready)) == (24, 24)


def test_sites_help_one_another_and_what_none_can_serve_is_missed() -> None:
    fleet = Fleet([2, 4], cold_steps=2, warm_steps=1)
    assert fleet.minute([3.0, 2.0]).served == 5.0
    assert fleet.minute([5.0, 3.0]).served == 6.0
    assert fleet.minute([5.0, 3.0]).gpus == 6


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (PlanOptions(design="best"), "--design 'best': there is"),
        (PlanOptions(hours=0.0), "--hours 0: it is"),
        (PlanOptions(peak=3.0), "--peak 3: it is 1 to 2"),
        (PlanOptions(critical=-1.0), "--critical -1: it is 0 to 1"),
    ],
)
def test_options_that_make_no_run_are_refused(options: PlanOptions, word: str) -> None:
    with pytest.raises(PolicyError, match=word):
        run_plan(options, now_s=process_time)
