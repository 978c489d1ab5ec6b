"""Policies: an operator's words on the policy of a running fleet, and what its topic says."""

import getpass
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.table import Table
from rich.text import Text

from tokenfleet.adapters.clock import wall_s
from tokenfleet.adapters.kafka import Kafka
from tokenfleet.adapters.kafka_reading import BEGINNING
from tokenfleet.adapters.policy_file import load_policy, policy_text
from tokenfleet.adapters.topics import POLICY
from tokenfleet.client import calls
from tokenfleet.client.words import moment
from tokenfleet.core.canary import SAMPLES_MIN
from tokenfleet.core.errors import BadRequestError, PolicyError
from tokenfleet.core.policy import policy_hash
from tokenfleet.core.revisions import (
    CANARY_FOR_MAX_S,
    CANARY_KEY,
    FILE_KEY,
    REVISIONS_KEPT,
    ArmFigures,
    PolicyLog,
    PolicyRevision,
    renumbered,
    rollback_to,
    with_pools,
)

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}
READ_MAX_S = 10.0


async def refuse_no_newer(file: Path, gateways: Mapping[str, Sequence[str]]) -> None:
    """Raises PolicyError when the policy in `file` would not come into force."""
    policy, _ = load_policy(str(file))
    in_force = (await calls.sites(next(iter(gateways.values())))).policy_revision
    if policy.revision <= in_force:
        raise PolicyError(f"{file}: revision {policy.revision} is not above {in_force}, which is in force; raise it")


def revision_in(file: Path, *, share: float = 1.0, for_s: float = 0.0) -> PolicyRevision:
    """The policy in `file`, checked, as a record; a canary for a share below 1. Raises PolicyError."""
    policy, digest = load_policy(str(file))
    return PolicyRevision(
        revision=policy.revision,
        toml=policy_text(str(file)),
        sha256=digest,
        by=getpass.getuser(),
        at_wall_s=wall_s(),
        canary_share=share,
        canary_for_s=for_s,
    )


async def publish(bootstrap: str, revision: PolicyRevision) -> PolicyLog:
    """Puts the revision on the topic; what the topic said before it.

    Raises PolicyError for a number that is given out already, before or at the same moment, and for a second canary
    beside an open one.
    """
    async with Kafka(bootstrap, client_id="tokenfleet-cli", wait_max_s=READ_MAX_S) as kafka:
        log = await _read(kafka)
        if revision.revision <= log.greatest:
            raise PolicyError(f"revision {revision.revision} is not above {log.greatest}, which is published; raise it")
        _refuse_second(revision, log)
        if not await _append(kafka, revision):
            raise PolicyError(f"another revision {revision.revision} came at the same moment, and counts; raise it")
    return log


async def publish_next(bootstrap: str, revision: PolicyRevision) -> PolicyRevision:
    """Puts the revision on the topic under the next number after any published, or its own if that is greater.

    Raises PolicyError for a file whose number can't be changed, and for a second canary beside an open one.
    """
    async with Kafka(bootstrap, client_id="tokenfleet-cli", wait_max_s=READ_MAX_S) as kafka:
        while True:
            log = await _read(kafka)
            _refuse_second(revision, log)
            number = max(log.greatest + 1, revision.revision)
            toml = renumbered(revision.toml, number)
            revision = replace(revision, revision=number, toml=toml, sha256=policy_hash(toml))
            if await _append(kafka, revision):
                return revision


def _refuse_second(revision: PolicyRevision, log: PolicyLog) -> None:
    if revision.is_canary and log.canary is not None:
        raise PolicyError(
            f"canary revision {log.canary.revision} is open: wait for its end, or `tokenfleet policy rollback` it"
        )


async def _append(kafka: Kafka, revision: PolicyRevision) -> bool:
    """Whether the number is the revision's alone: somebody may have written at the same moment."""
    await kafka.send(POLICY, "", [revision], key=CANARY_KEY if revision.is_canary else FILE_KEY)
    written = [each for each, _ in (await _read(kafka)).published if each.revision == revision.revision]
    return all(each.sha256 == revision.sha256 for each in written)


async def roll_back(bootstrap: str, *, to: Path | None, reason: str) -> PolicyRevision:
    """Ends the open canary; the revision that does.

    Raises PolicyError when there is none, or when the topic has no file from before it and `to` is not given.
    """
    async with Kafka(bootstrap, client_id="tokenfleet-cli", wait_max_s=READ_MAX_S) as kafka:
        log = await _read(kafka)
        if log.canary is None:
            raise PolicyError("no canary is open; put an older file into force under a higher revision with `apply`")
        if to is None and log.in_force is None:
            raise PolicyError("no file was published before the canary: give the one the fleet started with by --to")
        toml = policy_text(str(to)) if to is not None or log.in_force is None else log.in_force.toml
        by, at_wall_s = getpass.getuser(), wall_s()
        revision = rollback_to(toml, log.canary, by=by, reason=reason or "by hand", at_wall_s=at_wall_s)
        await kafka.send(POLICY, "", [revision], key=FILE_KEY)
    return revision


async def read_log(bootstrap: str) -> PolicyLog:
    """What the policy topic says now."""
    async with Kafka(bootstrap, client_id="tokenfleet-cli", wait_max_s=READ_MAX_S) as kafka:
        return await _read(kafka)


async def _read(kafka: Kafka) -> PolicyLog:
    log = PolicyLog()
    reader = kafka.follower(
        POLICY, "", lambda record: log.hear(record.message, at_s=record.appended_wall_s), start=BEGINNING
    )
    await reader.read_to_end(wait_max_s=READ_MAX_S)
    return log


def share_of(percent: float) -> float:
    """Raises BadRequestError for a percentage that leaves one arm empty."""
    if not 0.0 < percent <= 50.0:
        raise BadRequestError("--canary", f"{percent:g} is not a percentage above 0 and up to 50")
    return percent / 100.0


def duration_s(text: str) -> float:
    """Seconds of `90`, `90s`, `10m`, `2h`. Raises BadRequestError for what no canary may last."""
    number, unit = (text[:-1], text[-1:]) if text[-1:] in UNITS_S else (text, "s")
    try:
        seconds = float(number) * UNITS_S[unit]
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= CANARY_FOR_MAX_S:
        raise BadRequestError("--for", f"{text!r} is not a time above 0 and up to 24h, such as 90s, 10m, 2h")
    return seconds


def check_can_be_undone(file: Path) -> None:
    """Raises PolicyError for a file whose revision can't be changed by machine, which a later rollback to it needs."""
    policy, _ = load_policy(str(file))
    renumbered(policy_text(str(file)), policy.revision + 1)


def check_can_be_steered(file: Path) -> None:
    """Raises PolicyError for a file that has the controller of shares on and in which it could write none."""
    policy, _ = load_policy(str(file))
    terms = policy.slomax.controller
    if not terms.enabled or not terms.classes or terms.pools:  # those in the file are the controller's, or left alone
        return
    try:
        with_pools(policy_text(str(file)), policy.revision + 1, {"any": terms.static()})
    except PolicyError as error:
        raise PolicyError(
            f"{file}: slomax.controller is on and could move nothing, for it adds tables behind the file: "
            f"write [slomax] and [slomax.controller] as tables, not in one line ({error})"
        ) from error


def status_lines(log: PolicyLog, *, now_wall_s: float) -> list[str]:
    """The policy in force and its canary, as the topic tells; how old by the broker's clock and this machine's."""
    if log.in_force is None:
        lines = ["in force: the file each process was started with; no revision is published"]
    else:
        said = f": {log.in_force.reason}" if log.in_force.reason else ""
        lines = [f"in force: revision {log.in_force.revision} by {log.in_force.by or 'unknown'}{said}"]
    if (canary := log.canary) is not None:
        for_s, old_s = canary.canary_for_s, max(0.0, now_wall_s - log.canary_at_s)
        lines.append(
            f"canary: revision {canary.revision} by {canary.by or 'unknown'}, {canary.canary_share:.1%} of requests, "
            f"since {old_s:.0f} s for {for_s:.0f} s"
        )
        if log.report is None or log.report.canary.revision != canary.revision:
            lines.append("not judged yet: the goodput process reports every 5 s; does it run?")
    if log.report is not None:
        lines.append(f"canary revision {log.report.canary.revision} {_verdict(log)}: {log.report.reason}")
    return lines


def history_table(log: PolicyLog) -> Table | None:
    """The last revisions that came into force or on trial, newest first, None if there is none."""
    if not log.published:
        return None
    table = Table(title=f"published, newest first; of {REVISIONS_KEPT} at most, as far as the topic has them")
    for name in ("revision", "at", "came", "by", "why"):
        table.add_column(name, justify="right" if name == "revision" else "left", no_wrap=name != "why")
    for revision, at_s in reversed(log.published):
        came = "into force"
        if revision.is_canary:
            came = f"on trial, {revision.canary_share:.1%} for {revision.canary_for_s:.0f} s"
        table.add_row(str(revision.revision), moment(at_s), came, Text(revision.by), Text(revision.reason))
    return table


def arms_table(log: PolicyLog) -> Table | None:
    """Both arms of the last trial side by side, None if none was judged."""
    if (report := log.report) is None:
        return None
    table = Table(title=f"after {report.elapsed_s:.0f} s of {report.for_s:.0f} s, at least {SAMPLES_MIN} requests each")
    table.add_column("")
    for name, arm in (("in force", report.base), ("canary", report.canary)):
        table.add_column(f"{name}, revision {arm.revision}", justify="right")
    arms = (report.base, report.canary)
    table.add_row("requests ended or overdue", *(f"{arm.requests:,}" for arm in arms))
    table.add_row("still open, too late", *(_share(arm.open, arm.requests) for arm in arms))
    table.add_row("failed", *(_share(arm.failed, arm.requests) for arm in arms))
    for name in sorted({name for arm in arms for name in arm.classes}):
        table.add_row(f"{name} within level", *(_attained(arm, name) for arm in arms))
    table.add_row("TTFT p50", *(_ms(arm.ttft_p50_s) for arm in arms))
    table.add_row("TTFT p95", *(_ms(arm.ttft_p95_s) for arm in arms))
    return table


def _verdict(log: PolicyLog) -> str:
    """What became of the reported trial: its judge's word, or that somebody else ended it."""
    assert log.report is not None
    if log.report.verdict != "running":
        return log.report.verdict.replace("_", " ")
    is_open = log.canary is not None and log.canary.revision == log.report.canary.revision
    return "running" if is_open else "ended by another revision"


def _attained(arm: ArmFigures, name: str) -> str:
    share = arm.classes.get(name)
    return "-" if share is None else _share(share.met, share.offered)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} of {whole:,}" if whole else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.0f} ms"
