"""Site and caches: an instance gets credit for the blocks that it holds, as long as nothing contradicts it."""

from collections.abc import Sequence
from typing import Any

from tests.builders import digest, keys, stored
from tests.core.fleets import Town, asked
from tokenfleet.core.records import KvDelta
from tokenfleet.core.site import Heard


def warm(b: Town, instance: str, values: Sequence[int], *, n: int = 1, **facts: Any) -> None:
    """The instance stores blocks and its heartbeat confirms them."""
    tell(b, stored(instance, values, n=n, model="small-chat", **facts))
    b.changes(instance, digest=digest(values, block_tokens=facts.get("block_tokens", 256)))
    b.hears_telemetry()


def tell(b: Town, record: KvDelta) -> None:
    b.site.heard(record, Heard(now_s=b.now_s))


def credit(b: Town, values: Sequence[int], *, block_tokens: int = 256) -> dict[str, int]:
    """Cached tokens that a request for these blocks is credited with, by instance."""
    request = asked(
        "r1", prompt_tokens=block_tokens * len(values) + 10, block_keys=keys(*values), block_tokens=block_tokens
    )
    pool = b.site.pool("small-chat", b.now_s, request)
    return {view.instance: view.hit_tokens for view in pool.instances if view.hit_tokens}


def test_a_warm_instance_is_chosen_and_the_decision_says_what_it_saves() -> None:
    b = Town("b", small=3)
    warm(b, "b-small-1", range(1, 21))
    request = asked("r1", prompt_tokens=5200, block_keys=keys(*range(1, 21)), block_tokens=256)
    decision = b.decide(request).decision
    assert (decision.target, decision.hit_tokens) == ("b-small-1", 5120)
    assert decision.candidates[0].saved_s > 0.0


def test_an_engine_that_returns_with_another_block_size_is_matched_beside_those_of_the_old_one() -> None:
    b = Town("b", small=2)
    for n in range(2):
        warm(b, f"b-small-{n}", [1, 2])
    assert credit(b, [1, 2]) == {"b-small-0": 512, "b-small-1": 512}
    leaver = b.beats.pop(0)
    b.hears_telemetry()
    assert credit(b, [1, 2]) == {"b-small-1": 512}
    b.beats.insert(0, leaver)
    b.changes("b-small-0", boot="boot-2", block_size=64, digest=digest([11], block_tokens=512))
    tell(b, stored("b-small-0", [11], n=1, claim=1, boot="boot-2", model="small-chat", block_tokens=512))
    b.hears_telemetry()
    assert credit(b, [1, 2]) == {"b-small-1": 512}
    assert credit(b, [11], block_tokens=512) == {"b-small-0": 512}
    assert b.decide(asked("r1")).decision.verdict == "admit"
    views = {view.instance: view.kv_total_tokens for view in b.site.pool("small-chat", b.now_s).instances}
    assert views == {"b-small-0": 8000 * 64, "b-small-1": 8000 * 32}


def test_an_instance_that_is_gone_leaves_no_blocks_behind() -> None:
    b = Town("b", small=2)
    warm(b, "b-small-0", [1, 2])
    del b.beats[0]
    b.hears_telemetry()
    assert credit(b, [1, 2]) == {}
    assert b.site.prefix.blocks("b-small-0") == 0
