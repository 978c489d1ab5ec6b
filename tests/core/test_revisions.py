"""Revisions: which policy decides which request, and that a canary begins and ends the same everywhere."""

from importlib.resources import files
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.fleets import Town, asked
from tokenfleet.core.asked import ROUTE, Ids
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.policy import parse_policy
from tokenfleet.core.revisions import (
    MARGIN_S,
    CanaryReport,
    PolicyLog,
    PolicyRevision,
    falls_to_canary,
    promotion_of,
    renumbered,
    rollback_to,
)
from tokenfleet.core.schedule import released
from tokenfleet.core.site import Heard

SHIPPED = (files("tokenfleet.core") / "default_policy.toml").read_text()
BY: dict[str, Any] = {"by": "a test", "reason": "of a test", "at_wall_s": 1.8e9}


def text(number: int, *tables: str) -> str:
    return "\n".join([SHIPPED.replace("revision = 1", f"revision = {number}", 1), *tables])


def canary(number: int = 2, *tables: str, share: float = 0.25, for_s: float = 600.0) -> PolicyRevision:
    return PolicyRevision(
        revision=number, toml=text(number, *tables), sha256=f"{number:x}" * 64, canary_share=share, canary_for_s=for_s
    )


def revisions(town: Town, count: int = 200) -> list[int]:
    """The revision that decides each of `count` requests now."""
    return [town.decide(asked(f"r{n}", dry_run=True)).decision.policy_revision for n in range(count)]


def hears(town: Town, record: PolicyRevision, *, age_s: float = 0.0) -> None:
    town.site.heard(record, Heard(now_s=town.now_s, live=not age_s, age_s=age_s))


def test_a_canary_decides_its_share_the_same_at_every_replica_site_and_attempt() -> None:
    b, other, a = Town("b", small=2), Town("b", small=2), Town("a")
    a.hears_summary_of(b)
    for town in (a, b, other):
        hears(town, canary())
    decided = revisions(b)
    assert decided == revisions(other)
    assert 30 <= decided.count(2) <= 70
    for n in range(40):
        sent = a.decide(asked(f"r{n}", origin="a")).decision
        taken = b.decide(asked(f"r{n}", origin="a", hop=1, attempt=1)).decision
        assert (sent.verdict, sent.policy_revision, taken.policy_revision) == ("redirect", decided[n], decided[n])


def test_one_policy_decides_throughout_and_is_named_with_its_outcome() -> None:
    b = Town("b", small=2)
    hears(b, canary(2, "[tokenpilot]\nmargin_weight = 0.0\ncandidates_kept = 1", share=0.5))
    for n in range(40):
        decided = b.decide(asked(f"r{n}"))
        decision = b.place(asked(f"r{n}"))
        tried = decision.policy_revision == 2
        assert (len(decision.candidates) == 1) is tried
        assert (decision.candidates[0].margin_s == 0.0) is tried
        assert (decision.tables["policy"] == "2" * 12) is tried
        assert decided.placement is not None
        assert decided.placement.entry is not None
        assert decided.placement.entry.policy_revision == decision.policy_revision
        assert b.hears_outcome(decision, "finished").policy_revision == decision.policy_revision


def test_a_canary_of_a_model_s_coefficients_predicts_with_them() -> None:
    b = Town("b", small=1)
    slow = replace(canary(share=0.5), toml=text(2).replace("a_s = 4.0e-5", "a_s = 4.0e-3", 1))
    hears(b, slow)
    work_s: dict[int, set[float]] = {1: set(), 2: set()}
    for n in range(40):
        decision = b.decide(asked(f"r{n}", dry_run=True)).decision
        work_s[decision.policy_revision].add(decision.candidates[0].work_s)
    assert min(work_s[2]) > 10 * max(work_s[1])


def test_a_refusal_names_the_revision_that_refused() -> None:
    b = Town("b")
    hears(b, canary(share=0.5))
    outcomes = [b.decide(asked(f"r{n}"), steps=ROUTE).outcome for n in range(40)]
    assert {outcome.policy_revision for outcome in outcomes if outcome is not None} == {1, 2}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[tenants.globex]", "[tenants.initech]", "tenants lack 'globex'"),
        ("[models.small-chat]", "[models.tiny-chat]", "models lack 'small-chat'"),
        ("[sites.a]", "[sites.e]", "sites lack 'a'"),
    ],
)
def test_a_canary_that_lacks_what_requests_need_is_refused(old: str, new: str, named: str) -> None:
    b = Town("b", small=1)
    bad = text(2).replace(old, new).replace(" a = ", " e = " if "sites" in old else " a = ")
    with pytest.raises(PolicyError, match=named):
        hears(b, replace(canary(share=0.999), toml=bad))
    b.site.adopt(replace(b.site.policy, default_tenant="acme"))
    with pytest.raises(PolicyError, match="default_tenant"):
        hears(b, canary(share=0.999))
    assert set(revisions(b, 20)) == {1}


def test_it_ends_by_itself_when_no_judge_lives() -> None:
    b = Town("b", small=1)
    hears(b, canary(for_s=600.0))
    b.now_s += 600.0 + MARGIN_S - 0.1
    assert 2 in revisions(b)
    b.now_s += 0.2
    assert set(revisions(b)) == {1}


def test_a_replica_that_starts_in_the_middle_ends_it_with_the_others_and_one_that_starts_later_never_has_it() -> None:
    b, late = Town("b", small=1), Town("b", small=1)
    hears(b, canary(for_s=600.0), age_s=500.0)
    assert 2 in revisions(b)
    b.now_s += 100.0 + MARGIN_S
    assert set(revisions(b)) == {1}
    hears(late, canary(for_s=600.0), age_s=600.0 + MARGIN_S)
    assert set(revisions(late)) == {1}


def test_promotion_puts_it_into_force_and_rollback_takes_it_away_whatever_comes_again() -> None:
    one, other = Town("b", small=1), Town("b", small=1)
    for town in (one, other):
        hears(town, canary())
    up = promotion_of(canary(), **BY)
    down = rollback_to(SHIPPED, canary(), **BY)
    assert (up.revision, up.is_canary, down.revision, down.is_canary) == (2, False, 3, False)
    for record in (up, canary(), up):
        hears(one, record)
    assert set(revisions(one)) == {2}
    for record in (down, canary(), up, down):
        hears(other, record)
    assert set(revisions(other)) == {3}
    assert replace(other.site.policy, revision=1) == parse_policy(SHIPPED, source="shipped")
    assert down.reason == "canary revision 2 rolled back: of a test"


def test_there_is_at_most_one_canary_the_newer() -> None:
    b = Town("b", small=1)
    for number in (2, 3, 2):
        hears(b, canary(number, share=0.5))
    assert set(revisions(b)) == {1, 3}


def test_a_canary_outlives_another_policy_only_while_it_is_newer_and_serves_all() -> None:
    b = Town("b", small=1)
    hears(b, canary(5, share=0.5))
    b.site.adopt(replace(b.site.policy, revision=4))
    assert set(revisions(b)) == {4, 5}
    b.site.adopt(
        replace(b.site.policy, revision=4, tenants={**b.site.policy.tenants, "new": b.site.policy.tenants["acme"]})
    )
    assert set(revisions(b)) == {4}


@given(st.text(), st.integers(0, 2**40), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_greater_share_holds_the_smaller(request: str, revision: int, one: float, other: float) -> None:
    least, most = sorted((one, other))
    assert falls_to_canary(request, revision, most) or not falls_to_canary(request, revision, least)
    assert falls_to_canary(request, revision, 1.0)
    assert not falls_to_canary(request, revision, 0.0)


def test_two_trials_do_not_meet_the_same_requests() -> None:
    both = sum(falls_to_canary(f"r{n}", 2, 0.1) and falls_to_canary(f"r{n}", 3, 0.1) for n in range(10_000))
    assert 60 <= both <= 140


@pytest.mark.parametrize(
    "said", ["revision = 1", "revision=1", "  revision =  1  # the first", "# revision = 9\nrevision = 1", ""]
)
def test_a_file_is_renumbered_however_it_says_its_number(said: str) -> None:
    file = SHIPPED.replace("revision = 1", said, 1)
    policy = parse_policy(renumbered(file, 7), source="a test")
    assert policy == replace(parse_policy(file, source="a test"), revision=7)


def test_a_number_that_can_not_be_found_is_an_error() -> None:
    with pytest.raises(PolicyError, match="revision 7"):
        renumbered(SHIPPED.replace("revision = 1", '"revision" = 1', 1), 7)


def test_the_log_tells_the_same_story_however_often_it_is_read() -> None:
    log = PolicyLog()
    assert (log.greatest, log.in_force, log.canary) == (0, None, None)
    log.hear(canary(2), at_s=10.0)
    log.hear(canary(2), at_s=20.0)
    assert (log.greatest, log.canary, log.canary_at_s, log.in_force) == (2, canary(2), 10.0, None)
    down = rollback_to(SHIPPED, canary(2), **BY)
    for record in (down, canary(2), promotion_of(canary(2), **BY)):
        log.hear(record, at_s=30.0)
    assert (log.greatest, log.in_force, log.canary) == (3, down, None)


def test_an_old_record_reads_as_a_revision_in_force() -> None:
    assert not PolicyRevision(revision=2, toml="", sha256="").is_canary
    assert CanaryReport.__struct_config__.tag == "canary"


def test_a_decision_tells_whether_its_revision_was_on_trial() -> None:
    b = Town("b", small=1)
    hears(b, canary(2, share=0.5))
    told = [b.decide(asked(f"r{n}"), steps=ROUTE).decision for n in range(40)]
    assert {(each.policy_revision, each.canary) for each in told} == {(1, False), (2, True)}


def test_requests_for_a_model_that_only_a_canary_has_wait_without_disturbing_others() -> None:
    b = Town("b", small=1)
    b.beats.append(replace(b.beats[0], instance="b-new-0", model="new-chat", model_digest=""))
    b.hears_telemetry()
    hears(b, canary(2, "[models.new-chat]\ncontext_max_tokens = 131072", share=0.999))
    facts: dict[str, Any] = {"prompt_tokens": 30_000, "wait_max_s": 60.0}
    ran = [b.place(asked(f"{model}-1", model=model, **facts), steps=ROUTE) for model in ("small-chat", "new-chat")]
    for model in ("small-chat", "new-chat"):
        assert b.place(asked(f"{model}-2", model=model, **facts), steps=ROUTE).verdict == "queue"
    ids = (Ids(decision=f"n-{n}", now_wall_s=1.8e9) for n in count())
    for first, model in zip(ran, ("small-chat", "new-chat"), strict=True):
        b.hears_outcome(first, "first_token")
        assert [w.request.id for w, _ in released(b.site, model, b.now_s, lambda: next(ids))] == [f"{model}-2"]
