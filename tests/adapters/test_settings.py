"""Settings: file and environment, and what a wrong one is told."""

from pathlib import Path

import pytest

from tokenfleet.adapters.settings import CapacitySettings, DecideSettings, load_settings
from tokenfleet.core.errors import SetupError


def decide(toml: str, folder: Path, **environ: str) -> DecideSettings:
    """The settings of decide from a file and TOKENFLEET_<KEY>."""
    file = folder / "config.toml"
    file.write_text(toml)
    variables = {f"TOKENFLEET_{key}": value for key, value in environ.items()} | {"TOKENFLEET_CONFIG": str(file)}
    return load_settings("decide", DecideSettings, variables)


def test_the_environment_wins_over_the_processes_table_and_that_over_the_file(tmp_path: Path) -> None:
    shared = 'kafka = "k:1"\nsite = "a"\npostgres = "of another process"\n'
    toml = shared + '[decide]\nsite = "b"\nreplica = "1"\n[audit]\nlisten = "x:1"\n'
    settings = decide(toml, tmp_path, REPLICA="2", SITES="a, b,")
    assert (settings.kafka, settings.site, settings.replica) == ("k:1", "b", "2")
    assert settings.sites == ("a", "b")


BAD_FILES = {
    "kafka = 7": "kafka: expected str, got int",
    'kafak = "x"': "unknown key 'kafak'; there is: agent",
    "x = ": "nvalid value",
    '[decide]\nspool_max_bytes = "many"': "spool_max_bytes: expected int, got str",
    "[decide]\nnope = 1": r"unknown key 'nope' in \[decide\]; there is: credentials",
    "decide = 3": r"'decide' is not a table; write \[decide\]",
    'log_level = "loud"': "log_level: invalid enum value 'loud'",
    "status_port = 65536": "status_port: expected int <= 65535",
}


@pytest.mark.parametrize("toml", BAD_FILES)
def test_a_bad_file_is_told_with_file_and_key(toml: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=BAD_FILES[toml]) as caught:
        decide(toml, tmp_path)
    assert "config.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("STATUS_PORT", "x", "status_port: expected int"),
        ("STATUS_PORT", "-1", "status_port: expected int >= 0"),
        ("REFLECTION", "maybe", "reflection: expected bool"),
    ],
)
def test_a_bad_variable_is_told(key: str, value: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=told):
        decide("", tmp_path, **{key: value})


def test_a_variable_can_hold_a_table() -> None:
    def gateways(json: str) -> dict[str, tuple[str, ...]]:
        return load_settings("capacity", CapacitySettings, {"TOKENFLEET_GATEWAYS": json}).gateways

    assert gateways('{"a": ["h:1", "h:2"]}') == {"a": ("h:1", "h:2")}
    with pytest.raises(SetupError, match="TOKENFLEET_GATEWAYS: not JSON"):
        gateways("x")
    with pytest.raises(SetupError, match="gateways"):
        gateways('{"a": "b"}')


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="can't read"):
        load_settings("decide", DecideSettings, {"TOKENFLEET_CONFIG": str(tmp_path / "none.toml")})
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SetupError, match=r"bytes\.toml"):
        load_settings("capacity", CapacitySettings, {"TOKENFLEET_CONFIG": str(tmp_path / "bytes.toml")})
