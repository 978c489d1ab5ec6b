"""Messages on the wire: what an outcome may say, and who may say it."""

from typing import get_args

import pytest

from tokenfleet.adapters.messages import decision_to_wire, outcome_from_wire, to_wire
from tokenfleet.core.decision import Admission, Candidate, Decision
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


def test_what_is_set_at_once_keeps_absent_apart_from_zero() -> None:
    cold = Candidate(instance="a", cost_s=1.0, ttft_s=0.0, wait_s=0.0, work_s=0.0, age_s=None, kv_use=0.0)
    warm = Candidate(instance="b", cost_s=2.0, ttft_s=0.0, wait_s=0.0, work_s=0.0, age_s=0.0, kv_use=None, suspect=True)
    decision = Decision(
        id="d",
        request="r",
        attempt=0,
        verdict="admit",
        tenant="t",
        model="m",
        request_class="chat",
        origin="b",
        prompt_tokens=0,
        gap_s=0.0,
        candidates=(cold, warm),
        gateways=("x:1", "y:2"),
        excluded={"draining": 2},
        admission=Admission(request_class="chat", rule="r", output_q50_tokens=1.0, output_q90_tokens=0.0),
    )
    message = decision_to_wire(decision)
    one, two = message.candidates
    assert (one.instance, one.HasField("age_s"), one.HasField("kv_use"), one.kv_use) == ("a", False, True, 0.0)
    assert (two.suspect, two.HasField("age_s"), two.age_s, two.HasField("kv_use")) == (True, True, 0.0, False)
    assert [message.HasField(name) for name in ("gap_s", "age_s", "predicted_ttft_s")] == [True, False, False]
    assert (list(message.gateways), dict(message.excluded)) == (["x:1", "y:2"], {"draining": 2})
    assert (message.admission.rule, message.admission.HasField("ttft_max_s")) == ("r", False)


@pytest.mark.parametrize("kind", get_args(OutcomeKind))
def test_all_outcomes_but_a_refusal_can_be_reported(kind: OutcomeKind) -> None:
    message = outcomes_pb2.OutcomeEvent()
    to_wire(outcome(kind), message)
    if kind == "rejected":  # the decision service's own word: whoever is refused can't deny it
        with pytest.raises(BadRequestError, match="kind: not one of"):
            outcome_from_wire(message, site="a", received_wall_s=1.0)
    else:
        assert outcome_from_wire(message, site="a", received_wall_s=1.0).kind == kind
