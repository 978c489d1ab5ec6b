"""Command line: whatever is wrong is one line that says what, where and the remedy, and an exit code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenfleet.adapters.policy_file import policy_text

WAIT_MAX_S = 120.0  # a command takes 1 s; a machine under load needs longer


def tokenfleet(*words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it; `settings` are TOKENFLEET_<KEY>."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    return subprocess.run(
        [sys.executable, "-m", "tokenfleet.cli", *words],
        env=kept | {f"TOKENFLEET_{key}": value for key, value in settings.items()},
        capture_output=True,
        text=True,
        timeout=WAIT_MAX_S,
        check=False,
    )


def complaint(*words: str, **settings: str) -> str:
    """The one line that a command which fails says."""
    done = tokenfleet(*words, **settings)
    lines = done.stderr.splitlines()
    assert done.returncode not in (0, None), words
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


@pytest.mark.parametrize(
    "words",
    [
        ("status",),
        ("schedule", "--model", "m", "--tenant", "t"),
        ("route", "--model", "m", "--tenant", "t"),
        ("explain", "r"),
        ("replay",),
        ("drain", "i"),
        ("topics", "apply"),
        ("migrate",),
    ],
    ids=lambda words: words[0],
)
def test_without_a_fleet_a_command_says_how_to_start_one(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "start one with `tokenfleet up`" in complaint(*words, "--state-dir", str(tmp_path))


def test_options_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    assert complaint("status", "-o", "yaml", "--state-dir", str(tmp_path)) == "-o: 'yaml' is neither table nor json"
    assert "'placements' is not NAME=COUNT" in complaint("topics", "apply", "--print", "--partitions", "placements")
    assert "no topic 'x'; there is: capacity" in complaint("topics", "apply", "--print", "--partitions", "x=1")


BAD_POLICIES = {
    "an unknown key": ("revision = 1", "revision = 1\nnonsense = 1", "nonsense"),
    "no TOML": ("revision = 1", "revision = [", "line"),
    "out of range": ("revision = 1", "revision = 0", "$.revision"),
    "a tenant's class that is none": ('classes = ["', 'classes = ["gold", "', "no class 'gold'"),
}


@pytest.mark.parametrize("name", BAD_POLICIES)
def test_a_policy_that_can_not_be_used_is_refused_with_file_and_key(name: str, tmp_path: Path) -> None:
    old, new, named = BAD_POLICIES[name]
    assert old in policy_text()
    file = tmp_path / "policy.toml"
    file.write_text(policy_text().replace(old, new, 1))
    line = complaint("policy", "check", str(file))
    assert str(file) in line
    assert named in line
    assert complaint("decide", SITE="b", POLICY=str(file), STATE_DIR=str(tmp_path)) == line


def test_nobody_at_an_address_is_one_line_with_the_address(unused_tcp_port: int) -> None:
    nobody = f"127.0.0.1:{unused_tcp_port}"
    assert complaint("topics", "apply", "--kafka", nobody) == (
        f"no Kafka broker answers at {nobody}; start it, or give the address of one that runs"
    )
    assert nobody in complaint("status", "--gateway", nobody)
    assert nobody in complaint("explain", "r", "--audit", nobody)
    line = complaint("migrate", "--postgres", f"postgres://postgres:hunter2@{nobody}/x")
    assert str(unused_tcp_port) in line
    assert "hunter2" not in line


@pytest.mark.parametrize("process", ["decide", "capacity", "goodput"])
def test_a_state_folder_that_can_not_be_written_is_named(process: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert str(file) in complaint(process, SITE="b", SITES="b", STATE_DIR=str(file / "state"))


@pytest.mark.parametrize("group", [(), ("topics",), ("policy",)], ids=["all", "topics", "policy"])
def test_every_command_is_told_whole_on_a_narrow_terminal(
    group: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = tokenfleet(*group, "--help")
    assert done.returncode == 0
    _, _, commands = done.stdout.partition("Commands:")
    assert len(commands.splitlines()) > 1
    assert "..." not in commands


def test_a_credential_that_no_file_would_take_is_not_made() -> None:
    assert (
        complaint("credentials", "new", "a", "--role", "king") == "--role: 'king' is none of gateway, operator, auditor"
    )
    assert complaint("credentials", "new", "a.b", "--role", "gateway").startswith("NAME: 'a.b' is not of letters")
    assert complaint("credentials", "new", "a", "--role", "gateway", "--tenant", "").startswith("--tenant: is empty")
