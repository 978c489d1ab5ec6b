"""Contract: TokenFleet's topics as asyncapi.yaml and the JSON Schemas beside it describe them."""

import json
import re
from pathlib import Path
from typing import Any

import msgpack
import yaml
from jsonschema import Draft202012Validator, validators

# Records are msgpack: what a schema calls a string with an encoding comes as bytes.
WireValidator = validators.extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("string", lambda _, value: isinstance(value, (str, bytes))),
)
SCHEMA_HEADER = "tf-schema"
PATH_SHOWN_MAX = 6  # parts of the path to what is wrong


class RefusedError(Exception):
    """A record that does not keep to its schema. The message says why, without the payload."""


class Channel:
    """One kind of topic: which topics are of it, and what their records look like."""

    def __init__(self, name: str, address: str, schema: dict[str, Any]) -> None:
        self.name = name
        pattern = re.escape(address).replace(re.escape("{site}"), "(?P<site>.+)")
        self._topic = re.compile(f"^{pattern}$")
        self._schema_name, _, version = schema["title"].partition("/")
        self._version = int(version)
        self._validator = WireValidator(schema)

    def owns(self, topic: str) -> bool:
        return self._topic.match(topic) is not None

    def read(self, value: bytes | None, headers: dict[str, bytes]) -> dict[str, Any]:
        """The record, with fields that the schema does not know left in it. Raises RefusedError."""
        name, _, version = headers.get(SCHEMA_HEADER, b"").decode(errors="replace").partition("/")
        if name != self._schema_name:
            raise RefusedError(f"header {SCHEMA_HEADER} is {name!r}, not {self._schema_name!r}")
        if not version.isdigit() or int(version) > self._version:
            raise RefusedError(f"schema version {version!r} is newer than {self._version}")
        try:
            record = msgpack.unpackb(value or b"")
        except (ValueError, msgpack.UnpackException) as error:
            raise RefusedError(f"not one msgpack value ({type(error).__name__})") from error
        if (wrong := next(self._validator.iter_errors(record), None)) is not None:
            path = "/".join(str(part) for part in list(wrong.absolute_path)[:PATH_SHOWN_MAX])
            raise RefusedError(f"breaks the schema's {wrong.validator!r} at /{path}")
        return record


def channels(schemas: Path, names: tuple[str, ...]) -> dict[str, Channel]:
    """The channels of those names. Raises KeyError for one that asyncapi.yaml does not list."""
    document = yaml.safe_load((schemas / "asyncapi.yaml").read_text(encoding="utf-8"))
    return {name: channel(schemas, name, document["channels"][name]) for name in names}


def channel(schemas: Path, name: str, described: dict[str, Any]) -> Channel:
    message = next(iter(described["messages"].values()))
    file, _, _ = message["payload"]["schema"]["$ref"].partition("#")  # the file's root covers all messages of a topic
    return Channel(name, described["address"], json.loads((schemas / file).read_text(encoding="utf-8")))
