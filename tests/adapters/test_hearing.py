"""Hearing: a record of the log as a fact, with the age of what ends by itself."""

import pytest

from tests.core.fleets import Town, asked
from tests.core.test_revisions import canary
from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.hearing import hear
from tokenfleet.adapters.kafka_reading import Record
from tokenfleet.adapters.topics import POLICY
from tokenfleet.core.revisions import MARGIN_S

FOR_S = 600.0


@pytest.mark.parametrize(
    ("live", "old_s", "tried"),
    [
        (True, 0.0, True),
        (True, 2 * FOR_S, True),  # heard as it came: no clock of another host is asked
        (False, FOR_S / 2, True),
        (False, 2 * FOR_S, False),
        (False, -2 * FOR_S, True),  # the broker's clock is ahead: no canary outlasts its time from when it was read
    ],
)
def test_a_canary_that_is_read_late_is_as_old_as_the_log_says(*, live: bool, old_s: float, tried: bool) -> None:
    b = Town("b", small=1)
    hear(
        b.site,
        Record(
            topic=POLICY,
            site="",
            cluster="k",
            partition=0,
            offset=0,
            message=canary(share=0.999, for_s=FOR_S),
            live=live,
            read_at_s=b.now_s,
            appended_wall_s=wall_s() - old_s,
        ),
    )
    assert (b.decide(asked("r1")).decision.policy_revision == 2) is tried
    b.now_s += FOR_S + MARGIN_S
    assert b.decide(asked("r2")).decision.policy_revision == 1
