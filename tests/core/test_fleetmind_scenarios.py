"""FleetMind's stories: where requests go from A (ingress only) and B, and why not elsewhere."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.core.pools import request
from tests.core.sites import peer, pool_summary, send_to_site
from tests.transcripts import Command, answer, pairs, replay
from tokenfleet.core.decision import Request
from tokenfleet.core.records import PoolSummary
from tokenfleet.core.view import PeerView

SCENARIOS = Path(__file__).parent.parent / "scenarios"
ASKED = {field.name: field.type for field in msgspec.structs.fields(Request)}
SEEN = {field.name: field.type for field in msgspec.structs.fields(PeerView)}
TOLD = {field.name: field.type for field in msgspec.structs.fields(PoolSummary)}


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("fleetmind_*.txt")), ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    replay(path, {"dispatch": _dispatch})


def test_a_transcript_with_another_answer_is_told_apart() -> None:
    said = "dispatch home=b prompt=100\nb\n----\nb stays\n"
    assert answer(said, {"dispatch": _dispatch}) != said


def _dispatch(command: Command) -> str:
    """The sentence; for a refusal its reason; a line for each site: cost, first token, or why not."""
    args = dict(command.args)
    home, prompt, name = args.pop("home"), int(args.pop("prompt")), args.pop("class", "chat")
    facts: dict[str, Any] = {"origin": home, **{k: _asked(k, v) for k, v in args.items()}}
    asked = request(prompt, **facts)
    found = send_to_site([_site(line) for line in command.lines], asked, home=home, request_class=name)
    said = [found.sentence] if found.site else [f"{found.reason}: {found.sentence}"]
    if found.retry_after_s is not None:
        said.append(f"again in {found.retry_after_s:.1f} s")
    for option in found.options if found.site else ():
        if option.cost is None:
            said.append(f"  {option.site}  {option.refused}")
        else:
            parts = f"network {option.network_s:.3f} wait {option.wait_s:.3f} work {option.work_s:.3f}"
            said.append(f"  {option.site}  {option.cost:.6f}  first token {option.ttft_s:.3f} s ({parts})")
    return "\n".join(said)


def _asked(key: str, value: str) -> Any:
    return tuple(value.split(",")) if key == "sites_tried" else msgspec.convert(value, ASKED[key], strict=False)


def _site(line: str) -> PeerView:
    """`name field=value …` of the site and its pool; `wait` is the same for all instances; `empty` has no pool."""
    name, *words = line.split()
    given = pairs(words)
    about_site = {k: msgspec.convert(given.pop(k), SEEN[k], strict=False) for k in SEEN if k in given}
    if "empty" in given:
        return peer(name, **about_site)
    ready, wait_s = int(given.pop("ready", "2")), float(given.pop("wait", "0"))
    kv_used = float(given.pop("kv_used", "0"))
    facts: dict[str, Any] = {k: msgspec.convert(v, TOLD[k], strict=False) for k, v in given.items()}
    pool = pool_summary(name, ready=ready, kv_used=kv_used, **{"waits_s": (wait_s,) * ready, **facts})
    return peer(name, pool, **{"age_s": 0.0, **about_site})
