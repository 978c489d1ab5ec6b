"""SLOMax's stories: classes, verdicts and reasons in situations a reader can picture."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.core.pools import POLICY, instance, pool, request
from tests.transcripts import Command, answer, pairs, replay
from tokenfleet.core.decision import Request
from tokenfleet.core.policy import Tenant
from tokenfleet.core.slomax.admit import admit
from tokenfleet.core.slomax.classify import classify
from tokenfleet.core.slomax.quota import Quotas
from tokenfleet.core.view import InstanceView

SCENARIOS = Path(__file__).parent.parent / "scenarios"
ASKED = {field.name: field.type for field in msgspec.structs.fields(Request)}
SEEN = {field.name: field.type for field in msgspec.structs.fields(InstanceView)}
CLASSES = tuple(POLICY.classes)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("slomax_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    quotas = Quotas()
    replay(path, {"admit": lambda command: _admit(command, quotas)})


def test_a_transcript_with_another_answer_is_told_apart() -> None:
    said = "admit prompt=100\nb-0\n----\nreject\n"
    assert answer(said, {"admit": lambda command: _admit(command, Quotas())}) != said


def _admit(command: Command, quotas: Quotas) -> str:
    """Class and rule, verdict with reason and hints, detail. `per_minute`, `may_use` are terms of the tenant."""
    args = dict(command.args)
    terms = Tenant(
        requests_per_minute_max=int(args.pop("per_minute", "0")),
        classes=tuple(name for name in args.pop("may_use", "").split(",") if name),
    )
    policy = replace(POLICY, tenants={**POLICY.tenants, "acme": terms})
    now_s, prompt = float(args.pop("at", "0")), int(args.pop("prompt"))
    asked = request(prompt, **{k: msgspec.convert(v, ASKED[k], strict=False) for k, v in args.items()})
    view = pool(*[_instance(line) for line in command.lines])
    classified = classify(asked, view, policy, output_q90_tokens=640.0)
    charge = quotas.charge("acme", terms, running=0, now_s=now_s)
    ruling = admit(
        asked,
        classified,
        view,
        policy,
        charge=charge,
        output_q50_tokens=256.0,
        output_q90_tokens=640.0,
        rng=Random(7),
    )
    if ruling.verdict != "admit":
        quotas.refund(charge)
    said = f"{ruling.verdict} {ruling.reason}".strip()
    if ruling.admission.bound:
        said += f", {ruling.admission.running} of {ruling.admission.bound} running"
    if ruling.admission.retry_after_s is not None:
        said += f", again in {ruling.admission.retry_after_s:.1f} s"
    if ruling.admission.not_before_s is not None:
        said += f", not before {ruling.admission.not_before_s:.0f} s"
    lines = [f"{classified.request_class}: {classified.rule}", said, ruling.detail]
    return "\n".join(line for line in lines if line)


def _instance(line: str) -> InstanceView:
    """`name field=value …`; a class's name stands for its running requests."""
    name, *words = line.split()
    given = pairs(words)
    running = {key: int(given.pop(key)) for key in CLASSES if key in given}
    facts: dict[str, Any] = {key: msgspec.convert(value, SEEN[key], strict=False) for key, value in given.items()}
    return instance(name, class_running=running, **facts)
