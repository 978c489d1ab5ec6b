"""Policy commands: what can't be meant is one line, before anything is published."""

from io import StringIO
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from tests.test_cli import complaint
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.client.policies import (
    arms_table,
    check_can_be_steered,
    duration_s,
    history_table,
    share_of,
    status_lines,
)
from tokenfleet.core.errors import BadRequestError
from tokenfleet.core.revisions import ArmFigures, CanaryReport, PolicyLog, PolicyRevision, renumbered, rollback_to


@pytest.mark.parametrize(
    "words",
    [("status",), ("rollback",), ("shadows",), ("history",), ("show", "--in-force")],
    ids=lambda words: words[0],
)
def test_without_a_fleet_a_command_says_how_to_start_one(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "start one with `tokenfleet up`" in complaint("policy", *words, "--state-dir", str(tmp_path))


def test_a_canary_that_can_not_be_tried_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "policy.toml"
    file.write_text(renumbered(policy_text(), 2))
    apply = ("policy", "apply", str(file), "--kafka", "127.0.0.1:1")
    assert complaint(*apply, "--canary", "60") == "--canary: 60 is not a percentage above 0 and up to 50"
    assert complaint(*apply, "--canary", "10", "--for", "soon") == (
        "--for: 'soon' is not a time above 0 and up to 24h, such as 90s, 10m, 2h"
    )
    file.write_text(policy_text().replace("revision = 1", '"revision" = 2', 1))
    assert "revision 3" in complaint(*apply, "--canary", "10")


@pytest.mark.parametrize("words", [("check",), ("apply", "--kafka", "127.0.0.1:1")], ids=lambda words: words[0])
def test_a_file_that_the_controller_of_shares_could_not_write_to_is_refused(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    file = tmp_path / "policy.toml"
    classes = "{ chat = { share = 0.6 }, batch = { share = 0.4 } }"
    file.write_text(f"slomax = {{ controller = {{ enabled = true, classes = {classes} }} }}\n{policy_text()}")
    assert "write [slomax] and [slomax.controller] as tables" in complaint("policy", *words, str(file))
    file.write_text(f"{policy_text()}\n[slomax.controller]\nenabled = true\nclasses = {classes}\n")
    check_can_be_steered(file)


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("10m", 600.0), ("1.5h", 5400.0)])
def test_a_duration_is_said_with_its_unit(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "0", "-1m", "25h", "nan", "inf", "1d"])
def test_another_duration_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="--for"):
        duration_s(text)


@pytest.mark.parametrize("percent", [0.0, -1.0, 50.1, float("nan")])
def test_a_share_that_leaves_an_arm_empty_is_refused(percent: float) -> None:
    with pytest.raises(BadRequestError, match="--canary"):
        share_of(percent)


def test_a_trial_that_somebody_else_ended_is_not_told_as_running() -> None:
    log = PolicyLog()
    report = CanaryReport(
        base=ArmFigures(revision=1),
        canary=ArmFigures(revision=2),
        elapsed_s=1.0,
        for_s=60.0,
        verdict="running",
        reason="0 requests beside 0, 59 s to go",
    )
    log.hear(PolicyRevision(revision=2, toml="", sha256="", by="ann", canary_share=0.1, canary_for_s=60.0), at_s=100.0)
    log.hear(report, at_s=101.0)
    assert status_lines(log, now_wall_s=130.0) == [
        "in force: the file each process was started with; no revision is published",
        "canary: revision 2 by ann, 10.0% of requests, since 30 s for 60 s",
        "canary revision 2 running: 0 requests beside 0, 59 s to go",
    ]
    assert arms_table(log) is not None
    log.hear(PolicyRevision(revision=3, toml="", sha256="", by="ben", reason="enough"), at_s=140.0)
    assert status_lines(log, now_wall_s=150.0) == [
        "in force: revision 3 by ben: enough",
        "canary revision 2 ended by another revision: 0 requests beside 0, 59 s to go",
    ]
    assert arms_table(PolicyLog()) is None


def test_the_history_tells_what_was_tried_and_what_became_of_it() -> None:
    assert history_table(PolicyLog()) is None
    log = PolicyLog()
    first = PolicyRevision(revision=1, toml=policy_text(), sha256="", by="ann")
    tried = PolicyRevision(revision=2, toml="", sha256="", by="ben", canary_share=0.1, canary_for_s=60.0)
    back = rollback_to(first.toml, tried, by="automatic rollback", reason="9.0% failed", at_wall_s=0.0)
    for record in (first, tried, tried, back, back):
        log.hear(record, at_s=1.8e9)
    console = Console(width=160, file=StringIO())
    console.print(history_table(log))
    assert isinstance(console.file, StringIO)
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    told = [line.split("│") for line in lines if "2027-01-15" in line]
    assert [[cell.strip() for cell in row[1:-1]] for row in told] == [
        ["3", AT, "into force", "automatic rollback", "canary revision 2 rolled back: 9.0% failed"],
        ["2", AT, "on trial, 10.0% for 60 s", "ben", ""],
        ["1", AT, "into force", "ann", ""],
    ]
    for number in range(4, 100):
        log.hear(replace(first, revision=number), at_s=1.8e9)
    assert [each.revision.revision for each in log.published] == [*range(80, 100)]


AT = "2027-01-15 08:00:00.000Z"
