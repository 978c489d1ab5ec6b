from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_ADMIT: _ClassVar[Verdict]
    VERDICT_QUEUE: _ClassVar[Verdict]
    VERDICT_DEFER: _ClassVar[Verdict]
    VERDICT_REJECT: _ClassVar[Verdict]
    VERDICT_REDIRECT: _ClassVar[Verdict]

class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASON_UNSPECIFIED: _ClassVar[Reason]
    REASON_NO_INSTANCES: _ClassVar[Reason]
    REASON_ALL_BUSY: _ClassVar[Reason]
    REASON_FILTERED_BY_POLICY: _ClassVar[Reason]
    REASON_UNKNOWN_MODEL: _ClassVar[Reason]
    REASON_QUOTA: _ClassVar[Reason]
    REASON_INFEASIBLE: _ClassVar[Reason]
    REASON_CONTEXT_TOO_LONG: _ClassVar[Reason]
    REASON_NOT_PERMITTED: _ClassVar[Reason]
    REASON_NO_SITE: _ClassVar[Reason]
    REASON_RETRY_BUDGET: _ClassVar[Reason]
    REASON_KEY_CONFLICT: _ClassVar[Reason]
    REASON_DUPLICATE_DONE: _ClassVar[Reason]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_FRESH: _ClassVar[Mode]
    MODE_STALE: _ClassVar[Mode]
    MODE_DEGRADED: _ClassVar[Mode]
    MODE_BYPASS: _ClassVar[Mode]
VERDICT_UNSPECIFIED: Verdict
VERDICT_ADMIT: Verdict
VERDICT_QUEUE: Verdict
VERDICT_DEFER: Verdict
VERDICT_REJECT: Verdict
VERDICT_REDIRECT: Verdict
REASON_UNSPECIFIED: Reason
REASON_NO_INSTANCES: Reason
REASON_ALL_BUSY: Reason
REASON_FILTERED_BY_POLICY: Reason
REASON_UNKNOWN_MODEL: Reason
REASON_QUOTA: Reason
REASON_INFEASIBLE: Reason
REASON_CONTEXT_TOO_LONG: Reason
REASON_NOT_PERMITTED: Reason
REASON_NO_SITE: Reason
REASON_RETRY_BUDGET: Reason
REASON_KEY_CONFLICT: Reason
REASON_DUPLICATE_DONE: Reason
MODE_UNSPECIFIED: Mode
MODE_FRESH: Mode
MODE_STALE: Mode
MODE_DEGRADED: Mode
MODE_BYPASS: Mode

class Request(_message.Message):
    __slots__ = ("id", "attempt", "model", "tenant", "origin", "prompt_tokens", "max_tokens", "block_keys", "block_tokens", "stream", "task", "declared_class", "deadline_s", "session", "adapter", "data_class", "local_only", "hop", "lease", "sites_tried", "elapsed_s", "upload_bytes", "wait_max_s", "idempotency_key", "body_hash", "ticket")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DECLARED_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    DATA_CLASS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ONLY_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    SITES_TRIED_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MAX_S_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_HASH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    id: str
    attempt: int
    model: str
    tenant: str
    origin: str
    prompt_tokens: int
    max_tokens: int
    block_keys: bytes
    block_tokens: int
    stream: bool
    task: str
    declared_class: str
    deadline_s: float
    session: str
    adapter: str
    data_class: str
    local_only: bool
    hop: int
    lease: str
    sites_tried: _containers.RepeatedScalarFieldContainer[str]
    elapsed_s: float
    upload_bytes: int
    wait_max_s: float
    idempotency_key: str
    body_hash: int
    ticket: str
    def __init__(self, id: _Optional[str] = ..., attempt: _Optional[int] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., origin: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., block_keys: _Optional[bytes] = ..., block_tokens: _Optional[int] = ..., stream: _Optional[bool] = ..., task: _Optional[str] = ..., declared_class: _Optional[str] = ..., deadline_s: _Optional[float] = ..., session: _Optional[str] = ..., adapter: _Optional[str] = ..., data_class: _Optional[str] = ..., local_only: _Optional[bool] = ..., hop: _Optional[int] = ..., lease: _Optional[str] = ..., sites_tried: _Optional[_Iterable[str]] = ..., elapsed_s: _Optional[float] = ..., upload_bytes: _Optional[int] = ..., wait_max_s: _Optional[float] = ..., idempotency_key: _Optional[str] = ..., body_hash: _Optional[int] = ..., ticket: _Optional[str] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("instance", "cost_s", "ttft_s", "wait_s", "work_s", "bias_s", "margin_s", "reuse_s", "kv_s", "decode_s", "hit_tokens", "uncached_tokens", "p_hit", "age_s", "suspect", "weight_s", "saved_s", "kv_use", "filtered", "pace_s")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    BIAS_S_FIELD_NUMBER: _ClassVar[int]
    MARGIN_S_FIELD_NUMBER: _ClassVar[int]
    REUSE_S_FIELD_NUMBER: _ClassVar[int]
    KV_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    P_HIT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_S_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    PACE_S_FIELD_NUMBER: _ClassVar[int]
    instance: str
    cost_s: float
    ttft_s: float
    wait_s: float
    work_s: float
    bias_s: float
    margin_s: float
    reuse_s: float
    kv_s: float
    decode_s: float
    hit_tokens: int
    uncached_tokens: int
    p_hit: float
    age_s: float
    suspect: bool
    weight_s: float
    saved_s: float
    kv_use: float
    filtered: str
    pace_s: float
    def __init__(self, instance: _Optional[str] = ..., cost_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., work_s: _Optional[float] = ..., bias_s: _Optional[float] = ..., margin_s: _Optional[float] = ..., reuse_s: _Optional[float] = ..., kv_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., hit_tokens: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., p_hit: _Optional[float] = ..., age_s: _Optional[float] = ..., suspect: _Optional[bool] = ..., weight_s: _Optional[float] = ..., saved_s: _Optional[float] = ..., kv_use: _Optional[float] = ..., filtered: _Optional[str] = ..., pace_s: _Optional[float] = ...) -> None: ...

class SiteOption(_message.Message):
    __slots__ = ("site", "refused", "cost", "ttft_s", "wait_s", "network_s", "hit_tokens", "summary_age_s", "work_s", "crowding_s", "tpot_excess_s", "latency_cost", "gpu_cost", "egress_cost", "stale")
    SITE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    NETWORK_S_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    WORK_S_FIELD_NUMBER: _ClassVar[int]
    CROWDING_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_EXCESS_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_COST_FIELD_NUMBER: _ClassVar[int]
    GPU_COST_FIELD_NUMBER: _ClassVar[int]
    EGRESS_COST_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    site: str
    refused: str
    cost: float
    ttft_s: float
    wait_s: float
    network_s: float
    hit_tokens: int
    summary_age_s: float
    work_s: float
    crowding_s: float
    tpot_excess_s: float
    latency_cost: float
    gpu_cost: float
    egress_cost: float
    stale: bool
    def __init__(self, site: _Optional[str] = ..., refused: _Optional[str] = ..., cost: _Optional[float] = ..., ttft_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., network_s: _Optional[float] = ..., hit_tokens: _Optional[int] = ..., summary_age_s: _Optional[float] = ..., work_s: _Optional[float] = ..., crowding_s: _Optional[float] = ..., tpot_excess_s: _Optional[float] = ..., latency_cost: _Optional[float] = ..., gpu_cost: _Optional[float] = ..., egress_cost: _Optional[float] = ..., stale: _Optional[bool] = ...) -> None: ...

class Admission(_message.Message):
    __slots__ = ("request_class", "rule", "output_q50_tokens", "output_q90_tokens", "running", "bound", "retry_after_s", "not_before_s", "ttft_max_s", "tpot_max_s", "end_max_s", "gate", "gate_why", "chance")
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_Q50_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_Q90_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    BOUND_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_MAX_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_MAX_S_FIELD_NUMBER: _ClassVar[int]
    END_MAX_S_FIELD_NUMBER: _ClassVar[int]
    GATE_FIELD_NUMBER: _ClassVar[int]
    GATE_WHY_FIELD_NUMBER: _ClassVar[int]
    CHANCE_FIELD_NUMBER: _ClassVar[int]
    request_class: str
    rule: str
    output_q50_tokens: float
    output_q90_tokens: float
    running: int
    bound: int
    retry_after_s: float
    not_before_s: float
    ttft_max_s: float
    tpot_max_s: float
    end_max_s: float
    gate: str
    gate_why: str
    chance: float
    def __init__(self, request_class: _Optional[str] = ..., rule: _Optional[str] = ..., output_q50_tokens: _Optional[float] = ..., output_q90_tokens: _Optional[float] = ..., running: _Optional[int] = ..., bound: _Optional[int] = ..., retry_after_s: _Optional[float] = ..., not_before_s: _Optional[float] = ..., ttft_max_s: _Optional[float] = ..., tpot_max_s: _Optional[float] = ..., end_max_s: _Optional[float] = ..., gate: _Optional[str] = ..., gate_why: _Optional[str] = ..., chance: _Optional[float] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("position", "wait_p50_s", "wait_p90_s")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    WAIT_P50_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_P90_S_FIELD_NUMBER: _ClassVar[int]
    position: int
    wait_p50_s: float
    wait_p90_s: float
    def __init__(self, position: _Optional[int] = ..., wait_p50_s: _Optional[float] = ..., wait_p90_s: _Optional[float] = ...) -> None: ...

class BatchTicket(_message.Message):
    __slots__ = ("token", "window_s", "ahead_s", "end_s", "will_miss", "granted")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    WILL_MISS_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    token: str
    window_s: float
    ahead_s: float
    end_s: float
    will_miss: bool
    granted: bool
    def __init__(self, token: _Optional[str] = ..., window_s: _Optional[float] = ..., ahead_s: _Optional[float] = ..., end_s: _Optional[float] = ..., will_miss: _Optional[bool] = ..., granted: _Optional[bool] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("id", "request", "attempt", "verdict", "reason", "mode", "age_s", "tenant", "model", "request_class", "origin", "site", "pool", "target", "address", "gateways", "lease", "prompt_tokens", "hit_tokens", "predicted_ttft_s", "admission", "sites", "candidates", "considered", "excluded", "relaxed", "runner_up", "gap_s", "sentence", "detail", "replica", "policy_revision", "calibration_revision", "products", "tables", "at_wall_s", "took_s", "dry_run", "how", "canary", "duplicate", "idempotency_key", "body_hash", "place", "ticket")
    class ExcludedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_REVISION_FIELD_NUMBER: _ClassVar[int]
    PRODUCTS_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    AT_WALL_S_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    BODY_HASH_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    id: str
    request: str
    attempt: int
    verdict: Verdict
    reason: Reason
    mode: Mode
    age_s: float
    tenant: str
    model: str
    request_class: str
    origin: str
    site: str
    pool: str
    target: str
    address: str
    gateways: _containers.RepeatedScalarFieldContainer[str]
    lease: str
    prompt_tokens: int
    hit_tokens: int
    predicted_ttft_s: float
    admission: Admission
    sites: _containers.RepeatedCompositeFieldContainer[SiteOption]
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    considered: int
    excluded: _containers.ScalarMap[str, int]
    relaxed: _containers.RepeatedScalarFieldContainer[str]
    runner_up: str
    gap_s: float
    sentence: str
    detail: str
    replica: str
    policy_revision: int
    calibration_revision: int
    products: _containers.RepeatedScalarFieldContainer[str]
    tables: _containers.ScalarMap[str, str]
    at_wall_s: float
    took_s: float
    dry_run: bool
    how: str
    canary: bool
    duplicate: bool
    idempotency_key: str
    body_hash: int
    place: Place
    ticket: BatchTicket
    def __init__(self, id: _Optional[str] = ..., request: _Optional[str] = ..., attempt: _Optional[int] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason: _Optional[_Union[Reason, str]] = ..., mode: _Optional[_Union[Mode, str]] = ..., age_s: _Optional[float] = ..., tenant: _Optional[str] = ..., model: _Optional[str] = ..., request_class: _Optional[str] = ..., origin: _Optional[str] = ..., site: _Optional[str] = ..., pool: _Optional[str] = ..., target: _Optional[str] = ..., address: _Optional[str] = ..., gateways: _Optional[_Iterable[str]] = ..., lease: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., admission: _Optional[_Union[Admission, _Mapping]] = ..., sites: _Optional[_Iterable[_Union[SiteOption, _Mapping]]] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., considered: _Optional[int] = ..., excluded: _Optional[_Mapping[str, int]] = ..., relaxed: _Optional[_Iterable[str]] = ..., runner_up: _Optional[str] = ..., gap_s: _Optional[float] = ..., sentence: _Optional[str] = ..., detail: _Optional[str] = ..., replica: _Optional[str] = ..., policy_revision: _Optional[int] = ..., calibration_revision: _Optional[int] = ..., products: _Optional[_Iterable[str]] = ..., tables: _Optional[_Mapping[str, str]] = ..., at_wall_s: _Optional[float] = ..., took_s: _Optional[float] = ..., dry_run: _Optional[bool] = ..., how: _Optional[str] = ..., canary: _Optional[bool] = ..., duplicate: _Optional[bool] = ..., idempotency_key: _Optional[str] = ..., body_hash: _Optional[int] = ..., place: _Optional[_Union[Place, _Mapping]] = ..., ticket: _Optional[_Union[BatchTicket, _Mapping]] = ...) -> None: ...
