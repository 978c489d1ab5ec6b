"""Capacity writer: the fold of a telemetry partition is a pure function of its log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import CLUSTER, SITE, beat, envelope, row, shard
from tokenfleet.core.capacity import CapacityTable, liveness
from tokenfleet.core.capacity_writer import SILENT_MAX_S, TelemetryShard
from tokenfleet.core.policy import LivenessPolicy
from tokenfleet.core.records import AgentClaim, CapacityShard, TelemetryEnvelope


def fold(
    *envelopes: TelemetryEnvelope, cluster: str = CLUSTER, live: bool = True, now_s: float = 100.0
) -> TelemetryShard:
    folded = TelemetryShard(site=SITE, shard=0, cluster=cluster, period_s=0.1)
    for offset, each in enumerate(envelopes):
        folded.apply(each, offset=offset, now_s=now_s, live=live)
    return folded


def waiting(folded: TelemetryShard, now_s: float = 100.0) -> dict[str, float | None]:
    return {each.beat.instance: each.beat.waiting for each in folded.snapshot(now_s, n=1, epoch=0).rows}


def test_the_newest_envelope_of_each_agent_counts() -> None:
    first, second = envelope(beat("a", waiting=1), n=1), envelope(beat("a", waiting=2), n=2)
    assert waiting(fold(first, second)) == waiting(fold(second, first)) == {"a": 2}


def test_an_agents_new_life_outranks_its_old_one() -> None:
    old, new = envelope(beat("a", waiting=1), claim=3, n=500), envelope(beat("a", waiting=2), claim=9, n=1)
    assert waiting(fold(old, new)) == waiting(fold(new, old)) == {"a": 2}


def test_a_claim_alone_changes_nothing() -> None:
    folded = fold(envelope(beat("a", waiting=1)))
    folded.apply(AgentClaim(agent="agent-1", site=SITE), offset=5, now_s=100.0, live=True)
    assert waiting(folded) == {"a": 1}


def test_an_instance_that_its_agent_no_longer_lists_is_gone() -> None:
    assert waiting(fold(envelope(beat("a"), beat("b"), n=1), envelope(beat("b"), n=2))) == {"b": 0}


def test_orders_of_another_cluster_yield_to_this_ones() -> None:
    foreign, own = envelope(beat("a", waiting=1), cluster="gone", claim=900, n=9), envelope(beat("a", waiting=2))
    assert waiting(fold(foreign, own)) == waiting(fold(own, foreign)) == {"a": 2}


def test_of_two_agents_on_one_instance_the_later_in_the_log_stays_and_both_are_told() -> None:
    folded = fold(envelope(beat("a", waiting=1), agent="x"))
    late = envelope(beat("a", waiting=2), agent="y")
    assert folded.apply(late, offset=7, now_s=101.0, live=True).conflicts == ("a",)
    assert waiting(folded) == {"a": 2}


def test_ages_grow_on_this_clock_and_are_unknown_when_not_heard_live() -> None:
    found = fold(envelope(beat("a", age_s=0.5))).snapshot(102.0, n=1, epoch=0)
    assert (found.rows[0].age_s, found.rows[0].agent_silent_s) == (2.5, 2.0)
    assert found.telemetry_age_s == 2.0
    late = fold(envelope(beat("a")), live=False).snapshot(100.0, n=1, epoch=0)
    assert (late.rows[0].age_s, late.telemetry_age_s) == (None, None)


@pytest.mark.parametrize("age_s", [float("nan"), -30.0, float("inf"), 1e12])
def test_an_age_that_cannot_be_is_unknown(age_s: float) -> None:
    assert fold(envelope(beat("a", age_s=age_s))).snapshot(100.0, n=1, epoch=0).rows[0].age_s is None


def test_a_takeover_shows_the_old_rows_as_suspect_until_they_are_heard() -> None:
    before = fold(envelope(beat("a", waiting=3), n=8)).snapshot(100.0, n=50, epoch=4)
    heir = TelemetryShard(site=SITE, shard=0, cluster=CLUSTER, period_s=0.1)
    heir.seed(before, now_s=20.0)
    heir.apply(envelope(beat("a", waiting=3), n=8), offset=3, now_s=20.0, live=False)
    assert suspects(heir, 20.0) == {"a": True}
    heir.apply(envelope(beat("a", waiting=4), n=9), offset=4, now_s=21.0, live=True)
    assert suspects(heir, 21.0) == {"a": False}
    assert waiting(heir, 21.0) == {"a": 4}


def suspects(folded: TelemetryShard, now_s: float) -> dict[str, bool]:
    table = CapacityTable()
    table.apply(folded.snapshot(now_s, n=1, epoch=-1), offset=0, now_s=now_s, live=True)
    return {each.beat.instance: liveness(each, now_s, LivenessPolicy()).suspect for each in table.rows()}


def test_a_seed_from_a_lost_cluster_yields_to_any_envelope() -> None:
    heir = TelemetryShard(site=SITE, shard=0, cluster="kafka-2", period_s=0.1)
    heir.seed(shard(row(beat("a", waiting=1), n=900)), now_s=1.0)
    heir.apply(envelope(beat("a", waiting=2), cluster="kafka-2"), offset=1, now_s=1.0, live=True)
    assert waiting(heir, 1.0) == {"a": 2}


def test_an_agent_is_forgotten_only_after_long_silence_that_was_listened_to() -> None:
    folded = fold(envelope(beat("a")))
    pass_time(folded, 100.0, SILENT_MAX_S + 60.0, live=False)
    assert waiting(folded) == {"a": 0}
    pass_time(folded, 5000.0, SILENT_MAX_S - 60.0, live=True)
    assert waiting(folded) == {"a": 0}
    pass_time(folded, 8000.0, 120.0, live=True)
    assert waiting(folded) == {}


def pass_time(folded: TelemetryShard, start_s: float, for_s: float, *, live: bool) -> None:
    for second in range(int(for_s) + 1):
        folded.advance(start_s + second, live=live)


def test_the_first_message_carries_no_epoch() -> None:
    found = fold(envelope(beat("a"))).snapshot(100.0, n=1, epoch=-1)
    assert (found.epoch, found.n, found.site, found.shard, found.cluster) == (-1, 1, SITE, 0, CLUSTER)


# -- the oracle: what the log says, told naively ------------------------------------------------------------------

AGENTS = ("x", "y", "z")
INSTANCES = ("a", "b", "c", "d")
logs = st.lists(
    st.tuples(
        st.sampled_from(AGENTS),
        st.integers(0, 3),
        st.integers(1, 6),
        st.sets(st.sampled_from(INSTANCES)),
    ),
    max_size=12,
    unique_by=lambda event: event[:3],
)


def oracle(log: list[tuple[int, TelemetryEnvelope]]) -> dict[str, tuple[str, float | None]]:
    """Instance → (agent, waiting): each agent's greatest order speaks, the one later in the log wins an instance."""
    newest: dict[str, tuple[int, TelemetryEnvelope]] = {}
    for agent in AGENTS:
        said = [(offset, each) for offset, each in log if each.agent == agent]
        if said:
            newest[agent] = max(said, key=lambda event: (event[1].order.claim, event[1].order.n))
    rows: dict[str, tuple[str, float | None]] = {}
    for _, each in sorted(newest.values(), key=lambda event: event[0]):
        for one in each.beats:
            rows[one.instance] = (each.agent, one.waiting)
    return rows


@given(log=logs, data=st.data())
def test_any_order_and_any_duplication_give_the_same_table(
    log: list[tuple[str, int, int, set[str]]], data: st.DataObject
) -> None:
    events = [
        (offset, envelope(*(beat(i, waiting=float(offset)) for i in sorted(listed)), agent=agent, claim=claim, n=n))
        for offset, (agent, claim, n, listed) in enumerate(log)
    ]
    heard = data.draw(st.permutations(events + [e for e in events if data.draw(st.booleans())]))
    folded = TelemetryShard(site=SITE, shard=0, cluster=CLUSTER, period_s=0.1)
    for offset, each in heard:
        folded.apply(each, offset=offset, now_s=1.0, live=True)
    found: CapacityShard = folded.snapshot(1.0, n=1, epoch=0)
    assert {each.beat.instance: (each.agent, each.beat.waiting) for each in found.rows} == oracle(events)
    assert [each.beat.instance for each in found.rows] == sorted(oracle(events))
