from tokenfleet.wire.v1 import decision_pb2 as _decision_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScheduleRequest(_message.Message):
    __slots__ = ("request", "dry_run")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    request: _decision_pb2.Request
    dry_run: bool
    def __init__(self, request: _Optional[_Union[_decision_pb2.Request, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("decision", "error", "held")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    error: Problem
    held: str
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ..., error: _Optional[_Union[Problem, _Mapping]] = ..., held: _Optional[str] = ...) -> None: ...

class Problem(_message.Message):
    __slots__ = ("code", "reason", "field", "message", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    field: str
    message: str
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., message: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class AdmitRequest(_message.Message):
    __slots__ = ("request", "dry_run")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    request: _decision_pb2.Request
    dry_run: bool
    def __init__(self, request: _Optional[_Union[_decision_pb2.Request, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class AdmitResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ...) -> None: ...

class DispatchRequest(_message.Message):
    __slots__ = ("request", "dry_run")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    request: _decision_pb2.Request
    dry_run: bool
    def __init__(self, request: _Optional[_Union[_decision_pb2.Request, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class DispatchResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ...) -> None: ...

class RouteRequest(_message.Message):
    __slots__ = ("request", "dry_run")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    request: _decision_pb2.Request
    dry_run: bool
    def __init__(self, request: _Optional[_Union[_decision_pb2.Request, _Mapping]] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ...) -> None: ...

class RouteStreamRequest(_message.Message):
    __slots__ = ("requests", "withdrawn")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RouteRequest]
    withdrawn: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, requests: _Optional[_Iterable[_Union[RouteRequest, _Mapping]]] = ..., withdrawn: _Optional[_Iterable[str]] = ...) -> None: ...

class RouteStreamResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[RouteAnswer]
    def __init__(self, answers: _Optional[_Iterable[_Union[RouteAnswer, _Mapping]]] = ...) -> None: ...

class RouteAnswer(_message.Message):
    __slots__ = ("decision", "error", "held")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    error: Problem
    held: str
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ..., error: _Optional[_Union[Problem, _Mapping]] = ..., held: _Optional[str] = ...) -> None: ...

class WhatIfRequest(_message.Message):
    __slots__ = ("request", "changes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    request: _decision_pb2.Request
    changes: Changes
    def __init__(self, request: _Optional[_Union[_decision_pb2.Request, _Mapping]] = ..., changes: _Optional[_Union[Changes, _Mapping]] = ...) -> None: ...

class Changes(_message.Message):
    __slots__ = ("weights", "drained", "removed", "added", "calibration")
    class WeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class CalibrationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    weights: _containers.ScalarMap[str, float]
    drained: _containers.RepeatedScalarFieldContainer[str]
    removed: _containers.RepeatedScalarFieldContainer[str]
    added: _containers.RepeatedCompositeFieldContainer[AddedInstances]
    calibration: _containers.ScalarMap[str, float]
    def __init__(self, weights: _Optional[_Mapping[str, float]] = ..., drained: _Optional[_Iterable[str]] = ..., removed: _Optional[_Iterable[str]] = ..., added: _Optional[_Iterable[_Union[AddedInstances, _Mapping]]] = ..., calibration: _Optional[_Mapping[str, float]] = ...) -> None: ...

class AddedInstances(_message.Message):
    __slots__ = ("like", "count")
    LIKE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    like: str
    count: int
    def __init__(self, like: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class WhatIfResponse(_message.Message):
    __slots__ = ("present", "changed", "changes", "tables", "age_s", "policy_revision", "calibration_revision", "pool")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_REVISION_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    present: Choice
    changed: Choice
    changes: _containers.RepeatedScalarFieldContainer[str]
    tables: _containers.ScalarMap[str, str]
    age_s: float
    policy_revision: int
    calibration_revision: int
    pool: str
    def __init__(self, present: _Optional[_Union[Choice, _Mapping]] = ..., changed: _Optional[_Union[Choice, _Mapping]] = ..., changes: _Optional[_Iterable[str]] = ..., tables: _Optional[_Mapping[str, str]] = ..., age_s: _Optional[float] = ..., policy_revision: _Optional[int] = ..., calibration_revision: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class Choice(_message.Message):
    __slots__ = ("target", "reason", "detail", "sentence", "candidates", "considered", "excluded", "relaxed", "runner_up", "gap_s", "predicted_ttft_s")
    class ExcludedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    target: str
    reason: _decision_pb2.Reason
    detail: str
    sentence: str
    candidates: _containers.RepeatedCompositeFieldContainer[_decision_pb2.Candidate]
    considered: int
    excluded: _containers.ScalarMap[str, int]
    relaxed: _containers.RepeatedScalarFieldContainer[str]
    runner_up: str
    gap_s: float
    predicted_ttft_s: float
    def __init__(self, target: _Optional[str] = ..., reason: _Optional[_Union[_decision_pb2.Reason, str]] = ..., detail: _Optional[str] = ..., sentence: _Optional[str] = ..., candidates: _Optional[_Iterable[_Union[_decision_pb2.Candidate, _Mapping]]] = ..., considered: _Optional[int] = ..., excluded: _Optional[_Mapping[str, int]] = ..., relaxed: _Optional[_Iterable[str]] = ..., runner_up: _Optional[str] = ..., gap_s: _Optional[float] = ..., predicted_ttft_s: _Optional[float] = ...) -> None: ...

class SitesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Site(_message.Message):
    __slots__ = ("name", "jurisdiction", "summary_age_s", "gateways", "pools", "telemetry_age_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JURISDICTION_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_AGE_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    jurisdiction: str
    summary_age_s: float
    gateways: _containers.RepeatedScalarFieldContainer[str]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    telemetry_age_s: float
    def __init__(self, name: _Optional[str] = ..., jurisdiction: _Optional[str] = ..., summary_age_s: _Optional[float] = ..., gateways: _Optional[_Iterable[str]] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ..., telemetry_age_s: _Optional[float] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool", "model", "model_digest", "endpoints", "ready", "warming", "draining", "suspect", "prefill", "kv", "seats", "waits_s", "instances")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    WARMING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    model: str
    model_digest: str
    endpoints: int
    ready: int
    warming: int
    draining: int
    suspect: int
    prefill: Vector
    kv: Vector
    seats: Vector
    waits_s: _containers.RepeatedScalarFieldContainer[float]
    instances: _containers.RepeatedCompositeFieldContainer[Instance]
    def __init__(self, pool: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., endpoints: _Optional[int] = ..., ready: _Optional[int] = ..., warming: _Optional[int] = ..., draining: _Optional[int] = ..., suspect: _Optional[int] = ..., prefill: _Optional[_Union[Vector, _Mapping]] = ..., kv: _Optional[_Union[Vector, _Mapping]] = ..., seats: _Optional[_Union[Vector, _Mapping]] = ..., waits_s: _Optional[_Iterable[float]] = ..., instances: _Optional[_Iterable[_Union[Instance, _Mapping]]] = ...) -> None: ...

class Vector(_message.Message):
    __slots__ = ("capacity", "used", "queued")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    capacity: float
    used: float
    queued: float
    def __init__(self, capacity: _Optional[float] = ..., used: _Optional[float] = ..., queued: _Optional[float] = ...) -> None: ...

class Instance(_message.Message):
    __slots__ = ("instance", "address", "availability", "availability_reason", "suspect", "age_s", "backlog_s", "queued", "decoding", "kv_held_tokens", "kv_total_tokens", "kv_state", "model_digest", "cached_blocks")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_REASON_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_S_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DECODING_FIELD_NUMBER: _ClassVar[int]
    KV_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    address: str
    availability: str
    availability_reason: str
    suspect: bool
    age_s: float
    backlog_s: float
    queued: int
    decoding: int
    kv_held_tokens: float
    kv_total_tokens: float
    kv_state: str
    model_digest: str
    cached_blocks: int
    def __init__(self, instance: _Optional[str] = ..., address: _Optional[str] = ..., availability: _Optional[str] = ..., availability_reason: _Optional[str] = ..., suspect: _Optional[bool] = ..., age_s: _Optional[float] = ..., backlog_s: _Optional[float] = ..., queued: _Optional[int] = ..., decoding: _Optional[int] = ..., kv_held_tokens: _Optional[float] = ..., kv_total_tokens: _Optional[float] = ..., kv_state: _Optional[str] = ..., model_digest: _Optional[str] = ..., cached_blocks: _Optional[int] = ...) -> None: ...

class SitesResponse(_message.Message):
    __slots__ = ("site", "replica", "sites", "policy_revision", "calibration_revision", "tables", "held", "holds_none", "rule", "books", "batch")
    class TablesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SITE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SITES_FIELD_NUMBER: _ClassVar[int]
    POLICY_REVISION_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_REVISION_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOLDS_NONE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    site: str
    replica: str
    sites: _containers.RepeatedCompositeFieldContainer[Site]
    policy_revision: int
    calibration_revision: int
    tables: _containers.ScalarMap[str, str]
    held: int
    holds_none: str
    rule: str
    books: _containers.RepeatedCompositeFieldContainer[Book]
    batch: _containers.RepeatedCompositeFieldContainer[Batch]
    def __init__(self, site: _Optional[str] = ..., replica: _Optional[str] = ..., sites: _Optional[_Iterable[_Union[Site, _Mapping]]] = ..., policy_revision: _Optional[int] = ..., calibration_revision: _Optional[int] = ..., tables: _Optional[_Mapping[str, str]] = ..., held: _Optional[int] = ..., holds_none: _Optional[str] = ..., rule: _Optional[str] = ..., books: _Optional[_Iterable[_Union[Book, _Mapping]]] = ..., batch: _Optional[_Iterable[_Union[Batch, _Mapping]]] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("model", "waiting", "waiting_gpu_s", "first_left_s", "rate", "owned", "closed")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_GPU_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    model: str
    waiting: int
    waiting_gpu_s: float
    first_left_s: float
    rate: float
    owned: bool
    closed: str
    def __init__(self, model: _Optional[str] = ..., waiting: _Optional[int] = ..., waiting_gpu_s: _Optional[float] = ..., first_left_s: _Optional[float] = ..., rate: _Optional[float] = ..., owned: _Optional[bool] = ..., closed: _Optional[str] = ...) -> None: ...

class Book(_message.Message):
    __slots__ = ("book", "state", "rest_units", "waiting", "owned", "limit_units", "counted_units", "in_line")
    BOOK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REST_UNITS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    OWNED_FIELD_NUMBER: _ClassVar[int]
    LIMIT_UNITS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_UNITS_FIELD_NUMBER: _ClassVar[int]
    IN_LINE_FIELD_NUMBER: _ClassVar[int]
    book: str
    state: str
    rest_units: int
    waiting: int
    owned: bool
    limit_units: int
    counted_units: int
    in_line: int
    def __init__(self, book: _Optional[str] = ..., state: _Optional[str] = ..., rest_units: _Optional[int] = ..., waiting: _Optional[int] = ..., owned: _Optional[bool] = ..., limit_units: _Optional[int] = ..., counted_units: _Optional[int] = ..., in_line: _Optional[int] = ...) -> None: ...
