"""The simulated fleet: what gateways get to see, and when; and that every request ends once."""

from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.worlds import BAD_LINKS, TINY, Announcer, Holder, Recorder, fates, fleet, kept, row, transcript
from tokenfleet.core.accounts import Feedback
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import LedgerPolicy, TokenPilotPolicy
from tokenfleet.core.records import (
    CapacityShard,
    KvDelta,
    KvSnapshot,
    OutcomeEvent,
    PlacementEnvelope,
)
from tokenfleet.sim.engine.events import BlocksRemoved, BlocksStored, Event, Finished, Job
from tokenfleet.sim.engine.machine import EngineMachine
from tokenfleet.sim.fleet import Fleet, FleetTerms
from tokenfleet.sim.links import Links, LinkTerms
from tokenfleet.sim.pilot import Pilot, policy_of
from tokenfleet.sim.router import Answer, MakeRouter, Setup
from tokenfleet.sim.telemetry import KvBook
from tokenfleet.sim.traces.rows import TraceRow

LATE = row(100.0, prompt=1, out=1)  # brings no block; a run ends with its last request, whatever links still carry


def rows(number: int, *, seed: int = 1, per_s: float = 4.0) -> list[TraceRow]:
    """Arrivals in a Poisson stream, of ten conversations with a system prompt of two blocks."""
    rng, at_s, made = Random(seed), 0.0, list[TraceRow]()
    for _ in range(number):
        at_s += rng.expovariate(per_s)
        made.append(
            row(at_s, prompt=rng.randrange(1, 400), out=rng.randrange(1, 40), chain=rng.randrange(1, 11), shared=2)
        )
    return made


def test_one_request_is_seen_at_once_by_its_own_gateway_and_measured_from_its_arrival() -> None:
    made: list[Recorder] = []
    [served] = fleet(kept(made)).serve([row(1.0, prompt=100, out=3)])
    first_s = 1.0 + 0.010 + 0.064 + 0.010 + 0.036  # chunks of 64 and 36 tokens
    assert served.first_token_s == pytest.approx(first_s)
    assert served.finished_s == pytest.approx(first_s + 2 * 0.011 + 100e-6 + 101e-6)
    events = made[0].of(OutcomeEvent)
    assert [(at_s, event.kind) for at_s, event in events] == [
        (served.first_token_s, "first_token"),
        (served.finished_s, "finished"),
    ]
    first, last = (event for _, event in events)
    assert (first.attempt_s, first.ttft_s, first.clock_s) == (first.elapsed_s, first.elapsed_s, served.first_token_s)
    assert (last.output_tokens, last.cached_tokens, last.prompt_tokens) == (3, 0, 100)
    assert last.tpot_s == pytest.approx(0.011 + 100.5e-6)


def test_a_request_tells_its_prompt_and_full_blocks_and_nothing_of_its_output() -> None:
    made: list[Recorder] = []
    fleet(kept(made)).serve([row(0.5, prompt=40, out=7, chain=3)])
    [(_, request)] = made[0].of(Request)
    assert (request.prompt_tokens, request.block_tokens, request.max_tokens) == (40, 16, 0)
    assert request.block_keys == b"".join((3_000 + i).to_bytes(8, "little") for i in range(2))  # the third isn't full


def test_a_gateway_that_sees_the_same_prompts_sees_the_same_until_an_output_ends() -> None:
    """Nothing leaks how long an output will be: with other lengths all is alike until the first end."""
    seen: list[list[tuple[float, str]]] = []
    for longer in (0, 30):
        made: list[Recorder] = []
        arrivals = [msgspec.structs.replace(each, output_tokens=60 + longer) for each in rows(30, per_s=100.0)]
        served = fleet(kept(made), instances=8).serve(arrivals)
        first_end_s = min(each.finished_s for each in served if each.finished_s is not None)
        seen.append([item for item in transcript(made[0]) if item[0] < first_end_s])
    short, long = seen
    assert len(short) > 40
    assert long[: len(short)] == short


def test_a_block_is_visible_only_when_it_is_computed_and_the_link_has_brought_it() -> None:
    made: list[Recorder] = []
    links = Links(kv=LinkTerms(delay_s=0.1))
    fleet(kept(made), instances=1, links=links).serve([row(0.5, prompt=128, out=2, chain=1), LATE])
    deltas = made[0].of(KvDelta)
    assert [(at_s, len(delta.stored) // 8, delta.order.n) for at_s, delta in deltas] == [
        (pytest.approx(0.5 + 0.074 + 0.1), 4, 1),  # a chunk of 64 tokens is four blocks
        (pytest.approx(0.5 + 2 * 0.074 + 0.1), 4, 2),
    ]


def test_telemetry_comes_every_period_late_by_its_link_and_older_than_what_runs_now() -> None:
    made: list[Recorder] = []
    links = Links(telemetry=LinkTerms(delay_s=0.05))
    fleet(kept(made), instances=1, links=links, telemetry_period_s=0.25).serve([row(0.30, prompt=200, out=2)])
    shards = [(at_s, shard.n, shard.rows[0].beat.running) for at_s, shard in made[0].of(CapacityShard)]
    assert shards[:3] == [(0.0, 1, 0), (0.30, 2, 0), (0.55, 3, 1)]  # the first is read before a gateway serves


def test_a_scrape_without_counts_tells_what_is_cached_and_not_what_runs() -> None:
    made: list[Recorder] = []
    arrivals = [row(0.1, prompt=200, out=90, chain=1), LATE]
    fleet(kept(made), instances=1, engine_counts=False).serve(arrivals)
    beats = [shard.rows[0].beat for _, shard in made[0].of(CapacityShard)]
    assert {(beat.running, beat.waiting, beat.kv_used_blocks) for beat in beats} == {(None, None, None)}
    assert max(beat.digest.blocks for beat in beats) == 12


def test_digests_agree_with_the_changes_up_to_the_scrape() -> None:
    made: list[Recorder] = []
    links = Links(telemetry=LinkTerms(), kv=LinkTerms())
    fleet(kept(made), instances=1, links=links).serve(rows(60))
    held: set[int] = set()
    compared = 0
    for _, what in made[0].seen:
        if isinstance(what, KvDelta):
            removed, stored = (
                {int.from_bytes(keys[i : i + 8], "little") for i in range(0, len(keys), 8)}
                for keys in (what.removed, what.stored)
            )
            assert removed <= held
            held = (held - removed) | stored
        elif isinstance(what, CapacityShard):
            digest = what.rows[0].beat.digest
            xor = 0
            for key in held:
                xor ^= key
            assert (digest.blocks, digest.xor) == (len(held), xor)
            compared += digest.blocks > 0
    assert compared > 20


def test_a_block_that_comes_and_goes_within_one_step_is_no_change() -> None:
    book = KvBook("i", 16)
    stored = BlocksStored(job_id="a", at_s=0.0, first_block=0, hashes=(1, 2, 3), parent=None)
    first = book.delta([stored, BlocksRemoved(at_s=0.0, hashes=(3,))])
    assert first is not None
    assert (first.stored, first.removed) == (b"".join(k.to_bytes(8, "little") for k in (1, 2)), b"")
    back = book.delta([BlocksRemoved(at_s=0.0, hashes=(2,)), msgspec.structs.replace(stored, hashes=(2,))])
    assert back is not None
    assert (back.stored, back.removed, back.order.n) == ((2).to_bytes(8, "little"), (2).to_bytes(8, "little"), 2)
    assert (book.digest().blocks, book.digest().xor) == (2, 3)
    assert book.delta([]) is None


def test_placements_reach_all_gateways_after_the_delay_their_own_too() -> None:
    made: list[Recorder] = []
    links = Links(placements=LinkTerms(delay_s=0.02))
    served = fleet(kept(made, Announcer), gateways=3, links=links).serve(rows(30))
    assert {each.gateway for each in served} == {0, 1, 2}
    for gateway in made:
        heard = [(at_s, envelope.events[0].request) for at_s, envelope in gateway.of(PlacementEnvelope)]
        placed = [(each.row.at_s + 0.02, each.id) for each in served]
        assert heard == [item for item in placed if item[0] <= gateway.seen[-1][0]]


def test_a_held_request_goes_out_when_it_is_released_and_its_wait_counts() -> None:
    made: list[Recorder] = []
    [served] = fleet(kept(made, Holder)).serve([row(1.0, prompt=50, out=1)])
    assert served.dispatched_s == pytest.approx(1.15)  # asked every 50 ms, due after 120
    assert served.finished_s == pytest.approx(1.15 + 0.060)
    [(_, first), (_, _)] = made[0].of(OutcomeEvent)
    assert (first.attempt_s, first.elapsed_s) == (pytest.approx(0.060), pytest.approx(0.210))


def test_a_first_token_lets_the_next_held_request_go_at_that_very_moment() -> None:
    class OneByOne(Holder):
        """Sends one request at a time, to the one engine."""

        def released(self, now_s: float) -> Sequence[Answer]:
            ended = [event for _, event in self.of(OutcomeEvent) if event.kind == "finished"]
            if len(ended) < len(self.of(Request)) or not self.held:
                return []
            return [Recorder.route(self, self.held.pop(0)[1], now_s)]

    arrivals = [row(0.0, prompt=64, out=1), row(0.01, prompt=64, out=1)]
    first, second = fleet(kept([], OneByOne), instances=1).serve(arrivals)
    assert first.dispatched_s == 0.0
    assert second.dispatched_s == first.first_token_s == pytest.approx(0.074)
    assert second.finished_s == pytest.approx(2 * 0.074)


def test_what_is_held_for_ever_is_unfinished_and_the_run_ends() -> None:
    class Keeper(Holder):
        wait_s = 1e9

    served = fleet(kept([], Keeper), drain_max_s=5.0).serve([row(0.0), row(1.0)])
    assert fates(served) == ["unfinished", "unfinished"]


def test_a_refused_request_runs_nowhere() -> None:
    class Refuser(Recorder):
        def route(self, request: Request, now_s: float) -> Answer:
            return Answer(request=request.id, refused="all_busy")

    made: list[Recorder] = []
    [served] = fleet(kept(made, Refuser)).serve([row(0.0)])
    assert (fates([served]), served.refused, made[0].of(OutcomeEvent)) == (["refused"], "all_busy", [])
    assert len(made[0].of(CapacityShard)) == 1  # nothing is open, so the run is over


def test_a_first_token_tells_what_the_engine_found_cached() -> None:
    made: list[Recorder] = []
    fleet(kept(made), instances=1).serve([row(0.0, prompt=128, chain=1), row(1.0, prompt=128, chain=1)])
    cached = [(event.kind, event.cached_tokens) for _, event in made[0].of(OutcomeEvent)]
    assert cached == [("first_token", 0), ("finished", 0), ("first_token", 112), ("finished", 112)]


def test_pilots_hear_of_one_another_s_placements() -> None:
    made: list[Pilot] = []

    def make_router(setup: Setup) -> Pilot:
        made.append(Pilot(setup))
        return made[-1]

    known: list[list[int]] = []
    links = Links(placements=LinkTerms(delay_s=0.02))
    world = fleet(make_router, gateways=3, links=links)
    world.serve([row(0.1, prompt=500, out=300)], progress=lambda _: known.append([len(p.site.ledger) for p in made]))
    assert known[1:4] == [[1, 1, 1]] * 3


def test_without_lessons_a_policy_takes_its_coefficients_as_they_are() -> None:
    assert policy_of(TINY).tokenpilot.unlearned_factor == 1.0
    assert policy_of(TINY, learning=True).tokenpilot == TokenPilotPolicy()


@pytest.mark.parametrize("make_router", [Pilot, Recorder], ids=["pilot", "recorder"])
def test_equal_seeds_give_equal_runs_and_others_do_not(make_router: MakeRouter) -> None:
    def run(seed: int) -> list[tuple[int, int, float | None]]:
        served = fleet(make_router, gateways=2, seed=seed, links=BAD_LINKS).serve(rows(60))
        return [(each.gateway, each.instance, each.finished_s) for each in served]

    assert run(1) == run(1)
    assert run(1) != run(2)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([Pilot, Recorder, Announcer, Holder]), st.booleans())
def test_every_arrival_ends_exactly_once_whatever_the_links_lose_repeat_and_mix_up(
    seed: int, gateways: int, make_router: MakeRouter, bad: bool
) -> None:
    counted = rows(60, seed=seed)
    links = BAD_LINKS if bad else Links()
    served = fleet(make_router, gateways=gateways, seed=seed, links=links).serve(counted)
    assert [each.row for each in served] == counted
    assert {*fates(served)} <= {"finished", "refused"}  # an instance without room for its KV is a reason to refuse
    for each in served:
        if not each.refused:
            assert each.first_token_s is not None
            assert each.finished_s is not None
            assert each.row.at_s < each.first_token_s <= each.finished_s


def test_a_pilot_knows_every_engines_cache_and_ends_with_an_empty_ledger() -> None:
    made: list[Pilot] = []

    def make_router(setup: Setup) -> Pilot:
        made.append(Pilot(setup))
        return made[-1]

    world = fleet(make_router, links=Links(telemetry=LinkTerms(), kv=LinkTerms()))
    world.serve([*rows(80), LATE])
    [pilot] = made
    for engine in world.engines:
        assert pilot.site.prefix.state(engine.name) == "exact"
        assert pilot.site.prefix.blocks(engine.name) == engine.machine.load().kv_cached_blocks > 0
    assert len(pilot.site.ledger) == 0


def test_a_lost_change_of_the_cache_costs_its_credit_until_the_next_snapshot() -> None:
    made: list[Pilot] = []

    def make_router(setup: Setup) -> Pilot:
        made.append(Pilot(setup))
        return made[-1]

    lossy = Links(kv=LinkTerms(delay_s=0.01, loss=0.3))
    states: list[set[str]] = []
    world = fleet(make_router, links=lossy, kv_snapshot_period_s=5.0)
    names = [engine.name for engine in world.engines]
    world.serve(rows(160), progress=lambda now_s: states.append({made[0].site.prefix.state(name) for name in names}))
    assert {"exact"} in states[20:]
    assert any("none" in seen for seen in states[20:])


def test_lessons_reach_every_gateway_each_second_and_say_how_engines_compute() -> None:
    made: list[Recorder] = []

    class Believer(Pilot):
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup)
            self.recorder = Recorder(setup)
            made.append(self.recorder)

        def heard(self, record: Any, now_s: float) -> None:
            super().heard(record, now_s)
            self.recorder.heard(record, now_s)

    policy = policy_of(TINY, prior_factor=2.0, learning=True)
    terms = FleetTerms(profile=TINY, instances=2, gateways=2, prior_factor=2.0, learning=True)
    Fleet(terms, Believer, seed=1, lessons_policy=policy).serve(rows(200, per_s=2.0))
    for gateway in made:
        feedbacks: list[tuple[float, Feedback]] = gateway.of(Feedback)
        assert [round(at_s - 0.1, 6) for at_s, _ in feedbacks[:4]] == [0.0, 1.0, 2.0, 3.0]
        [pool] = feedbacks[-1][1].pools
        assert pool.coefficients.samples > 50
        assert pool.coefficients.a_s < 0.5 * 3.0 * TINY.token_s  # it began at 2 × the shipped safe side of 1.5


def test_a_gateway_forgets_no_open_request_in_silence() -> None:
    assert policy_of(TINY).ledger.silent_max_s > LedgerPolicy().silent_max_s


def test_snapshots_hold_what_the_engine_caches() -> None:
    made: list[Recorder] = []
    links = Links(kv=LinkTerms())
    world = fleet(kept(made), instances=1, links=links, kv_snapshot_period_s=2.0)
    world.serve([row(0.0, prompt=160, chain=1), row(2.5, prompt=16, chain=2)])
    snapshots: list[tuple[float, KvSnapshot]] = made[0].of(KvSnapshot)
    assert [(at_s, len(snapshot.keys) // 8) for at_s, snapshot in snapshots] == [(0.0, 0), (2.0, 10)]


def test_the_fleet_computes_what_its_engines_would_alone() -> None:
    """The world adds no time of its own: one engine, one gateway, the machine run by hand."""
    arrivals = rows(40)
    served = fleet(Recorder, instances=1).serve(arrivals)
    machine, ends = EngineMachine(TINY), dict[str, float]()

    def note(events: list[Event]) -> None:
        ends.update({event.job_id: event.at_s for event in events if isinstance(event, Finished)})

    for number, each in enumerate(arrivals):
        note(machine.advance(each.at_s))
        blocks = each.hash_ids[: each.prompt_tokens // 16]
        machine.submit(
            Job(
                id=str(number),
                prompt_tokens=each.prompt_tokens,
                output_tokens=each.output_tokens,
                max_tokens=each.output_tokens,
                block_hashes=blocks,
            ),
            each.at_s,
        )
    note(machine.advance(1e6))
    assert [each.finished_s for each in served] == pytest.approx([ends[str(n)] for n in range(40)])
