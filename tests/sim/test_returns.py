"""Callers who can't wait and come again: with tickets they form a line, without they are a crowd at a door."""

from random import Random

import pytest
from msgspec import Struct
from msgspec.structs import replace

from tests.sim.worlds import TINY, row
from tokenfleet.core.asked import Steps
from tokenfleet.core.policy import RequestClass
from tokenfleet.core.slomax.terms import RetryPolicy
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.pilot import Pilot, policy_of

ROOMY = replace(TINY, kv_tokens=16 * 8192, sequences_max=64)
UNBOUND = 1e9
FLOOD_S = 30.0


class AtTheDoor(Pilot):
    """At most eight run; who finds no room is told when to come again."""

    steps = Steps(admission=True, routing=True)
    wait_max_s = 0.0


class Came(Struct, frozen=True, kw_only=True):
    """Waits in ascending order, pairs of which the later by 2 s went first, and when the last one ended."""

    waits_s: list[float]
    overtakings: int
    end_s: float

    def quantile_s(self, q: float) -> float:
        return self.waits_s[int(q * len(self.waits_s))]


def flood(*, tickets: bool, seed: int) -> Came:
    """Half a minute of twice what eight at a time can serve; all come again until they are served."""
    bound = RequestClass(running_max_per_instance=8, backlog_max_s=UNBOUND, kv_share_max=1.0)
    base = policy_of(ROOMY)
    slomax = replace(base.slomax, retry=RetryPolicy(budget_max=1e6))  # else who has no ticket is not served at all
    policy = replace(base, classes=dict.fromkeys(base.classes, bound), slomax=slomax)
    terms = FleetTerms(profile=ROOMY, instances=1, policy=policy, patience_s=UNBOUND, shows_tickets=tickets)
    rng, at_s, rows = Random(seed), 0.0, []
    while at_s < FLOOD_S:
        at_s += rng.expovariate(14.5)
        rows.append(row(at_s, prompt=64, out=32))
    served = Fleet(terms, AtTheDoor, seed=seed).serve(rows)
    went = sorted((each.dispatched_s, each.row.at_s) for each in served if each.dispatched_s is not None)
    assert len(went) == len(rows)
    came = [came_s for _, came_s in went]
    return Came(
        waits_s=sorted(went_s - came_s for went_s, came_s in went),
        overtakings=sum(later > came_s + 2.0 for n, came_s in enumerate(came) for later in came[:n]),
        end_s=max(each.finished_s or 0.0 for each in served),
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_with_tickets_few_overtake_and_the_longest_waits_are_shorter_at_no_cost_of_capacity(seed: int) -> None:
    line, crowd = flood(tickets=True, seed=seed), flood(tickets=False, seed=seed)
    assert line.overtakings < crowd.overtakings / 3
    assert line.quantile_s(0.95) < 0.8 * crowd.quantile_s(0.95)
    assert line.waits_s[-1] < 0.7 * crowd.waits_s[-1]
    assert line.end_s < 1.05 * crowd.end_s


def test_the_same_seed_gives_the_same_line() -> None:
    assert flood(tickets=True, seed=3) == flood(tickets=True, seed=3)
