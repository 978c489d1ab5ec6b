"""Policy: every number and rule a decision depends on, under one revision.

Read from TOML with unknown keys refused, so a bad file fails at load and never at a request. The shipped
default is `core/default_policy.toml`; new revisions arrive on the `policy` topic and replace one reference.
"""

import hashlib
import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from tokenfleet.core.errors import PolicyError, UnknownModelError, UnknownSiteError, UnknownTenantError
from tokenfleet.core.permitted import permitted_words
from tokenfleet.core.ranges import NonNegative, Positive, Share
from tokenfleet.core.slomax.terms import (
    BatchPolicy,
    ClassQueue,
    ControllerPolicy,
    FairPolicy,
    GatePolicy,
    PacingPolicy,
    ReservePolicy,
    RetryPolicy,
    ShardPolicy,
    share_problems,
)

BlindRule = Literal["power_of_two", "least_requests", "round_robin", "random"]
Rule = Literal["cost", "power_of_two", "least_requests", "round_robin", "random"]


class Products(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each product is a switch; off means a pass-through verdict, and the decision says so."""

    slomax: bool = True
    fleetmind: bool = True
    tokenpilot: bool = True


class RequestClass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of requests and its service level; None terms are not agreed.

    Time to first token must be ≤ `ttft_s` + `ttft_per_token_s` · prompt tokens; mean time per output token ≤ `tpot_s`
    (requests with < 8 output tokens: TTFT only); the end ≤ `deadline_s` after arrival. `running_max_per_instance`
    bounds the class's concurrent sequences on each ready instance; `backlog_max_s` the wait it may be sent into.
    `kv_share_max` bounds projected KV use, `ceiling` a site's utilisation for it. `value_per_s` is the money that
    a second of its latency is worth. `rank` orders classes for caps by entitlement and in the queue (0 = most urgent).
    `queue` is how it waits where the policy paces (PacingPolicy).
    """

    ttft_s: Positive | None = None
    ttft_per_token_s: NonNegative = 0.0
    tpot_s: Positive | None = None
    deadline_s: Positive | None = None
    running_max_per_instance: Annotated[int, Meta(ge=1)] = 64
    backlog_max_s: Positive = 10.0
    kv_share_max: Share = 0.97
    ceiling: Share = 0.9
    value_per_s: NonNegative = 0.001
    rank: Annotated[int, Meta(ge=0)] = 0
    queue: ClassQueue = ClassQueue()

    def ttft_max_s(self, prompt_tokens: int) -> float | None:
        """The agreed time to first token of a prompt, None if none is agreed."""
        return None if self.ttft_s is None else self.ttft_s + self.ttft_per_token_s * prompt_tokens


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who pays: which classes and models it may use (empty: all), and how much.

    `residency` names the rule that binds its requests, empty for none. `requests_per_minute_max` 0 means unlimited;
    `running_max` bounds its concurrent requests at one site. `weight` is its part of a contended pool beside others'.
    `team` names another entry, whose limits its own requests count against too.
    """

    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    residency: str = ""
    cross_site: bool = True
    requests_per_minute_max: Annotated[int, Meta(ge=0)] = 0
    running_max: Annotated[int, Meta(ge=0)] = 0
    weight: Annotated[float, Meta(ge=0.001, le=1000.0)] = 1.0
    team: str = ""


class Model(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that callers may name. `digests` are the revisions that may serve it (empty: any).

    `c0_s` … `d_s` are the engine coefficients assumed until outcomes have taught better ones.
    """

    context_max_tokens: Annotated[int, Meta(ge=1)]
    digests: tuple[str, ...] = ()
    budget_tokens: Annotated[int, Meta(ge=1)] = 4096  # tokens per engine iteration
    seats_max: Annotated[int, Meta(ge=1)] = 256
    c0_s: Positive = 0.0075
    w_min_s: NonNegative = 0.0026
    a_s: Positive = 3.78e-5
    b_s: NonNegative = 4.94e-10
    d_s: NonNegative = 1.3e-8
    output_tokens_prior: Positive = 256.0


class SitePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A datacenter: where it is in law, what an instance-hour costs, how far away the others are.

    `jurisdiction` is what residency rules list. `rtt_s` and `bandwidth_bytes_per_s` are keyed by origin site;
    a missing origin is at `rtt_default_s`.
    """

    jurisdiction: str
    ready_min: Annotated[int, Meta(ge=1)] = 1
    price_per_instance_hour: NonNegative = 2.0
    egress_per_gib: NonNegative = 0.0
    rtt_s: dict[str, NonNegative] = {}
    rtt_default_s: NonNegative = 0.05
    bandwidth_bytes_per_s: dict[str, Positive] = {}
    bandwidth_default_bytes_per_s: Positive = 125e6
    loss: dict[str, Share] = {}


class Residency(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Permit-only lists of jurisdictions; what is not listed is forbidden, an expired rule forbids all.

    `data_classes` limits the rule to requests of those classes (empty: all).
    """

    processing: tuple[str, ...]
    cache: tuple[str, ...]
    logs: tuple[str, ...]
    data_classes: tuple[str, ...] = ()
    expires_wall_s: float | None = None


class LateBindingPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a request that its gateway can hold waits there, and for what (core/tokenpilot/held.py).

    One goes out when its instance's backlog is at most `lags_in_backlog` times what reports of first tokens lag,
    between `backlog_min_s` and `backlog_max_s`. Those with the least work − `age_gain` · age go first, divided by up to
    1 + `due_weight` the nearer they are to the time to first token that most requests keep (core/tokenpilot/due.py);
    near is `due_near_share` of that time. `planned_max` are planned at a time, `held_max` are held at all. Off where
    fewer than `events_share_min` of the requests report their first token, or where reports lag by more than
    `backlog_max_s` / `lags_in_backlog`.
    """

    enabled: bool = True
    backlog_min_s: Positive = 0.05
    backlog_max_s: Positive = 0.2
    age_gain: NonNegative = 0.05
    due_weight: NonNegative = 30.0
    due_near_share: Positive = 0.15
    planned_max: Annotated[int, Meta(ge=1)] = 40
    held_max: Annotated[int, Meta(ge=1)] = 1000
    events_share_min: Share = 0.95
    lags_in_backlog: Positive = 3.0


class TokenPilotPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights and limits of routing: the terms of an instance's cost (core/tokenpilot/cost.py).

    `rule` is how an instance is chosen: by least cost, or blindly (core/tokenpilot/rules.py), to compare with; a blind
    rule holds nothing back.
    """

    rule: Rule = "cost"
    margin_weight: NonNegative = 0.5
    reuse_base: NonNegative = 0.5
    reuse_slope_per_s: NonNegative = 20.0
    reuse_max: NonNegative = 100.0
    kv_knee: Share = 0.9
    kv_slope_s: NonNegative = 20.0
    kv_lambda_s: NonNegative = 0.15
    decode_price_s: NonNegative = 0.001
    tie_min_s: NonNegative = 0.005
    tie_margin_share: NonNegative = 0.1
    tie_max_s: NonNegative = 0.05  # beyond, a long queue's uncertainty would blur warm and cold
    session_gain_min_s: NonNegative = 0.05
    session_gain_min_share: NonNegative = 0.15
    p_hit_events: Share = 0.97
    p_hit_approx: Share = 0.5
    unlearned_factor: Positive = 1.5
    candidates_kept: Annotated[int, Meta(ge=1, le=32)] = 8
    late: LateBindingPolicy = LateBindingPolicy()


class LivenessPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an instance is out, suspect, or its row old."""

    scrape_failed_max_s: Positive = 10.0
    agent_silent_max_s: Positive = 10.0
    fresh_max_s: Positive = 5.0  # older telemetry makes an answer `stale`
    failures_in_a_row: Annotated[int, Meta(ge=1)] = 5
    failures_share: Share = 0.5
    failures_window_s: Positive = 10.0
    failures_min: Annotated[int, Meta(ge=1)] = 10
    out_first_s: Positive = 10.0
    out_max_s: Positive = 120.0
    out_share_max: Share = 0.3


class LedgerPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a placement counts without an event of its own, and how telemetry corrects the view."""

    silent_max_s: Positive = 60.0
    read_back_s: Positive = 900.0
    correction_lag_s: NonNegative = 2.0
    correction_beats: Annotated[int, Meta(ge=1)] = 3


class SloMaxPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How requests are classed, and the bounds on load at the executing site."""

    long_ttft_share: Share = 0.25  # L* = share · chat's TTFT · prefill rate
    long_kv_share: Share = 0.05
    batch_deadline_min_s: Positive = 600.0
    batch_tasks: tuple[str, ...] = ("batch", "offline", "embedding", "evaluation")
    retry_after_min_s: Positive = 1.0
    retry_after_max_s: Positive = 30.0
    retry_after_spread: Share = 0.2
    pacing: PacingPolicy = PacingPolicy()
    fair: FairPolicy = FairPolicy()
    gate: GatePolicy = GatePolicy()
    reserve: ReservePolicy = ReservePolicy()
    controller: ControllerPolicy = ControllerPolicy()
    retry: RetryPolicy = RetryPolicy()
    shard: ShardPolicy = ShardPolicy()
    batch: BatchPolicy = BatchPolicy()


class FleetMindPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Constraints and cost of cross-site dispatch."""

    summary_age_max_s: Positive = 10.0
    summary_age_fresh_s: Positive = 3.0
    loss_max: Share = 0.02
    remote_ceiling_discount: Share = 0.05
    stay_gain_min_s: NonNegative = 0.1
    stay_gain_min_share: Share = 0.15
    match_gain_min_s: NonNegative = 0.03  # to leave the site with the longest cached prefix, when home can't serve
    near_best_share: Share = 0.05  # sites this much dearer than the best count as equal
    wait_min_share: Share = 0.75  # W_site = share·min + (1−share)·mean over instances
    work_factor: Positive = 1.5
    decode_crowding: NonNegative = 60.0
    bytes_per_prompt_token: NonNegative = 4.0
    sends_kept_s: Positive = 15.0


class GoodputPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Windows, lateness and price of accounting."""

    windows_s: tuple[float, ...] = (10.0, 60.0, 300.0)
    lateness_s: Positive = 120.0
    watermark_lag_s: Positive = 5.0
    idle_partition_s: Positive = 5.0
    settled_keep_s: Positive = 600.0
    open_sweep_s: Positive = 600.0
    tpot_min_tokens: Annotated[int, Meta(ge=2)] = 8


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole policy file. `default_tenant` serves unknown tenants when set.

    `shadows` are other weights that `shadow_share` of the decisions are also asked under, without effect; what one
    leaves out is the default, not what `tokenpilot` says.
    """

    revision: Annotated[int, Meta(ge=1)] = 1
    default_tenant: str = ""
    products: Products = Products()
    classes: dict[str, RequestClass]
    tenants: dict[str, Tenant]
    models: dict[str, Model]
    sites: dict[str, SitePolicy]
    residency: dict[str, Residency] = {}
    tokenpilot: TokenPilotPolicy = TokenPilotPolicy()
    slomax: SloMaxPolicy = SloMaxPolicy()
    fleetmind: FleetMindPolicy = FleetMindPolicy()
    liveness: LivenessPolicy = LivenessPolicy()
    ledger: LedgerPolicy = LedgerPolicy()
    goodput: GoodputPolicy = GoodputPolicy()
    shadows: dict[str, TokenPilotPolicy] = {}
    shadow_share: Share = 0.05

    def model(self, name: str) -> Model:
        """Raises UnknownModelError with the list of what exists."""
        if (found := self.models.get(name)) is None:
            raise UnknownModelError(name, self.models)
        return found

    @property
    def paces(self) -> bool:
        """Whether SLOMax queues requests by class."""
        return self.slomax.pacing.enabled and self.products.slomax

    def tenant(self, name: str) -> Tenant:
        """The tenant, or the default tenant's terms. Raises UnknownTenantError with the list of what exists."""
        if (found := self.tenants.get(name) or self.tenants.get(self.default_tenant)) is None:
            raise UnknownTenantError(name, self.tenants)
        return found

    def site(self, name: str) -> SitePolicy:
        """Raises UnknownSiteError with the list of what exists."""
        if (found := self.sites.get(name)) is None:
            raise UnknownSiteError(name, self.sites)
        return found


REQUIRED_CLASSES = ("chat", "long", "batch")  # the classifier's three; further ones are reached by declaration only


def parse_policy(toml: str, *, source: str) -> Policy:
    """The policy in `toml`; `source` names it in errors.

    Raises PolicyError, naming the key, for TOML that can't be read, unknown keys, values out of range, and
    names that point nowhere (a tenant's class, model or residency rule; an rtt from an unknown site).
    """
    try:
        policy = msgspec.toml.decode(toml, type=Policy)
    except (msgspec.DecodeError, ValueError) as error:
        raise PolicyError(f"{source}: {error}{permitted_words(str(error), Policy)}") from error
    for problem in (*_unusable_names(policy), *_dangling(policy)):
        raise PolicyError(f"{source}: {problem}")
    return policy


def newer_policy(policy: Policy, *, revision: int, toml: str) -> Policy | None:
    """The policy of a published revision, None if `policy` is not older.

    Raises PolicyError as parse_policy does, and for a file that says another revision than it was published under.
    """
    if revision <= policy.revision:
        return None
    source = f"policy revision {revision}"
    newer = parse_policy(toml, source=source)
    if newer.revision != revision:
        raise PolicyError(f"{source}: its file says revision {newer.revision}")
    return newer


def policy_hash(toml: str) -> str:
    """SHA-256 of the file's text: names a bundle in decisions and audit."""
    return hashlib.sha256(toml.encode()).hexdigest()


def _unusable_names(policy: Policy) -> list[str]:
    """Site names are parts of topic names; the others are labels of metrics, keys of records and file-safe ids."""
    tables = {
        "classes": policy.classes,
        "tenants": policy.tenants,
        "models": policy.models,
        "sites": policy.sites,
        "shadows": policy.shadows,
    }
    problems = [f"sites: {name!r} is not 1 to 64 of A-Z a-z 0-9 . _ -" for name in policy.sites if not SITE.match(name)]
    for kind, names in tables.items():
        problems += [
            f"{kind}: {name[:40]!r} is empty, longer than {NAME_BYTES_MAX} bytes, or holds what can't be printed"
            for name in names
            if not 0 < len(name.encode()) <= NAME_BYTES_MAX or not name.isprintable()
        ]
    return problems


SITE = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")  # Kafka's alphabet of topic names, which end at 249 characters
NAME_BYTES_MAX = 256
SHADOWS_MAX = 8  # each takes as long as the decision itself


def _dangling(policy: Policy) -> list[str]:
    problems = [f"classes: {name!r} is missing" for name in REQUIRED_CLASSES if name not in policy.classes]
    for name, tenant in policy.tenants.items():
        problems += [f"tenants.{name}.classes: no class {c!r}" for c in tenant.classes if c not in policy.classes]
        problems += [f"tenants.{name}.models: no model {m!r}" for m in tenant.models if m not in policy.models]
        if tenant.residency and tenant.residency not in policy.residency:
            problems.append(f"tenants.{name}.residency: no rule {tenant.residency!r}")
        if tenant.team and (tenant.team not in policy.tenants or policy.tenants[tenant.team].team):
            problems.append(f"tenants.{name}.team: no tenant {tenant.team!r} without a team of its own")
    for name, site in policy.sites.items():
        for field, table in (
            ("rtt_s", site.rtt_s),
            ("bandwidth_bytes_per_s", site.bandwidth_bytes_per_s),
            ("loss", site.loss),
        ):
            problems += [f"sites.{name}.{field}: no site {o!r}" for o in table if o not in policy.sites]
    if len(policy.shadows) > SHADOWS_MAX:
        problems.append(f"shadows: {len(policy.shadows)} of them, at most {SHADOWS_MAX} are asked")
    if policy.default_tenant and policy.default_tenant not in policy.tenants:
        problems.append(f"default_tenant: no tenant {policy.default_tenant!r}")
    return problems + share_problems(policy.slomax.controller, policy.classes)
