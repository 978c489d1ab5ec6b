"""Schemas: the topics in words that other languages and tools read: JSON Schema, AsyncAPI, golden records.

All of it is written from core.records and the table of topics; `schemas/` in git is compared with it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import msgspec
from msgspec import Struct

from tokenfleet.adapters.codec import SCHEMA_HEADER, encode
from tokenfleet.adapters.golden import golden_messages
from tokenfleet.adapters.topics import TOPICS, Topic

ASYNCAPI_NAME = "asyncapi.yaml"
GOLDEN_FOLDER = "golden"


def write_schemas(folder: Path) -> None:
    """Write all files, and remove those that no topic stands behind."""
    files = schema_files()
    for old in (*folder.glob("*.schema.json"), *folder.glob(f"{GOLDEN_FOLDER}/*.msgpack")):
        if str(old.relative_to(folder)) not in files:
            old.unlink()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def schema_files() -> dict[str, bytes]:
    """Every file's content by its path under `schemas/`; the same on every machine."""
    files = {f"{topic.name}.v{topic.version}.schema.json": _json(_schema(topic)) for topic in TOPICS}
    files[ASYNCAPI_NAME] = _yaml(_asyncapi())
    for topic, message in golden_messages():
        files[f"{GOLDEN_FOLDER}/{topic.name}.{_tag(type(message))}.msgpack"] = encode(topic, message)
    return files


def _schema(topic: Topic[Struct]) -> dict[str, Any]:
    [schema], components = msgspec.json.schema_components(
        [Union[topic.messages]],  # noqa: UP007  # a union made at run time
        ref_template="#/$defs/{name}",
    )
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{topic.name}/{topic.version}",
        "description": topic.description,
    }
    return head | schema | {"$defs": _sorted(components)}


def _asyncapi() -> dict[str, Any]:
    """AsyncAPI 3.0: a channel a topic, its messages with their JSON Schema."""
    channels: dict[str, Any] = {}
    operations: dict[str, Any] = {}
    for topic in TOPICS:
        channels[topic.name] = _channel(topic)
        operations[f"read_{topic.name}"] = {"action": "receive", "channel": {"$ref": f"#/channels/{topic.name}"}}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "TokenFleet topics",
            "version": "1.0.0",
            "description": "Records are msgpack maps with a `type` tag; unknown fields are to be ignored.",
        },
        "defaultContentType": "application/msgpack",
        "channels": channels,
        "operations": operations,
    }


def _channel(topic: Topic[Struct]) -> dict[str, Any]:
    kafka = {
        "bindingVersion": "0.5.0",
        "partitions": topic.partitions,
        "topicConfiguration": {
            "cleanup.policy": ["compact" if topic.compacted else "delete"],
            "retention.ms": round(topic.retention_s * 1000),
        },
    }
    channel: dict[str, Any] = {
        "address": topic.at("{site}") if topic.per_site else topic.at(),
        "description": topic.description,
        "messages": {_tag(message): _message(topic, message) for message in topic.messages},
        "bindings": {"kafka": kafka},
    }
    if topic.per_site:
        channel["parameters"] = {"site": {"description": "Name of the site that writes the topic."}}
    return channel


def _message(topic: Topic[Struct], message: type[Struct]) -> dict[str, Any]:
    header = {"type": "string", "const": f"{topic.name}/{topic.version}"}
    return {
        "name": _tag(message),
        "headers": {"type": "object", "properties": {SCHEMA_HEADER: header}},
        "payload": {
            "schemaFormat": "application/schema+json;version=draft-2020-12",
            "schema": {"$ref": f"./{topic.name}.v{topic.version}.schema.json#/$defs/{message.__name__}"},
        },
    }


def _tag(message: type[Struct]) -> str:
    return str(message.__struct_config__.tag)


def _sorted(components: Mapping[str, Any]) -> dict[str, Any]:
    return {name: components[name] for name in sorted(components)}


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _yaml(value: object) -> bytes:
    """JSON is YAML 1.2; block style would need a library that only tests have."""
    return b"# Written by adapters/schemas.py from the table of topics. JSON is YAML.\n" + _json(value)
