"""Decision: the answer to one request, with the evidence that made it.

The same value is the gRPC reply, the record on `decisions`, the audit row, the console line and what tests
assert on. Refusals are decisions too; an exception means that there was none.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tokenfleet.core.policy import BlindRule

Verdict = Literal["admit", "queue", "defer", "reject", "redirect"]
Reason = Literal[
    "",
    "no_instances",  # the pool is empty
    "all_busy",  # instances exist, none has room
    "filtered_by_policy",  # instances exist, the policy permits none of them
    "unknown_model",
    "quota",
    "infeasible",  # the SLO can't be met by any candidate
    "context_too_long",  # prompt + budget exceed the model's context everywhere
    "not_permitted",  # residency or entitlement forbids every site
    "no_site",  # no site passed FleetMind's constraints for another cause
    "retry_budget",  # its tenant has retried too much of late
    "key_conflict",  # another request runs or ran under its idempotency key
    "duplicate_done",  # this very request has completed under its idempotency key
]
Mode = Literal["fresh", "stale", "degraded", "bypass"]
# How an instance was found: least cost; a draw or the prefix's home among near-ties; the session's last instance kept;
# the less loaded of two drawn, because all are suspect or TokenPilot is off; a blind rule of the policy.
How = Literal["", "least_cost", "near_tie", "prefix_home", "session", "suspect", "off"] | BlindRule
# `queue`: it waits if its gateway can and runs at once if not; `probe`: it was to be refused, and runs to see whether
# that would have been right.
GateAnswer = Literal["", "pass", "queue", "reject", "probe"]
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Request(Struct, frozen=True, kw_only=True):
    """What a gateway asks, validated at the rim.

    `id` is the logical request, `attempt` counts its tries from 0. `block_keys` are the canonical keys of the
    prompt's full blocks, packed little-endian u64 (core.blocks). `max_tokens` is the caller's output budget, 0 when
    absent. `elapsed_s` is the time since the logical request first arrived at its origin. `wait_max_s` is how long its
    gateway can hold it back, 0 for not at all. `origin` is the site where it arrived, `hop` is 1 when another site's
    FleetMind sent it here. `sites_tried` are not to be chosen again. `session` names a conversation; `data_class` is
    what residency rules speak of. `declared_class` is capped by the tenant's entitlement. `idempotency_key` is the
    caller's own name of what it asks, empty for none; `body_hash` tells apart what is asked under it, 0: the fields do.
    `ticket` is the token that it was deferred with, empty for none.
    """

    id: str
    attempt: int = 0
    model: str
    tenant: str
    origin: str
    prompt_tokens: Tokens
    max_tokens: Tokens = 0
    block_keys: bytes = b""
    block_tokens: int = 0
    stream: bool = True
    task: str = ""
    declared_class: str = ""
    deadline_s: float | None = None
    session: str = ""
    adapter: str = ""
    data_class: str = ""
    cross_site: bool = True
    hop: int = 0
    lease: str = ""
    sites_tried: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    wait_max_s: float = 0.0
    upload_bytes: int = 0
    dry_run: bool = False
    idempotency_key: str = ""
    body_hash: int = 0
    ticket: str = ""

    @property
    def is_retry(self) -> bool:
        """Whether an earlier attempt ran, or was refused: one that a site only sent back is none."""
        return self.attempt > len(self.sites_tried)


class Candidate(Struct, frozen=True):
    """One instance that TokenPilot weighed; all terms are seconds and add up to `cost_s`.

    ttft_s = wait_s + work_s + bias_s is the predicted time to first token, without network; cost_s = ttft_s +
    margin_s + reuse_s + kv_s + decode_s + weight_s + pace_s. `hit_tokens` is the cached prefix, credited with chance
    `p_hit`; it saves `saved_s` of the work. `kv_use` is the share of its KV in use once the request is there, None when
    unknown. `filtered` names the soft filter that removed it, empty for those that could have been chosen.
    """

    instance: str
    cost_s: float
    ttft_s: float
    wait_s: float
    work_s: float
    bias_s: float = 0.0
    margin_s: float = 0.0
    reuse_s: float = 0.0  # μ·work: the price of uncached work
    kv_s: float = 0.0
    decode_s: float = 0.0
    weight_s: float = 0.0  # what an operator's weight other than 1 adds
    hit_tokens: int = 0
    uncached_tokens: int = 0
    p_hit: float = 0.0
    saved_s: float = 0.0
    age_s: float | None = None
    suspect: bool = False
    kv_use: float | None = None
    filtered: str = ""
    pace_s: float = 0.0  # what the prefill costs those who decode there, where classes share the pool


class SiteOption(Struct, frozen=True, kw_only=True):
    """One site that FleetMind looked at: its cost in money, or why it was refused (empty: eligible).

    `cost` = `latency_cost` + `gpu_cost` + `egress_cost`. `latency_cost` prices network + wait + work (with its factor)
    + crowding of running decodes + the TPOT excess, all in seconds, at the class's money per second. `stale`: its
    summary is old enough to be used only when no fresher site passes.
    """

    site: str
    refused: str = ""
    cost: float | None = None
    ttft_s: float | None = None
    wait_s: float | None = None
    network_s: float | None = None
    hit_tokens: int = 0
    summary_age_s: float | None = None
    work_s: float | None = None
    crowding_s: float | None = None
    tpot_excess_s: float | None = None
    latency_cost: float | None = None
    gpu_cost: float | None = None
    egress_cost: float | None = None
    stale: bool = False


class Admission(Struct, frozen=True, kw_only=True):
    """SLOMax's part: the class, what put the request there, its output estimate and the class's room in its pool.

    `gate` is the feasibility gate's answer, empty where it wasn't asked: `gate_why` in words, from a `chance` of being
    in time, None where nothing is agreed or too few outcomes are known.
    """

    request_class: str
    rule: str
    output_q50_tokens: float
    output_q90_tokens: float
    running: int = 0
    bound: int = 0
    retry_after_s: float | None = None
    not_before_s: float | None = None
    ttft_max_s: float | None = None
    tpot_max_s: float | None = None
    end_max_s: float | None = None
    gate: GateAnswer = ""
    gate_why: str = ""
    chance: float | None = None


class Place(Struct, frozen=True, kw_only=True):
    """Where a request stands that waits in the queue of its class: number 1 is the next of them.

    The waits are the likely ones from now on, None as long as none has gone from there.
    """

    position: int
    wait_p50_s: float | None = None
    wait_p90_s: float | None = None


class BatchTicket(Struct, frozen=True, kw_only=True):
    """What batch work waits by that was deferred: its gateway shows `token` again, no earlier than the admission's
    `not_before_s` and best within `window_s` of that.

    `ahead_s` GPU seconds go before it, so that it would end in `end_s`; `will_miss`: that is past its deadline. 0 once
    it is `granted`: then only room is wanted.
    """

    token: str
    window_s: float
    ahead_s: float = 0.0
    end_s: float = 0.0
    will_miss: bool = False
    granted: bool = False


class ShadowChoice(Struct, frozen=True, kw_only=True):
    """Where a shadow of the policy would have sent the request: what that would have cost, under the policy's weights.

    `regret_s` = `ttft_s` − that of the decision's target, negative where the shadow's first token comes earlier.
    """

    shadow: str
    instance: str
    cost_s: float
    ttft_s: float
    regret_s: float
    hit_tokens: int = 0


class Regret(Struct, frozen=True, kw_only=True):
    """What the decision left: the most cached tokens of any instance able to serve, those of its target, and how much
    later its first token is predicted than on the earliest instance."""

    available_tokens: int
    captured_tokens: int
    ttft_s: float


BLOCKS_TOLD_MAX = 512  # keys a decision carries, at most 4 KiB on the topic


class Decision(Struct, frozen=True, kw_only=True):
    """The answer to one request and why.

    `target` is the instance (empty unless admitted here), `address` its endpoint, `site` where it runs; on `redirect`
    `site` and `gateways` tell where to ask next, with `lease`. `age_s` is the age of the youngest telemetry used, None
    if there was none; mode `stale` says that it is older than the policy's limit. `excluded` counts instances by the
    filter that removed them, `relaxed` names soft filters that were lifted. `how` tells how the target was found, empty
    without one: among `near_ties` instances, itself included, of which a draw gave it the part `drawn` between 0 and 1.
    `canary`: the policy revision was on trial. `sentence` is the whole in words, with the runner-up. `block_keys` are
    the first BLOCKS_TOLD_MAX of the request's, so that its log can be replayed with its reuse. `products` lists which
    of slomax, fleetmind, tokenpilot were on. `tables` names the versions decided on. `shadows` and `regret` are there
    for the share of decisions that the policy's shadows were asked beside. `duplicate`: another request asked for the
    same under the same key and gets this answer too; it runs once, so a gateway that reads this starts nothing. `place`
    comes with verdict `queue` where classes have queues, `ticket` with `defer` where batch work waits in PostgreSQL.
    """

    id: str
    request: str
    attempt: int
    verdict: Verdict
    reason: Reason = ""
    mode: Mode = "fresh"
    age_s: float | None = None
    tenant: str
    model: str
    request_class: str
    origin: str
    site: str = ""
    pool: str = ""
    target: str = ""
    address: str = ""
    gateways: tuple[str, ...] = ()
    lease: str = ""
    prompt_tokens: int
    block_keys: bytes = b""
    block_tokens: int = 0
    session: str = ""
    hit_tokens: int = 0
    predicted_ttft_s: float | None = None
    admission: Admission | None = None
    sites: tuple[SiteOption, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    considered: int = 0
    excluded: dict[str, int] = {}
    relaxed: tuple[str, ...] = ()
    runner_up: str = ""
    gap_s: float | None = None
    sentence: str = ""
    detail: str = ""  # for a refusal: what exists instead, or the remedy
    replica: str = ""
    policy_revision: int = 0
    calibration_revision: int = 0
    products: tuple[str, ...] = ()
    tables: dict[str, str] = {}
    at_wall_s: float = 0.0
    took_s: float = 0.0
    dry_run: bool = False
    shadows: tuple[ShadowChoice, ...] = ()
    regret: Regret | None = None
    how: How = ""
    near_ties: int = 0
    drawn: tuple[float, float] | None = None
    canary: bool = False
    duplicate: bool = False
    place: Place | None = None
    idempotency_key: str = ""
    body_hash: int = 0
    ticket: BatchTicket | None = None
