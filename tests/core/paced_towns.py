"""Paced towns: a site whose classes share a pool and wait apart, asked and released in one line."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE, Decided, Ids, Steps
from tokenfleet.core.decision import Decision
from tokenfleet.core.policy import PacingPolicy
from tokenfleet.core.schedule import released
from tokenfleet.sim.mixed.service_levels import QUEUES

NUMBERS = count(1_000)
PACED = PacingPolicy(enabled=True)


def town(*, small: int, pacing: PacingPolicy = PACED, **limits: int) -> Town:
    """A site whose classes share the pool of the small model; `limits` are of chat requests on an instance."""
    b = Town("b", small=small)
    policy = b.site.policy
    classes = {name: replace(terms, queue=QUEUES[name]) for name, terms in policy.classes.items()}
    classes["chat"] = replace(classes["chat"], **limits)
    b.site.adopt(replace(policy, classes=classes, slomax=replace(policy.slomax, pacing=pacing)))
    return b


def ask(
    b: Town, name: str, request_class: str = "chat", prompt_tokens: int = 1000, *, steps: Steps = ROUTE, **facts: Any
) -> Decision:
    """A request of that class that its gateway can hold for ten minutes."""
    known: dict[str, Any] = {"wait_max_s": 600.0, "declared_class": request_class}
    return b.place(asked(name, prompt_tokens=prompt_tokens, **(known | facts)), steps=steps)


def release(b: Town) -> Iterator[Decision]:
    """What goes out now, each counted before the next."""
    ids = (Ids(decision=f"b-{number}", now_wall_s=1.8e9) for number in NUMBERS)
    for waiting, decided in released(b.site, "small-chat", b.now_s, lambda: next(ids)):
        assert isinstance(decided, Decided)
        if decided.placement is not None:
            b.site.placed(decided.placement, partition=0, session="", now_s=b.now_s)
        assert waiting.request.id == decided.decision.request
        yield decided.decision


def answers(b: Town) -> list[tuple[str, str]]:
    return [(decision.request, decision.verdict) for decision in release(b)]


def decodes(b: Town, name: str, request_class: str = "chat", **facts: Any) -> Decision:
    """A request that has its first token."""
    decision = ask(b, name, request_class, **facts)
    assert decision.verdict == "admit"
    b.hears_outcome(decision, "first_token", ttft_s=0.1)
    return decision


def ticks(b: Town, iterations: int, *, over_s: float) -> None:
    """The engines take so many iterations in that time, told by two heartbeats."""
    b.hears_telemetry(iterations_total=1_000)
    b.now_s += over_s
    b.hears_telemetry(iterations_total=1_000 + iterations)
