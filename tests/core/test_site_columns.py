"""Columns: whatever a site hears, the arrays that decisions compute on tell what the instances one by one tell."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import digest, keys, stored
from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.columns import Columns, columns_of
from tokenfleet.core.decision import Decision
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.pool import PoolView
from tokenfleet.core.site import Heard
from tokenfleet.core.tokenpilot.cost import weigh

NUMBERS = [
    "age_s", "backlog_s", "behind_s", "queued", "queued_tokens", "decoding", "open", "context_tokens", "kv_held",
    "kv_room", "p_hit",
]  # fmt: skip
FIXED = [
    "availability",
    "barred",
    "kv_total",
    "context_max",
    "share",
    "surcharge",
    "least_kv_total",
    "least_context_max",
]
NAMES = [f"b-small-{n}" for n in range(4)]
BLOCKS = keys(1, 2, 3, 4)

steps = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([0.05, 0.5, 3.0, 12.0, 70.0])),
    st.tuples(st.just("place"), st.integers(100, 9000)),
    st.tuples(st.sampled_from(["first_token", "finished", "failed", "timed_out"]), st.integers(0, 9)),
    st.tuples(st.just("telemetry"), st.sampled_from([0.1, 5.0, 11.0])),
    st.tuples(st.just("running"), st.integers(0, 9)),
    st.tuples(st.just("refused"), st.booleans()),
    st.tuples(st.just("scrape_failed"), st.sampled_from([0.0, 20.0])),
    st.tuples(st.just("drain"), st.sampled_from(["draining", "ready", "quarantined"])),
    st.tuples(st.just("store"), st.integers(1, 4)),
    st.tuples(st.just("leave"), st.integers(0, 3)),
    st.tuples(st.just("reboot"), st.integers(0, 3)),
)


@settings(max_examples=150, deadline=None)
@given(walk=st.lists(st.tuples(steps, st.sampled_from(NAMES)), max_size=25))
def test_columns_and_views_tell_the_same(walk: list[tuple[tuple[str, Any], str]]) -> None:
    b = Town("b", small=4, large=1)
    request = asked("r", prompt_tokens=2000, block_keys=BLOCKS, block_tokens=256)
    placed: list[Decision] = []
    stores = dict.fromkeys(NAMES, 0)
    agree(b.site.pool("small-chat", b.now_s, request))
    for (act, how), name in walk:
        match act:
            case "wait":
                b.now_s += how
                b.site.advance(0, b.now_s, live=True)
            case "place":
                decision = b.place(asked(f"r{len(placed)}", prompt_tokens=how), steps=ROUTE)
                placed += [decision] if decision.verdict == "admit" else []
            case "telemetry":
                b.hears_telemetry(agent_silent_s=how)
            case "running":
                b.changes(name, running=float(how), kv_used_blocks=how * 50.0)
                b.hears_telemetry()
            case "refused":
                b.changes(name, refused=how)
                b.hears_telemetry()
            case "scrape_failed":
                b.changes(name, scrape_failed_for_s=how)
                b.hears_telemetry()
            case "drain":
                b.hears_control(name, how)
            case "store":
                stores[name] += 1
                b.site.heard(stored(name, [how], n=stores[name], model="small-chat"), Heard(now_s=b.now_s))
                b.changes(name, digest=digest([how], block_tokens=256))
            case "leave":
                b.beats = [beat for beat in b.beats if beat.instance != NAMES[how]]
                b.hears_telemetry()
            case "reboot":
                b.changes(NAMES[how], boot=f"boot-{b.now_s}", address="127.0.0.1:9999")
                b.hears_telemetry()
            case _:
                if placed:
                    b.hears_outcome(placed[how % len(placed)], act)
        agree(b.site.pool("small-chat", b.now_s, request))


def agree(pool: PoolView) -> None:
    told, expected = pool.columns, columns_of(pool.instances)
    assert told.labels.names == expected.labels.names
    assert told.labels.addresses == expected.labels.addresses
    for name in NUMBERS:
        np.testing.assert_allclose(getattr(told, name), getattr(expected, name), rtol=1e-9, atol=1e-9, err_msg=name)
    for name in FIXED:
        _same(getattr(told.fixed, name), getattr(expected.fixed, name), name)
    _same(told.probe, expected.probe, "probe")
    _same(told.hits if told.hits is not None and told.hits.any() else None, expected.hits, "hits")
    assert told.kv_state.tolist() == expected.kv_state.tolist()
    assert (told.aged, told.unsure, told.whole) == (expected.aged, expected.unsure, expected.whole)
    alive = [i.availability != "out" for i in pool.instances]  # who is out is no candidate, suspect or not
    suspects = [np.zeros(len(told), np.bool_) if c.suspect is None else c.suspect for c in (told, expected)]
    assert suspects[0][alive].tolist() == suspects[1][alive].tolist()
    assert _by_class(told) == _by_class(expected)
    if len(told):  # what is kept from one request to the next is what it would be anew
        anew = replace(pool, columns=expected)
        costs = [weigh(2000, view, TokenPilotPolicy(), None, output_q50=100.0).terms for view in (pool, anew)]
        np.testing.assert_allclose(*costs, rtol=1e-9, atol=1e-9)


def _same(told: Any, expected: Any, name: str) -> None:
    if told is None or expected is None:
        assert told is expected, name
    else:
        np.testing.assert_allclose(told, expected, rtol=1e-9, atol=1e-9, err_msg=name)


def _by_class(columns: Columns) -> list[dict[str, list[float]]]:
    told = columns.classes, columns.classes_queued, columns.classes_kv
    return [{name: each.tolist() for name, each in of.items() if each.any()} for of in told]
