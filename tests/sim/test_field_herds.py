"""Herds in virtual time: however little is told, equals share what comes, and what is open is what is counted."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from msgspec.structs import replace

from tokenfleet.core.policy import LateBindingPolicy, TokenPilotPolicy
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links, LinkTerms
from tokenfleet.sim.pilot import Pilot
from tokenfleet.sim.profiles import profiles
from tokenfleet.sim.router import Setup
from tokenfleet.sim.served import Served
from tokenfleet.sim.traces.rows import TraceRow

NEVER_S = 1e9  # a period of telemetry of which only the start is heard
AT_ONCE = TokenPilotPolicy(late=LateBindingPolicy(enabled=False))
SHARED = range(1, 9)  # the blocks of a system prompt

TERMS = FleetTerms(profile=profiles()["L70"], instances=3)


def shares(served: Sequence[Served]) -> list[int]:
    """Requests by instance, the most first."""
    return sorted(Counter(each.instance for each in served).values(), reverse=True)


@pytest.mark.parametrize("shared", [False, True], ids=["nothing in common", "one system prompt"])
@pytest.mark.parametrize(("gateways", "weights"), [(1, None), (1, AT_ONCE), (4, None)], ids=["held", "at once", "four"])
def test_a_burst_on_frozen_telemetry_is_spread(gateways: int, weights: TokenPilotPolicy | None, shared: bool) -> None:
    """400 in 50 ms on four equals: no snapshot comes between, and replicas hear of one another 20 ms late."""
    terms = replace(
        TERMS,
        instances=4,
        gateways=gateways,
        weights=weights,
        telemetry_period_s=NEVER_S,
        kv_snapshot_period_s=NEVER_S,
        links=Links(kv=LinkTerms(loss=1.0)),
    )
    rows = [
        TraceRow(
            at_s=1.0 + 0.05 * n / 400,
            prompt_tokens=4096,
            output_tokens=100,
            hash_ids=(*SHARED,)[:4] + tuple(range(1000 * n, 1000 * n + 4)) if shared else (),
        )
        for n in range(1, 401)
    ]
    served = Fleet(terms, Pilot, seed=1).serve(rows)
    assert shares(served)[0] <= 150
    assert sum(shares(served)) == 400


@pytest.mark.parametrize("gateways", [1, 3])
def test_idle_equals_share_requests_that_never_meet(gateways: int) -> None:
    rows = [TraceRow(at_s=0.5 * n, prompt_tokens=100, output_tokens=3) for n in range(1, 301)]
    served = Fleet(replace(TERMS, gateways=gateways), Pilot, seed=1).serve(rows)
    for one, other in pairwise(served):
        assert one.finished_s is not None
        assert one.finished_s < other.row.at_s
    assert all(80 <= count <= 120 for count in shares(served)), shares(served)


@pytest.mark.parametrize("gateways", [1, 3])
def test_open_requests_are_shared_by_equals_and_counted_by_every_gateway_until_they_end(gateways: int) -> None:
    """At each scrape the ledgers say what the engines have, and at the end that nothing is left."""
    pilots: list[Pilot] = []

    def make_router(setup: Setup) -> Pilot:
        pilots.append(Pilot(setup))
        return pilots[-1]

    world = Fleet(replace(TERMS, gateways=gateways), make_router, seed=1)
    compared = 0

    def compare(now_s: float) -> None:
        nonlocal compared
        if 2.0 < now_s < 5.0:  # all have come and none has ended
            has = {each.name: each.machine.load().running + each.machine.load().waiting for each in world.engines}
            assert sum(has.values()) == 300
            for pilot in pilots:
                assert {name: len(pilot.site.ledger.placements(name)) for name in has} == has
                compared += 1

    rows = [TraceRow(at_s=0.5 + 0.004 * n, prompt_tokens=100, output_tokens=400) for n in range(1, 301)]
    last = TraceRow(at_s=60.0, prompt_tokens=100, output_tokens=1)
    served = world.serve([*rows, last], progress=compare)[:-1]
    assert compared > 10 * gateways
    assert all(80 <= count <= 120 for count in shares(served)), shares(served)
    assert all(len(pilot.site.ledger) <= 1 for pilot in pilots)  # the last one's end may still be on its way
