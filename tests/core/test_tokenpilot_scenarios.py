"""TokenPilot's stories: what it answers in situations a reader can picture."""

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from tests.core.pools import POLICY, instance, pool, request
from tests.transcripts import Command, answer, pairs, replay
from tokenfleet.core.tokenpilot.choose import choose
from tokenfleet.core.view import InstanceView

SCENARIOS = Path(__file__).parent.parent / "scenarios"
FIELDS = {field.name: field.type for field in msgspec.structs.fields(InstanceView)}


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("tokenpilot_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    replay(path, {"choose": _choose})


def test_a_transcript_with_another_answer_is_told_apart() -> None:
    said = "choose prompt=100\n----\nb-0\n"
    assert answer(said, {"choose": _choose}) != said


def _choose(command: Command) -> str:
    """The sentence, then what was removed and lifted."""
    model = command.args.get("model", "large-chat")
    routing = choose(
        request(int(command.args["prompt"]), model=model),
        pool(*[_instance(line) for line in command.lines]),
        POLICY,
        request_class="chat",
        output_q50=256.0,
        output_q90=640.0,
        rng=Random(7),
        last_instance=command.args.get("last", ""),
    )
    said = [routing.sentence]
    if routing.target and routing.excluded:
        said.append("removed: " + ", ".join(f"{n} {name}" for name, n in routing.excluded.items()))
    if routing.relaxed:
        said.append("lifted: " + ", ".join(routing.relaxed))
    return "\n".join(said)


def _instance(line: str) -> InstanceView:
    name, *words = line.split()
    facts: dict[str, Any] = {}
    for key, value in pairs(words).items():
        if key == "running":
            facts["class_running"] = {"chat": int(value)}
        else:
            facts[key] = None if value == "none" else msgspec.convert(value, FIELDS[key], strict=False)
    return instance(name, **facts)
