"""What if: the same question on the same table, with one thing otherwise; nothing is left of it."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.builders import snapshot
from tests.core.fleets import POLICY, Town, asked
from tokenfleet.core.asked import ROUTE
from tokenfleet.core.decision import Candidate
from tokenfleet.core.errors import BadRequestError, UnknownModelError
from tokenfleet.core.policy import TokenPilotPolicy
from tokenfleet.core.site import Heard
from tokenfleet.core.tokenpilot.whatif import ADDED_MAX, FACTORS, Added, Changes, WhatIf, what_if

KEY = (7).to_bytes(8, "little")


def town(*, waiting: int = 0) -> Town:
    """b-small-0 holds the prefix KEY and `waiting` prompts; 1 and 2 are idle and cold."""
    known = Town("b", small=3)
    known.site.heard(snapshot("b-small-0", [7]), Heard(now_s=known.now_s))
    for n in range(waiting):
        known.place(asked(f"w{n}", prompt_tokens=30_000, block_keys=KEY, block_tokens=29_000), steps=ROUTE)
    return known


def warm(request_id: str = "r", **facts: Any) -> Any:
    return asked(request_id, prompt_tokens=8_000, block_keys=KEY, block_tokens=7_000, **facts)


def told(here: Town, request: Any = None, **changes: Any) -> WhatIf:
    return what_if(here.site, request or warm(), Changes(**changes), now_s=here.now_s)


def costs_of(candidates: Sequence[Candidate]) -> dict[str, float]:
    return {each.instance: each.cost_s for each in candidates}


@pytest.mark.parametrize("waiting", [0, 3])
def test_what_is_now_is_what_route_would_answer_and_no_change_changes_nothing(waiting: int) -> None:
    here = town(waiting=waiting)
    for n in range(20):
        request = warm(f"r{n}") if n % 2 else asked(f"r{n}", prompt_tokens=3_000, max_tokens=2**31 - 1)
        answer = told(here, request)
        decision = here.decide(request, steps=ROUTE).decision
        assert costs_of(answer.present.candidates) == pytest.approx(costs_of(decision.candidates))
        assert (answer.present.target, answer.present.sentence) == (decision.target, decision.sentence)
        assert answer.changed == answer.present
        assert (answer.tables, answer.pool, answer.changes) == (here.site.versions(), "small-chat@b", ())


def test_a_question_leaves_no_trace() -> None:
    here = town(waiting=2)
    before = (len(here.site.ledger), here.site.policy, here.site.pool("small-chat", here.now_s).instances)
    told(here, drained=("b-small-0",), weights={"reuse_max": 0.0}, added=(Added(like="b-small-1", count=5),))
    assert before == (len(here.site.ledger), here.site.policy, here.site.pool("small-chat", here.now_s).instances)


@pytest.mark.parametrize(("change", "filter_name"), [("drained", "draining"), ("removed", "")])
def test_without_the_warm_instance_another_serves(change: str, filter_name: str) -> None:
    answer = told(town(), **{change: ("b-small-0",)})
    assert answer.present.target == "b-small-0"
    assert answer.changed.target in ("b-small-1", "b-small-2")
    assert answer.changed.excluded == ({filter_name: 1} if filter_name else {})
    assert answer.changed.considered == (3 if filter_name else 2)
    assert answer.changes == (f"{change}: b-small-0",)


def test_without_any_instance_it_is_refused_with_the_reason() -> None:
    everyone = ("b-small-0", "b-small-1", "b-small-2")
    assert told(town(), removed=everyone).changed.reason == "no_instances"
    assert told(town(), drained=everyone).changed.excluded == {"draining": 3}


def test_an_added_instance_is_idle_cold_and_of_the_same_make() -> None:
    here = town()
    for n in range(30):
        here.place(asked(f"w{n}", prompt_tokens=30_000), steps=ROUTE)
    answer = told(here, asked("r", prompt_tokens=3_000), added=(Added(like="b-small-0", count=2),))
    assert answer.changed.target in ("b-small-0+1", "b-small-0+2")
    added = answer.changed.candidates[0]
    assert (added.wait_s, added.hit_tokens, answer.changed.considered) == (0.0, 0, 5)
    assert added.work_s == pytest.approx(answer.present.candidates[0].work_s, rel=0.2)
    assert answer.changes == ("added: 2 like b-small-0",)


def test_weights_weigh_as_they_would_in_force() -> None:
    here = town(waiting=3)
    changed = {"reuse_base": 0.0, "reuse_slope_per_s": 0.0, "candidates_kept": 2.0}
    answer = told(here, weights=changed)
    kept = replace(TokenPilotPolicy(), reuse_base=0.0, reuse_slope_per_s=0.0, candidates_kept=2)
    here.site.adopt(replace(POLICY, tokenpilot=kept))
    in_force = here.decide(warm(), steps=ROUTE).decision
    assert costs_of(answer.changed.candidates) == pytest.approx(costs_of(in_force.candidates))
    assert answer.present.target == "b-small-0"
    assert answer.changed.target != "b-small-0"  # reuse without a price isn't worth the queue
    assert answer.changes[0] == "reuse_base 0.5 → 0"


def test_factors_change_what_was_learned_and_chances_stay_chances() -> None:
    here = town()
    slow = told(here, asked("r", prompt_tokens=3_000), calibration={"a_s": 2.0})
    assert slow.changed.candidates[0].work_s > 1.5 * slow.present.candidates[0].work_s
    unsure = told(here, calibration={"p_hit": 0.5})
    assert unsure.changed.candidates[0].p_hit == pytest.approx(0.5 * unsure.present.candidates[0].p_hit)
    sure = told(here, calibration={"p_hit": 9.0})
    assert sure.changed.candidates[0].p_hit == 1.0
    for name in FACTORS:
        assert told(here, calibration={name: 1.5}).changes


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"weights": {"nonsense": 1.0}}, "weights", "no weight 'nonsense'; there is: candidates_kept"),
        ({"weights": {"reuse_max": -1.0}}, "weights", "reuse_max can't be -1"),
        ({"weights": {"reuse_max": float("nan")}}, "weights", "it is no number"),
        ({"weights": {"candidates_kept": 1.5}}, "weights", "candidates_kept can't be 1.5"),
        ({"weights": {"candidates_kept": 1e300}}, "weights", "candidates_kept can't be"),
        ({"drained": ("x",)}, "drained", "there is: b-small-0, b-small-1, b-small-2"),
        ({"removed": ("x",)}, "removed", "no instance 'x' serves this model here"),
        ({"added": (Added(like="x"),)}, "added", "no instance 'x'"),
        ({"added": (Added(like="b-small-0", count=ADDED_MAX + 1),)}, "added", "1,001 instances, at most 1,000"),
        ({"calibration": {"nonsense": 1.0}}, "calibration", "nothing learned is named 'nonsense'; there is: a_s"),
        ({"calibration": {"a_s": float("inf")}}, "calibration", "inf is not a factor"),
    ],
)
def test_a_change_that_can_not_be_made_is_told_with_the_list(changes: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        told(town(), **changes)
    assert caught.value.field == field
    assert words in str(caught.value)


def test_a_model_that_there_is_not_is_told_as_always() -> None:
    with pytest.raises(UnknownModelError):
        told(town(), asked("r", model="gpt-9"))


def test_an_answer_is_a_record() -> None:
    answer = told(town(), weights={"reuse_max": 1.0})
    assert msgspec.json.decode(msgspec.json.encode(answer), type=WhatIf) == answer


def test_round_robin_s_turn_is_the_one_that_route_would_take() -> None:
    here = town()
    here.site.adopt(replace(here.site.policy, tokenpilot=replace(here.site.policy.tokenpilot, rule="round_robin")))
    for n in range(5):
        assert told(here, asked(f"r{n}")).present.target == here.place(asked(f"r{n}"), steps=ROUTE).target
