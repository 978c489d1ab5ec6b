"""Strange records: whatever a schema lets through, the tables take it in or refuse it, and decisions go on."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.builders import placed, placements
from tests.core.fleets import POLICY, Town, asked
from tests.strange import strange
from tokenfleet.adapters.codec import decode, encode
from tokenfleet.adapters.topics import (
    CAPACITY,
    CONTROL,
    DECISIONS,
    FEEDBACK,
    GOODPUT,
    KVCACHE,
    PLACEMENTS,
    SKETCH,
    SUMMARY,
    Topic,
)
from tokenfleet.adapters.topics import (
    POLICY as POLICY_TOPIC,
)
from tokenfleet.core.canary import judged
from tokenfleet.core.capacity_writer import TelemetryShard
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.arms import Arms
from tokenfleet.core.goodput.lessons import Lessons
from tokenfleet.core.goodput.partition import PartitionGoodput
from tokenfleet.core.records import DecisionEnvelope, OutcomeEnvelope, SketchChunk, TelemetryEnvelope
from tokenfleet.core.site import Heard
from tokenfleet.core.sketch import Sketches

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HEARD = (CAPACITY, KVCACHE, PLACEMENTS, SUMMARY, SKETCH, CONTROL, POLICY_TOPIC, FEEDBACK)
KEYS = b"12345678" * 3


@pytest.mark.parametrize("topic", HEARD, ids=lambda topic: topic.name)
def test_a_site_takes_it_in_and_decides(topic: Topic[Any]) -> None:
    @FEW
    @given(st.lists(st.one_of([strange(kind) for kind in topic.messages]), min_size=1, max_size=3))
    def heard(facts: list[Any]) -> None:
        town = Town("b", small=2)
        for offset, fact in enumerate(facts):
            fact = decode(topic, encode(topic, fact))
            try:
                town.site.heard(fact, Heard(now_s=town.now_s, offset=offset))
            except PolicyError:
                continue
        decision = town.decide(asked("r", block_keys=KEYS, block_tokens=256)).decision
        decode(DECISIONS, encode(DECISIONS, DecisionEnvelope(site="b", replica="0", decisions=(decision,))))
        assert not any(math.isnan(n) for n in (decision.predicted_ttft_s, decision.gap_s) if n is not None)
        town.site.advance(0, town.now_s + 100.0, live=True)
        town.site.pools(town.now_s)

    heard()


@pytest.mark.parametrize("work_s", [math.nan, math.inf, -1.0, 1e300])
def test_work_of_another_replica_that_is_no_number_of_seconds_stops_no_decision(work_s: float) -> None:
    """Costs of NaN once left no least one."""
    town = Town("b", small=1)
    (instance,) = (row.beat.instance for row in town.site.capacity.rows())
    events = placed("d1", instance, work_s=work_s), placed("d2", instance, work_s=work_s)
    town.site.heard(placements(*events, replica="other"), Heard(now_s=town.now_s))
    decision = town.decide(asked("r", block_keys=KEYS, block_tokens=256)).decision
    assert decision.verdict == "admit"
    assert decision.predicted_ttft_s is not None
    assert math.isfinite(decision.predicted_ttft_s)


@FEW
@given(st.lists(strange(TelemetryEnvelope), min_size=1, max_size=3))
def test_a_shard_of_it_can_be_read(envelopes: list[TelemetryEnvelope]) -> None:
    shard = TelemetryShard(site="b", shard=0, cluster="k", period_s=0.1)
    for n, envelope in enumerate(envelopes):
        shard.apply(envelope, offset=n, now_s=1000.0 + n, live=True)
    shard.advance(1010.0, live=True)
    sent = decode(CAPACITY, encode(CAPACITY, shard.snapshot(1010.0, n=1, epoch=0)))
    town = Town("b")
    town.site.heard(sent, Heard(now_s=town.now_s))
    town.decide(asked("r"))


@FEW
@given(st.lists(strange(OutcomeEnvelope), min_size=1, max_size=3))
def test_goodput_and_calibration_of_it_can_be_read(envelopes: list[OutcomeEnvelope]) -> None:
    partition, lessons = PartitionGoodput(POLICY, sources=("b",), published=(), from_s=-math.inf), Lessons()
    arms = Arms(base=0, canary=1, since_s=-math.inf)
    partition.count_into(arms)
    for n, envelope in enumerate(envelopes):
        lessons.observe(partition.hear("b", envelope, appended_wall_s=1.8e9 + n, now_s=1000.0 + n), POLICY)
    partition.caught_up("b")
    for now_s in (1010.0, 9000.0):
        for partial in partition.partials(site="fleet", partition=0, cluster="k", now_s=now_s):
            decode(GOODPUT, encode(GOODPUT, partial))
    decode(FEEDBACK, encode(FEEDBACK, lessons.feedback(at_wall_s=1.8e9)))
    judged(arms.of[0], arms.of[1], elapsed_s=1.0, for_s=1.0)


def test_a_sketch_that_claims_many_parts_takes_no_memory() -> None:
    """Two billion parts once were a list of two billion numbers."""
    with pytest.raises(ValueError, match="beyond the last"):
        SketchChunk(site="c", pool="p", cluster="k", epoch=0, n=1, part=1, parts=1, hashes=6, keys=1, bits=b"\x01")
    huge = SketchChunk(
        site="c", pool="p", cluster="k", epoch=0, n=1, part=0, parts=2**31, hashes=6, keys=1, bits=b"\x01"
    )
    Sketches().heard(huge)
