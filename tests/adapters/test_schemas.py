"""Schemas: what is in git is what the code writes, and other tools can read it."""

import json
from pathlib import Path

import jsonschema
import msgpack
import pytest
import yaml

from tokenfleet.adapters.golden import golden_messages
from tokenfleet.adapters.schemas import ASYNCAPI_NAME, schema_files, write_schemas
from tokenfleet.adapters.topics import TOPICS

FOLDER = Path(__file__).parents[2] / "schemas"
FILES = schema_files()


@pytest.mark.parametrize("name", FILES)
def test_git_holds_what_the_code_writes(name: str) -> None:
    assert (FOLDER / name).read_bytes() == FILES[name], "stale: run tools/schemas"


def test_nothing_else_lies_there(tmp_path: Path) -> None:
    write_schemas(tmp_path)
    (tmp_path / "gone.v1.schema.json").write_text("{}")
    (tmp_path / "golden" / "gone.msgpack").write_bytes(b"")
    write_schemas(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} == FILES.keys()


def test_there_is_a_golden_record_of_every_message() -> None:
    assert {type(message) for _, message in golden_messages()} == {m for topic in TOPICS for m in topic.messages}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("golden/")])
def test_a_foreign_reader_reads_the_golden_records(name: str) -> None:
    """msgpack with strict keys, and the topic's JSON Schema; bytes fields are base64 text in JSON."""
    value = msgpack.unpackb(FILES[name], strict_map_key=True)
    assert value["type"] == name.split(".")[1]
    schema = json.loads(FILES[f"{name.removeprefix('golden/').split('.')[0]}.v1.schema.json"])
    as_json = json.loads(json.dumps(value, default=lambda raw: raw.hex()))
    jsonschema.Draft202012Validator(schema).validate(as_json)


def test_asyncapi_names_every_topic_and_points_at_files_that_exist() -> None:
    document = yaml.safe_load(FILES[ASYNCAPI_NAME])
    assert document["asyncapi"] == "3.0.0"
    assert document["channels"].keys() == {topic.name for topic in TOPICS}
    for channel in document["channels"].values():
        for message in channel["messages"].values():
            name, _, path = message["payload"]["schema"]["$ref"].removeprefix("./").partition("#/$defs/")
            assert path in json.loads(FILES[name])["$defs"]
