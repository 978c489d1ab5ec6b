from tokenfleet.wire.v1 import decision_pb2 as _decision_pb2
from tokenfleet.wire.v1 import outcomes_pb2 as _outcomes_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindRequest(_message.Message):
    __slots__ = ("tenant", "model", "site", "target", "verdict", "since_wall_s", "until_wall_s", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    SINCE_WALL_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_WALL_S_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    site: str
    target: str
    verdict: _decision_pb2.Verdict
    since_wall_s: float
    until_wall_s: float
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., site: _Optional[str] = ..., target: _Optional[str] = ..., verdict: _Optional[_Union[_decision_pb2.Verdict, str]] = ..., since_wall_s: _Optional[float] = ..., until_wall_s: _Optional[float] = ..., limit: _Optional[int] = ...) -> None: ...

class FindResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_decision_pb2.Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[_decision_pb2.Decision, _Mapping]]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("decisions", "outcomes")
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_decision_pb2.Decision]
    outcomes: _containers.RepeatedCompositeFieldContainer[_outcomes_pb2.OutcomeEvent]
    def __init__(self, decisions: _Optional[_Iterable[_Union[_decision_pb2.Decision, _Mapping]]] = ..., outcomes: _Optional[_Iterable[_Union[_outcomes_pb2.OutcomeEvent, _Mapping]]] = ...) -> None: ...

class GoodputRequest(_message.Message):
    __slots__ = ("window_s", "request_class", "tenant", "since_wall_s", "until_wall_s")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SINCE_WALL_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_WALL_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    request_class: str
    tenant: str
    since_wall_s: float
    until_wall_s: float
    def __init__(self, window_s: _Optional[float] = ..., request_class: _Optional[str] = ..., tenant: _Optional[str] = ..., since_wall_s: _Optional[float] = ..., until_wall_s: _Optional[float] = ...) -> None: ...

class GoodputWindow(_message.Message):
    __slots__ = ("start_wall_s", "width_s", "request_class", "tenant", "pool", "goodput_tokens", "output_tokens", "waste_tokens", "met", "missed", "rejected", "excluded", "goodput_tokens_per_s", "attainment_admitted", "attainment_offered", "gpu_seconds", "cost", "cost_per_million_goodput_tokens")
    START_WALL_S_FIELD_NUMBER: _ClassVar[int]
    WIDTH_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WASTE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_OFFERED_FIELD_NUMBER: _ClassVar[int]
    GPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    COST_PER_MILLION_GOODPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    start_wall_s: float
    width_s: float
    request_class: str
    tenant: str
    pool: str
    goodput_tokens: int
    output_tokens: int
    waste_tokens: int
    met: int
    missed: int
    rejected: int
    excluded: int
    goodput_tokens_per_s: float
    attainment_admitted: float
    attainment_offered: float
    gpu_seconds: float
    cost: float
    cost_per_million_goodput_tokens: float
    def __init__(self, start_wall_s: _Optional[float] = ..., width_s: _Optional[float] = ..., request_class: _Optional[str] = ..., tenant: _Optional[str] = ..., pool: _Optional[str] = ..., goodput_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., waste_tokens: _Optional[int] = ..., met: _Optional[int] = ..., missed: _Optional[int] = ..., rejected: _Optional[int] = ..., excluded: _Optional[int] = ..., goodput_tokens_per_s: _Optional[float] = ..., attainment_admitted: _Optional[float] = ..., attainment_offered: _Optional[float] = ..., gpu_seconds: _Optional[float] = ..., cost: _Optional[float] = ..., cost_per_million_goodput_tokens: _Optional[float] = ...) -> None: ...

class GoodputResponse(_message.Message):
    __slots__ = ("windows",)
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    windows: _containers.RepeatedCompositeFieldContainer[GoodputWindow]
    def __init__(self, windows: _Optional[_Iterable[_Union[GoodputWindow, _Mapping]]] = ...) -> None: ...
