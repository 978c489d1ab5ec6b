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
    __slots__ = ("decision",)
    DECISION_FIELD_NUMBER: _ClassVar[int]
    decision: _decision_pb2.Decision
    def __init__(self, decision: _Optional[_Union[_decision_pb2.Decision, _Mapping]] = ...) -> None: ...

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
    __slots__ = ("site", "replica", "sites", "policy_revision", "calibration_revision", "tables")
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
    site: str
    replica: str
    sites: _containers.RepeatedCompositeFieldContainer[Site]
    policy_revision: int
    calibration_revision: int
    tables: _containers.ScalarMap[str, str]
    def __init__(self, site: _Optional[str] = ..., replica: _Optional[str] = ..., sites: _Optional[_Iterable[_Union[Site, _Mapping]]] = ..., policy_revision: _Optional[int] = ..., calibration_revision: _Optional[int] = ..., tables: _Optional[_Mapping[str, str]] = ...) -> None: ...
