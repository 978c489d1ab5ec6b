from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Protocol

class NewTopic:
    name: str
    def __init__(
        self,
        name: str,
        num_partitions: int,
        replication_factor: int,
        replica_assignments: Mapping[int, Sequence[int]] | None = None,
        topic_configs: Mapping[str, str] | None = None,
    ) -> None: ...

class CreateTopicsResponse(Protocol):
    topic_errors: list[tuple[str, int, str | None]]

class DeleteTopicsResponse(Protocol):
    topic_error_codes: list[tuple[str, int]]

class ConfigResourceType(IntEnum):
    BROKER = 4
    TOPIC = 2

class ConfigResource:
    def __init__(
        self, resource_type: ConfigResourceType, name: str, configs: Mapping[str, str] | None = None
    ) -> None: ...

class DescribeConfigsResponse(Protocol):
    resources: list[tuple[Any, ...]]

class AIOKafkaAdminClient:
    def __init__(
        self,
        *,
        bootstrap_servers: str | list[str],
        client_id: str = ...,
        request_timeout_ms: int = 40000,
        metadata_max_age_ms: int = 300000,
    ) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def create_topics(
        self, new_topics: list[NewTopic], timeout_ms: int | None = None, validate_only: bool = False
    ) -> CreateTopicsResponse: ...
    async def delete_topics(self, topics: list[str], timeout_ms: int | None = None) -> DeleteTopicsResponse: ...
    async def describe_topics(self, topics: list[str] | None = None) -> list[dict[str, Any]]: ...
    async def describe_cluster(self) -> dict[str, Any]: ...
    async def describe_configs(
        self, config_resources: list[ConfigResource], include_synonyms: bool = False
    ) -> list[DescribeConfigsResponse]: ...
