"""Services: what a replica answers before it knows its tables."""

from typing import Any

import pytest

from tests.core.pools import POLICY
from tokenfleet.adapters.services import Desk
from tokenfleet.core.asked import SCHEDULE
from tokenfleet.core.errors import TableNotReadyError
from tokenfleet.core.site import Site
from tokenfleet.wire.v1 import decision_pb2, outcomes_pb2


def starting() -> Desk:
    """A desk that knows neither its tables nor how many partitions its topics have."""
    outbox: Any = object()
    site = Site("b", POLICY, policy_hash="", replica="0")
    return Desk(site, outbox, start=1, partitions={}.__getitem__, ready=lambda: False)


def test_a_replica_that_still_reads_asks_callers_to_come_again() -> None:
    """Both kinds of calls: a report refused so is sent again, to another replica; an internal error would not be."""
    with pytest.raises(TableNotReadyError):
        starting().decide(decision_pb2.Request(id="r", model="small-chat"), SCHEDULE, dry_run=False)
    with pytest.raises(TableNotReadyError):
        starting().report(outcomes_pb2.OutcomeEvent(request="r", kind=outcomes_pb2.OUTCOME_KIND_STARTED))
