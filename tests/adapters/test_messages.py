"""Messages on the wire: what an outcome may say, and who may say it."""

from typing import get_args

import pytest

from tokenfleet.adapters.messages import outcome_from_wire, to_wire
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.records import OutcomeEvent, OutcomeKind
from tokenfleet.wire.v1 import outcomes_pb2


def outcome(kind: OutcomeKind) -> OutcomeEvent:
    return OutcomeEvent(
        request="r",
        attempt=0,
        kind=kind,
        decision="d",
        tenant="acme",
        request_class="chat",
        model="m",
        origin="a",
        at_wall_s=1.0,
        elapsed_s=1.0,
    )


@pytest.mark.parametrize("kind", get_args(OutcomeKind))
def test_every_outcome_that_is_recorded_can_be_answered(kind: OutcomeKind) -> None:
    message = outcomes_pb2.OutcomeEvent()
    to_wire(outcome(kind), message)
    assert outcomes_pb2.OutcomeKind.Name(message.kind) == f"OUTCOME_KIND_{kind.upper()}"


@pytest.mark.parametrize("kind", get_args(OutcomeKind))
def test_all_outcomes_but_a_refusal_can_be_reported(kind: OutcomeKind) -> None:
    message = outcomes_pb2.OutcomeEvent()
    to_wire(outcome(kind), message)
    if kind == "rejected":  # the decision service's own word: whoever is refused can't deny it
        with pytest.raises(BadRequestError, match="kind: not one of"):
            outcome_from_wire(message, site="a", received_wall_s=1.0)
    else:
        assert outcome_from_wire(message, site="a", received_wall_s=1.0).kind == kind
