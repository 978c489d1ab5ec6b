"""Views: what a decision sees of one instance, and of another site; core.pool has the whole pool.

`core.site` assembles them from the tables; TokenPilot, SLOMax, FleetMind and the site summary read them.
"""

from typing import Literal

from msgspec import Struct

from tokenfleet.core.records import KvState, SiteSummary

Availability = Literal["ready", "starting", "draining", "sleeping", "quarantined", "out"]


class InstanceView(Struct, frozen=True, kw_only=True):
    """One instance, all sources joined: capacity row, ledger, prefix index, failure evidence, control.

    `age_s` is the age of its telemetry, None when unknown. `suspect`: its agent is silent, its age unknown, or it was
    never seen; it is chosen only when no other has room. `backlog_s` is the predicted time until a prompt sent now
    would begin its prefill, `behind_s` what of it lies behind the prompt that is computed now. `queued` are sequences
    not yet at first token, `decoding` those past it, `context_tokens` their summed context. `kv_held_tokens` is what
    placements and telemetry hold in KV, `kv_total_tokens` None when unknown. `hit_tokens` is the cached prefix of this
    very request (0 in views made for no request), believed with chance `p_hit`. `probe` marks an instance that failed
    lately and is half-open. `foreign` is load that engine counts show and no placement explains (sequences). `weight`
    is the operator's.
    """

    instance: str
    address: str
    model: str
    model_digest: str = ""
    engine: str = "vllm"
    availability: Availability = "ready"
    availability_reason: str = ""
    suspect: bool = False
    age_s: float | None = 0.0
    context_max_tokens: int = 0
    backlog_s: float = 0.0
    behind_s: float = 0.0
    queued: int = 0
    queued_tokens: int = 0
    decoding: int = 0
    context_tokens: float = 0.0
    kv_held_tokens: float = 0.0
    kv_total_tokens: float | None = None
    hit_tokens: int = 0
    p_hit: float = 0.0
    kv_state: KvState = "none"
    foreign: float = 0.0
    probe: bool = False
    weight: float = 1.0
    class_running: dict[str, int] = {}
    class_queued: dict[str, int] = {}
    class_kv_tokens: dict[str, int] = {}


class PeerView(Struct, frozen=True, kw_only=True):
    """Another site (or one's own) as FleetMind sees it: its last summary, its age on our clock, the prefix credit.

    `age_s` is now − heard + age when sent, None when no summary was ever heard. `hit_tokens` comes from the sketch
    of the request's pool. `link_up` is what probes and outcomes show.
    """

    site: str
    summary: SiteSummary | None
    age_s: float | None
    hit_tokens: int = 0
    link_up: bool = True
    rtt_s: float | None = None
    loss: float | None = None
