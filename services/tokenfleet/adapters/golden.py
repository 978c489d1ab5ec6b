"""Golden records: one example of every message, the same on every machine, for readers in other languages.

A record's bytes change only when its schema does; a decoder that reads them all reads what TokenFleet writes.
"""

import struct
from typing import Any

from msgspec import Struct

from tokenfleet.adapters import topics
from tokenfleet.adapters.topics import Topic
from tokenfleet.core import accounts, deadletters, records, revisions
from tokenfleet.core.decision import Admission, Candidate, Decision, SiteOption
from tokenfleet.core.sent import SendEvent
from tokenfleet.core.shard import records as shard
from tokenfleet.core.slomax.shares import ShareRevision
from tokenfleet.core.slomax.terms import Setting

CLUSTER = "golden-cluster"
WALL_S = 1_790_000_000.25
KEYS = struct.pack("<3Q", 1, 2**63, 2**64 - 1)
ORDER = records.Order(cluster=CLUSTER, claim=41, n=7)
ENTRY = records.Entry(
    decision="d-1",
    request="r-1",
    attempt=0,
    instance="b-small-1",
    model="small-chat",
    request_class="chat",
    work_s=0.125,
    uncached_tokens=1024,
    kv_tokens=1280,
    replica="decide-b-1",
    age_s=0.5,
)
BEAT = records.Heartbeat(
    instance="b-small-1",
    boot="1789990000.5",
    age_s=0.25,
    address="http://127.0.0.1:8000",
    model="small-chat",
    model_digest="small-chat@2026-09",
    context_max_tokens=131072,
    ranks=(0,),
    running=3.0,
    waiting=1.0,
    kv_used_blocks=512.0,
    kv_total_blocks=8192,
    block_size=16,
    in_flight_tokens=8192.0,
    prompt_tokens_total=1e6,
    generation_tokens_total=2.5e5,
    cached_tokens_total=None,
    ttft=records.Histogram(sum_s=12.5, count=100.0),
    iterations_total=50_000.0,
    digest=records.KvDigest(blocks=3, xor=2**64 - 1, state="exact", block_tokens=64),
)
POOL = records.PoolSummary(
    pool="small-chat@b",
    model="small-chat",
    model_digest="small-chat@2026-09",
    endpoints=2,
    ready=2,
    prefill=records.Vector(capacity=20_000.0, used=5_000.0, queued=512.0),
    kv=records.Vector(capacity=262_144.0, used=16_384.0),
    seats=records.Vector(capacity=512.0, used=6.0),
    waits_s=(0.0, 0.25),
    price_per_hour=2.0,
)
DECISION = Decision(
    id="d-1",
    request="r-1",
    attempt=0,
    verdict="admit",
    age_s=0.5,
    tenant="acme",
    model="small-chat",
    request_class="chat",
    origin="a",
    site="b",
    pool="small-chat@b",
    target="b-small-1",
    address="http://127.0.0.1:8000",
    prompt_tokens=1500,
    hit_tokens=476,
    predicted_ttft_s=0.375,
    admission=Admission(request_class="chat", rule="default", output_q50_tokens=180.0, output_q90_tokens=420.0),
    sites=(SiteOption(site="b", cost=0.0005), SiteOption(site="d", refused="residency")),
    candidates=(Candidate(instance="b-small-1", cost_s=0.5, ttft_s=0.375, wait_s=0.25, work_s=0.125),),
    considered=2,
    excluded={"draining": 1},
    sentence="b-small-1 answers first",
    replica="decide-b-1",
    policy_revision=1,
    products=("slomax", "fleetmind", "tokenpilot"),
    tables={"capacity": "41.7"},
    at_wall_s=WALL_S,
    took_s=0.0005,
)
CHANGE = ShareRevision(
    pool="small-chat@b",
    number=1,
    at_s=1_790_000_000.0,
    kind="step",
    old=Setting(shares={"chat": 0.5, "long": 0.3, "batch": 0.2}, ceiling=0.95),
    new=Setting(shares={"chat": 0.53, "long": 0.285, "batch": 0.185}, ceiling=0.95),
    why="chat 70.0% of 98.0%",
)
OUTCOME = records.OutcomeEvent(
    request="r-1",
    attempt=0,
    kind="finished",
    decision="d-1",
    tenant="acme",
    request_class="chat",
    model="small-chat",
    origin="a",
    site="b",
    instance="b-small-1",
    pool="small-chat@b",
    at_wall_s=WALL_S,
    elapsed_s=4.5,
    attempt_s=4.25,
    ttft_s=0.5,
    tpot_s=0.02,
    prompt_tokens=1500,
    output_tokens=200,
    stop="stop",
)


HOLDER = shard.Holder(replica="decide-b-1", start="3")
BOOK = "small-chat@b"
TICKETS: tuple[shard.Record, ...] = (
    shard.ShardClaim(owner=HOLDER, assignment=1),
    shard.LeaseRequest(book=BOOK, holder=HOLDER, n=4, wants=40_000, keeps=3, rest=12_800, envelopes=9, spent=27_200),
    shard.Lease(book=BOOK, order=ORDER, holder=HOLDER, n=4, units=40_000),
    shard.TicketAsk(
        book=BOOK,
        holder=HOLDER,
        n=11,
        ticket="r-1#0",
        tenant="acme",
        request_class="chat",
        rank=0,
        units=1280,
        work_s=0.25,
        left_s=30.0,
    ),
    shard.Ticket(
        book=BOOK,
        order=ORDER,
        holder=HOLDER,
        n=11,
        ticket="r-1#0",
        tenant="acme",
        request_class="chat",
        rank=0,
        units=1280,
        work_s=0.25,
        virtual_start=17.5,
        token="signed",
        ahead=2,
    ),
    shard.Keepalive(book=BOOK, holder=HOLDER, n=12, tickets=("r-1#0",)),
    shard.TokenShown(book=BOOK, holder=HOLDER, n=13, token="signed", left_s=29.0),
    shard.TicketsWithdrawn(book=BOOK, holder=HOLDER, n=14, tickets=("r-2#0",)),
    shard.Grant(book=BOOK, order=ORDER, grant=ORDER, ticket="r-1#0", holder=HOLDER, cites=12, units=1280),
    shard.GrantUnused(book=BOOK, holder=HOLDER, n=15, ticket="r-1#0", grant=ORDER),
    shard.TicketEnded(book=BOOK, order=ORDER, holder=HOLDER, ticket="r-1#0", why="unheard"),
)


def golden_messages() -> tuple[tuple[Topic[Any], Struct], ...]:
    """One example of every message of every topic."""
    return (
        (topics.TELEMETRY, records.AgentClaim(agent="agent-b-1", site="b")),
        (
            topics.TELEMETRY,
            records.TelemetryEnvelope(agent="agent-b-1", site="b", order=ORDER, period_s=1.0, beats=(BEAT,)),
        ),
        (
            topics.KVCACHE,
            records.KvDelta(
                instance="b-small-1", boot="1", order=ORDER, model="small-chat", block_tokens=64, stored=KEYS
            ),
        ),
        (
            topics.KVCACHE,
            records.KvSnapshot(
                instance="b-small-1",
                boot="1",
                order=ORDER,
                model="small-chat",
                block_tokens=64,
                part=0,
                parts=1,
                keys=KEYS,
            ),
        ),
        (
            topics.CAPACITY,
            records.CapacityShard(
                site="b",
                shard=0,
                cluster=CLUSTER,
                epoch=12,
                n=3,
                period_s=0.1,
                telemetry_age_s=0.25,
                rows=(records.CapacityRow(beat=BEAT, order=ORDER, agent="agent-b-1", age_s=None, agent_silent_s=0.25),),
            ),
        ),
        (
            topics.PLACEMENTS,
            records.PlacementEnvelope(
                site="b",
                replica="decide-b-1",
                start="3",
                n=9,
                events=(
                    records.PlacementEvent(
                        kind="placed", decision="d-1", request="r-1", attempt=0, instance="b-small-1", entry=ENTRY
                    ),
                    records.PlacementEvent(
                        kind="ended", decision="d-0", request="r-0", attempt=1, instance="b-small-1"
                    ),
                ),
                sends=(
                    SendEvent(
                        request="r-2",
                        attempt=0,
                        site="c",
                        model="small-chat",
                        work_s=0.25,
                        uncached_tokens=4096,
                        kv_tokens=4608,
                    ),
                ),
            ),
        ),
        (topics.DECISIONS, records.DecisionEnvelope(site="b", replica="decide-b-1", decisions=(DECISION,))),
        (
            topics.OUTCOMES,
            records.OutcomeEnvelope(site="a", replica="gateway-a-1", sent_wall_s=WALL_S, events=(OUTCOME,)),
        ),
        *((topics.TICKETS, message) for message in TICKETS),
        (
            topics.SUMMARY,
            records.SiteSummary(
                site="b",
                cluster=CLUSTER,
                epoch=12,
                n=5,
                period_s=0.5,
                age_s=0.25,
                gateways=("http://127.0.0.1:7000",),
                pools=(POOL,),
            ),
        ),
        (
            topics.SKETCH,
            records.SketchChunk(
                site="b",
                pool="small-chat@b",
                cluster=CLUSTER,
                epoch=12,
                n=1,
                part=0,
                parts=1,
                hashes=7,
                keys=3,
                bits=bytes(range(16)),
            ),
        ),
        (topics.CONTROL, records.Control(instance="b-small-1", state="draining", by="ops", at_wall_s=WALL_S)),
        (
            topics.POLICY,
            revisions.PolicyRevision(
                revision=2,
                toml="revision = 2\n",
                sha256="00" * 32,
                by="controller",
                reason=CHANGE.why,
                shares=(CHANGE,),
            ),
        ),
        (
            topics.POLICY,
            revisions.CanaryReport(
                base=revisions.ArmFigures(revision=1, requests=900, ttft_p50_s=0.2),
                canary=revisions.ArmFigures(
                    revision=2, requests=100, failed=1, classes={"chat": revisions.ClassShare(met=95, offered=100)}
                ),
                elapsed_s=60.0,
                for_s=600.0,
                verdict="running",
                reason="100 requests beside 900, 540 s to go",
                at_wall_s=WALL_S,
            ),
        ),
        (
            topics.GOODPUT,
            accounts.GoodputPartial(
                site="a",
                partition=0,
                watermark_s=WALL_S,
                rows=(
                    accounts.GoodputRow(
                        start_s=1_790_000_000.0,
                        width_s=10.0,
                        request_class="chat",
                        tenant="acme",
                        pool="small-chat@b",
                        version=1,
                        goodput_tokens=200,
                        output_tokens=200,
                        met=1,
                    ),
                ),
            ),
        ),
        (
            topics.FEEDBACK,
            accounts.Feedback(
                revision=4,
                at_wall_s=WALL_S,
                pools=(
                    accounts.PoolCalibration(
                        pool="small-chat@b",
                        model="small-chat",
                        coefficients=accounts.Coefficients(
                            c0_s=0.006, w_min_s=0.002, a_s=3.2e-5, b_s=1e-10, d_s=4e-9, samples=500.0
                        ),
                    ),
                ),
                outputs=(accounts.OutputEstimate(tenant="acme", q50=180.0, q90=420.0, samples=500.0),),
            ),
        ),
        (
            topics.DEADLETTER,
            deadletters.DeadLetter(
                topic="tokenfleet.b.telemetry.v1",
                partition=0,
                offset=17,
                reason="wrong shape at $.beats[...].age_s",
                sha256="ab" * 32,
                size_bytes=120,
                by="capacity-b-1",
                at_wall_s=WALL_S,
            ),
        ),
    )
