"""The kernel: arrays over all instances give what one instance at a time gives."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.brute_force import removed_by, scale_of, soften, trusted, weigh
from tests.core.pools import POLICY, instance, pool, request, route
from tokenfleet.core.decision import Request
from tokenfleet.core.pool import PoolView
from tokenfleet.core.tokenpilot.filters import ask_of
from tokenfleet.core.tokenpilot.routing import Routing

TERMS = [
    "cost_s", "ttft_s", "wait_s", "work_s", "bias_s", "margin_s", "reuse_s", "kv_s", "decode_s", "weight_s",
    "hit_tokens", "uncached_tokens", "p_hit", "saved_s", "age_s", "suspect", "kv_use", "filtered",
]  # fmt: skip


def facts() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "backlog_s": st.none() | st.floats(0.0, 9.0),
            "behind_s": st.floats(0.0, 9.0),
            "queued": st.integers(0, 30),
            "decoding": st.integers(0, 240),
            "context_tokens": st.none() | st.floats(0.0, 9e5),
            "kv_held_tokens": st.none() | st.floats(0.0, 1.1e6),
            "kv_total_tokens": st.sampled_from([None, 0.0, 3e4, 1e6, 1.2e6]),
            "context_max_tokens": st.sampled_from([0, 8192, 131_072, 262_144]),
            "hit_tokens": st.integers(0, 40_000),
            "p_hit": st.floats(0.0, 1.0),
            "age_s": st.none() | st.floats(0.0, 12.0),
            "weight": st.sampled_from([1.0, 1.0, 1.0, 0.0, 0.5, 3.0]),
            "availability": st.sampled_from(["ready", "ready", "ready", "ready", "draining", "out", "starting"]),
            "suspect": st.booleans(),
            "probe": st.booleans(),
            "foreign": st.floats(0.0, 5.0),
            "model_digest": st.sampled_from(["large-chat@2026-09", "large-chat@2026-03", "other"]),
            "class_running": st.dictionaries(st.sampled_from(["chat", "long"]), st.integers(0, 80)),
            "kv_state": st.sampled_from(["exact", "approx", "none"]),
        }
    )


def one_by_one(view: PoolView, asked: Request, *, last_instance: str = "") -> Routing:
    """The routing's evidence by brute force; `target` is the cheapest that is left."""
    ask = ask_of(
        asked, view, POLICY, request_class="chat", output_q90=640.0, network_s=0.0, last_instance=last_instance
    )
    named = [(each, removed_by(each, ask)) for each in view.instances]
    able = [each for each, name in named if not name]
    excluded: dict[str, int] = {}
    for _, name in named:
        if name:
            excluded[name] = excluded.get(name, 0) + 1
    if not able:
        return Routing(excluded=excluded, considered=len(named))
    scale = scale_of(asked, view, POLICY, able, output_q50=256.0)
    weighed = [(each, weigh(each, scale)) for each in able]
    left, removed, relaxed = soften(weighed, ask)
    for name in removed.values():
        excluded[name] = excluded.get(name, 0) + 1
    best = min(left, key=lambda pair: (pair[1].cost_s, pair[0].instance))
    return Routing(
        target=best[0].instance,
        considered=len(named),
        excluded=excluded,
        relaxed=relaxed,
        candidates=tuple(replace(c, filtered=removed.get(c.instance, "")) for _, c in weighed),
        suspect_only=not any(trusted(each) for each in able),
    )


@settings(max_examples=300)
@given(
    facts=st.lists(facts(), min_size=1, max_size=12),
    prompt=st.integers(0, 140_000),
    bias_s=st.floats(-1.0, 1.0),
    last=st.sampled_from(["", "b-00", "b-01"]),
)
def test_arrays_and_brute_force_agree(facts: list[dict[str, Any]], prompt: int, bias_s: float, last: str) -> None:
    view = pool(*[instance(f"b-{n:02d}", **each) for n, each in enumerate(facts)], bias_s=bias_s, margin_queued=0.6)
    agrees(view, request(prompt), last=last)


@pytest.mark.parametrize("size", [513, 1000, 1300])
def test_they_agree_on_pools_too_large_to_sort(size: int) -> None:
    view = pool(*[instance(f"b-{n:04d}", backlog_s=(n * 7919 % size) / size, queued=n % 3) for n in range(size)])
    agrees(view, request(9000), last="")


def agrees(view: PoolView, asked: Request, *, last: str) -> None:
    fast, slow = route(view, asked, last_instance=last), one_by_one(view, asked, last_instance=last)
    assert (fast.excluded, fast.considered, fast.relaxed) == (slow.excluded, slow.considered, slow.relaxed)
    assert fast.suspect_only == slow.suspect_only
    assert bool(fast.target) == bool(slow.target)
    if fast.how == "least_cost":
        assert fast.target == slow.target
    known = {candidate.instance: candidate for candidate in slow.candidates}
    for candidate in fast.candidates:
        for term in TERMS:
            told = getattr(candidate, term)
            expected = getattr(known[candidate.instance], term)
            assert told == (
                pytest.approx(expected, rel=1e-9, abs=1e-12) if isinstance(expected, float) else expected
            ), term
    if not fast.target:
        return
    target, *others = (candidate.cost_s for candidate in fast.candidates)
    rest = sorted(candidate.cost_s for candidate in slow.candidates if candidate.instance != fast.target)
    assert others == pytest.approx(rest[: len(others)])
    assert len(others) == min(len(rest), POLICY.tokenpilot.candidates_kept - 1)
    if fast.how == "least_cost":
        assert target == pytest.approx(min(c.cost_s for c in slow.candidates if not c.filtered))
