from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OutcomeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_KIND_UNSPECIFIED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_STARTED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FIRST_TOKEN: _ClassVar[OutcomeKind]
    OUTCOME_KIND_PROGRESS: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FINISHED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_FAILED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_CANCELLED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_TIMED_OUT: _ClassVar[OutcomeKind]
    OUTCOME_KIND_REJECTED: _ClassVar[OutcomeKind]
OUTCOME_KIND_UNSPECIFIED: OutcomeKind
OUTCOME_KIND_STARTED: OutcomeKind
OUTCOME_KIND_FIRST_TOKEN: OutcomeKind
OUTCOME_KIND_PROGRESS: OutcomeKind
OUTCOME_KIND_FINISHED: OutcomeKind
OUTCOME_KIND_FAILED: OutcomeKind
OUTCOME_KIND_CANCELLED: OutcomeKind
OUTCOME_KIND_TIMED_OUT: OutcomeKind
OUTCOME_KIND_REJECTED: OutcomeKind

class OutcomeEvent(_message.Message):
    __slots__ = ("request", "attempt", "kind", "decision", "tenant", "request_class", "model", "origin", "site", "instance", "elapsed_s", "attempt_s", "ttft_s", "tpot_s", "prompt_tokens", "cached_tokens", "output_tokens", "stop", "at_wall_s", "clock", "clock_s")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ELAPSED_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    AT_WALL_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    request: str
    attempt: int
    kind: OutcomeKind
    decision: str
    tenant: str
    request_class: str
    model: str
    origin: str
    site: str
    instance: str
    elapsed_s: float
    attempt_s: float
    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    stop: str
    at_wall_s: float
    clock: str
    clock_s: float
    def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., kind: _Optional[_Union[OutcomeKind, str]] = ..., decision: _Optional[str] = ..., tenant: _Optional[str] = ..., request_class: _Optional[str] = ..., model: _Optional[str] = ..., origin: _Optional[str] = ..., site: _Optional[str] = ..., instance: _Optional[str] = ..., elapsed_s: _Optional[float] = ..., attempt_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., stop: _Optional[str] = ..., at_wall_s: _Optional[float] = ..., clock: _Optional[str] = ..., clock_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[OutcomeEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[OutcomeEvent, _Mapping]]] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("accepted", "refused")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    accepted: int
    refused: _containers.RepeatedCompositeFieldContainer[RefusedEvent]
    def __init__(self, accepted: _Optional[int] = ..., refused: _Optional[_Iterable[_Union[RefusedEvent, _Mapping]]] = ...) -> None: ...

class RefusedEvent(_message.Message):
    __slots__ = ("index", "problem")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    index: int
    problem: str
    def __init__(self, index: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...
