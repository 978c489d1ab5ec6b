"""Records: the facts on the topics, one struct a message.

Encoded as msgpack maps with a `type` tag, so fields can be added: a new field has a default, and a reader ignores what
it doesn't know. A breaking change is a new topic. Durations are seconds measured by one monotonic clock; `*_wall_s`
fields are Unix time, labels that no decision compares. Block keys travel as packed little-endian u64.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenfleet.core.checks import check_keys, check_part, check_same
from tokenfleet.core.decision import Decision
from tokenfleet.core.sent import SendEvent

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Seconds = float
Count = Annotated[int, Meta(ge=0)]

EngineState = Literal["ready", "starting", "draining", "sleeping"]
KvState = Literal["exact", "approx", "none"]


class Order(Struct, frozen=True, kw_only=True):
    """Place of a record in its writer's stream: accept a record iff its order is greater.

    `cluster` is the Kafka cluster id; another cluster replaces everything known. `claim` is the offset of
    the claim that the writer wrote at its start, `n` counts its records from 1.
    """

    cluster: str
    claim: int
    n: int


class KvDigest(Struct, frozen=True, kw_only=True):
    """What an agent believes an instance caches: count and XOR of canonical block keys."""

    blocks: Count = 0
    xor: Count = 0
    state: KvState = "none"
    block_tokens: Count = 0  # tokens a canonical block; 0: not known yet


class Histogram(Struct, frozen=True, kw_only=True):
    """Sum and count of a Prometheus histogram since the engine's start."""

    sum_s: float
    count: float


class Heartbeat(Struct, frozen=True, kw_only=True):
    """One instance as its agent last saw it. None means unknown, never zero.

    `boot` names one life of the engine process and is compared only for equality. `age_s` is the age of the
    values when the envelope was sent. `in_flight_tokens` are tokens in KV of running requests, `engine` if
    reported, `estimated` from KV use otherwise. `scrape_failed_for_s` is 0 while scrapes succeed;
    `refused` tells that the connection was refused.
    """

    instance: Name
    boot: str
    age_s: Seconds
    address: str
    model: Name
    model_digest: str = ""
    engine: str = "vllm"
    accelerator: str = ""
    context_max_tokens: Count = 0  # 0: not known
    ranks: tuple[int, ...] = ()
    running: float | None = None
    waiting: float | None = None
    kv_used_blocks: float | None = None
    kv_total_blocks: int | None = None
    block_size: int | None = None
    in_flight_tokens: float | None = None
    in_flight_source: Literal["engine", "estimated"] = "estimated"
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    cached_tokens_total: float | None = None
    ttft: Histogram | None = None
    prefill: Histogram | None = None
    queue: Histogram | None = None
    iterations_total: float | None = None
    preemptions_total: float | None = None
    state: EngineState = "ready"
    scrape_failed_for_s: Seconds = 0.0
    refused: bool = False
    scraped_wall_s: float = 0.0  # a label for the metric tokenfleet_row_visible_seconds
    digest: KvDigest = KvDigest()


class AgentClaim(Struct, frozen=True, kw_only=True, tag="agent_claim"):
    """Written by an agent to its telemetry partition at start; the claim's offset orders all that follows."""

    agent: Name
    site: Name


class TelemetryEnvelope(Struct, frozen=True, kw_only=True, tag="telemetry"):
    """Heartbeats of all instances that one agent watches, one period."""

    agent: Name
    site: Name
    order: Order
    period_s: Seconds
    beats: tuple[Heartbeat, ...]


class KvDelta(Struct, frozen=True, kw_only=True, tag="kv_delta"):
    """Net change of one instance's canonical block keys: clear first if `cleared`, then remove, then store.

    `order.n` counts the instance's records under one claim; a gap takes its credit until the next snapshot.
    """

    instance: Name
    boot: str
    order: Order
    model: Name
    block_tokens: Count
    cleared: bool = False
    removed: bytes = b""
    stored: bytes = b""
    state: KvState = "exact"

    def __post_init__(self) -> None:
        check_keys(self.removed, self.stored)


class KvSnapshot(Struct, frozen=True, kw_only=True, tag="kv_snapshot"):
    """Part `part` of `parts` (from 0) of all canonical block keys of one instance as of `order`.

    `order.n` is the number of the last delta that the snapshot includes; all parts carry the same order.
    """

    instance: Name
    boot: str
    order: Order
    model: Name
    block_tokens: Count
    part: Count
    parts: Annotated[int, Meta(ge=1)]
    keys: bytes
    state: KvState = "exact"

    def __post_init__(self) -> None:
        check_part(self.part, self.parts, self.keys)


class CapacityRow(Struct, frozen=True, kw_only=True):
    """One instance in a capacity shard: its newest heartbeat and how old it is when the shard is sent.

    `age_s` is the age of the heartbeat's values, None when unknown (read while catching up, or taken over
    from the last snapshot): the row is suspect until the next heartbeat. `agent_silent_s` is the time since
    the row's agent was heard.
    """

    beat: Heartbeat
    order: Order
    agent: Name
    age_s: Seconds | None
    agent_silent_s: Seconds


class CapacityShard(Struct, frozen=True, kw_only=True, tag="capacity"):
    """All rows of one shard, sent every snapshot period, changed or not; absent from all shards means gone.

    `epoch` fences a deposed writer: the offset of the writer's first message, -1 in that message itself.
    A reader keeps (cluster, epoch) and refuses a lower one. `telemetry_age_s` is the age of the youngest
    envelope folded in, None before any.
    """

    site: Name
    shard: Count
    cluster: str
    epoch: int
    n: Count
    period_s: Seconds
    telemetry_age_s: Seconds | None
    rows: tuple[CapacityRow, ...]


class PlacedOn(Struct, frozen=True, kw_only=True):
    """What the decision believed of its target at placement: with the outcome, a sample to learn from (core.predict).

    `queued` are the sequences ahead that had no first token yet, `decoding` those past it and `context_tokens` their
    summed context. `wait_s` + `work_s` + `bias_s` was the predicted time to first token from dispatch, without network.
    `kv_state` is the source of the evidence for `hit_tokens`.
    """

    hit_tokens: Count = 0
    uncached_tokens: Count = 0
    queued: Count = 0
    decoding: Count = 0
    context_tokens: float = 0.0
    wait_s: Seconds = 0.0
    work_s: Seconds = 0.0
    bias_s: float = 0.0
    kv_state: KvState = "none"


class Entry(Struct, frozen=True, kw_only=True):
    """One placement in the ledger.

    `work_s` is the predicted stand-alone prefill time, `uncached_tokens` its tokens, `kv_tokens` what the
    request will hold in KV (prompt + estimated output). `age_s` is the time since the placement when sent.
    `placed` is what the decision believed, for whichever replica hears of the outcome; `policy_revision` made it.
    """

    decision: Name
    request: Name
    attempt: Count
    instance: Name
    model: Name
    request_class: Name
    work_s: Seconds
    uncached_tokens: Count
    kv_tokens: Count
    replica: str
    age_s: Seconds = 0.0
    tenant: str = ""
    predicted_ttft_s: Seconds | None = None
    placed: PlacedOn | None = None
    policy_revision: Count = 0


class PlacementEvent(Struct, frozen=True, kw_only=True):
    """A change of the ledger. All kinds but `ended` carry the whole entry, and put or refresh it.

    An event other than `placed` names its decision: the other entries of that (request, attempt) end.
    """

    kind: Literal["placed", "first_token", "progress", "ended"]
    decision: Name
    request: Name
    attempt: Count
    instance: Name
    entry: Entry | None = None

    def __post_init__(self) -> None:
        if self.kind != "ended":
            check_same(self, self.entry)


class PlacementEnvelope(Struct, frozen=True, kw_only=True, tag="placements"):
    """Placement events of one decide replica for the instances of one partition, and what it sent to other sites; `n`
    counts its envelopes."""

    site: Name
    replica: Name
    start: str
    n: Count
    events: tuple[PlacementEvent, ...]
    sends: tuple[SendEvent, ...] = ()


class DecisionEnvelope(Struct, frozen=True, kw_only=True, tag="decisions"):
    """Decisions of one replica with their evidence, for audit and replay; no decision reads them."""

    site: Name
    replica: Name
    decisions: tuple[Decision, ...]


OutcomeKind = Literal["started", "first_token", "progress", "finished", "failed", "cancelled", "timed_out", "rejected"]
TERMINAL_KINDS = frozenset({"finished", "failed", "cancelled", "timed_out", "rejected"})


class OutcomeEvent(Struct, frozen=True, kw_only=True):
    """What happened to one attempt of a logical request, as the gateway that answers the client saw it.

    `elapsed_s` is the time since the first arrival of the *logical* request at the origin, `attempt_s` since
    this attempt's dispatch; both from the reporter's monotonic clock. `ttft_s` (logical) and `tpot_s` (mean over
    tokens 2..n) come with terminal events when known. Token counts are None when unknown; 0 counts as 0.
    `at_wall_s` is the reporter's wall clock. `kind=rejected` is written by `decide` for a REJECT verdict.
    `clock_s` is the monotonic time of the event on the clock that `clock` names (one life of one reporter): times of
    one clock may be subtracted, never those of two. `placed` is what the decision believed of its target.
    `policy_revision` is that of the decision, 0 when unknown.
    """

    request: Name
    attempt: Count
    kind: OutcomeKind
    decision: str
    tenant: Name
    request_class: Name
    model: Name
    origin: Name
    site: str = ""
    instance: str = ""
    pool: str = ""
    at_wall_s: float
    elapsed_s: Seconds
    attempt_s: Seconds = 0.0
    ttft_s: Seconds | None = None
    tpot_s: Seconds | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    stop: str = ""  # why generation stopped: stop, length; or the error's kind
    predicted_ttft_s: Seconds | None = None
    clock: str = ""
    clock_s: Seconds | None = None
    placed: PlacedOn | None = None
    policy_revision: Count = 0


class OutcomeEnvelope(Struct, frozen=True, kw_only=True, tag="outcomes"):
    """Outcome events of one reporting replica; `sent_wall_s` labels when it was sent."""

    site: Name
    replica: Name
    sent_wall_s: float
    events: tuple[OutcomeEvent, ...]


class Vector(Struct, frozen=True, kw_only=True):
    """One dimension of a pool's capacity in its own unit; headroom = capacity - used - queued."""

    capacity: float
    used: float
    queued: float = 0.0


class PoolSummary(Struct, frozen=True, kw_only=True):
    """One pool (a model revision at one site) as other sites see it.

    `prefill` is in uncached tokens a second (queued: tokens waiting), `kv` in tokens, `seats` in sequences.
    `waits_s` are the predicted waits of the instances, least first. `decoding` and `context_tokens` are means
    per instance. `endpoints` counts all known instances, 0 being a state of its own.
    """

    pool: Name
    model: Name
    model_digest: str
    engine: str = "vllm"
    context_max_tokens: Count = 0
    endpoints: Count
    ready: Count
    warming: Count = 0
    draining: Count = 0
    suspect: Count = 0
    prefill: Vector
    kv: Vector
    seats: Vector
    waits_s: tuple[float, ...] = ()
    decoding: float = 0.0
    context_tokens: float = 0.0
    price_per_hour: float = 0.0
    attainment: float | None = None


class SiteSummary(Struct, frozen=True, kw_only=True, tag="summary"):
    """One site's face to the others, ≤ 8 KiB, every 0.5 s. `age_s` is the age of the youngest telemetry in it."""

    site: Name
    cluster: str
    epoch: int
    n: Count
    period_s: Seconds
    age_s: Seconds | None
    gateways: tuple[str, ...]
    pools: tuple[PoolSummary, ...]


class SketchChunk(Struct, frozen=True, kw_only=True, tag="sketch"):
    """Part of a Bloom filter over the block keys that a pool caches: `bits` packed, `hashes` probes a key."""

    site: Name
    pool: Name
    cluster: str
    epoch: int
    n: Count
    part: Count
    parts: Annotated[int, Meta(ge=1, le=64)]  # 2 MB of bits are 4 parts
    hashes: Annotated[int, Meta(ge=1, le=32)]
    keys: Count
    bits: Annotated[bytes, Meta(min_length=1)]

    def __post_init__(self) -> None:
        check_part(self.part, self.parts)


class Control(Struct, frozen=True, kw_only=True, tag="control"):
    """An operator's word on one instance: drain it, take it out, weigh it, or give it back."""

    instance: Name
    state: Literal["ready", "draining", "quarantined"] = "ready"
    weight: Annotated[float, Meta(ge=0.0, le=10.0)] = 1.0
    by: str = ""
    reason: str = ""
    at_wall_s: float = 0.0


Telemetry = AgentClaim | TelemetryEnvelope
KvRecord = KvDelta | KvSnapshot
