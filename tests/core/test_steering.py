"""Steering: closed windows of goodput in, revisions of the policy out; and whose word is the base."""

from typing import Any

import pytest
from msgspec.structs import replace

from tests.core.sites import pool_summary
from tokenfleet.adapters.policy_file import policy_text
from tokenfleet.core.accounts import GoodputPartial, GoodputRow
from tokenfleet.core.errors import PolicyError
from tokenfleet.core.goodput.steering import BY, Steering
from tokenfleet.core.policy import Policy, parse_policy, policy_hash
from tokenfleet.core.records import OutcomeEvent, SiteSummary, Vector
from tokenfleet.core.revisions import PolicyRevision, renumbered, with_pools
from tokenfleet.core.slomax.terms import Setting

POOL = "large-chat@b"
LAG_S = 6.0  # from the end of a window until what follows from it is in the log
SHARES = """
[slomax.controller]
enabled = true
[slomax.controller.classes]
chat = { share = 0.5, floor = 0.1 }
long = { share = 0.3, floor = 0.1 }
batch = { share = 0.2 }
"""
FILE = policy_text() + SHARES


def parsed(toml: str) -> Policy:
    return parse_policy(toml, source="test")


class World:
    """A goodput worker's steering, fed window by window; what is written is read back unless it is lost."""

    def __init__(self, toml: str = FILE, *, start_s: float = 1_000.0) -> None:
        self.log: list[PolicyRevision] = []
        self.policy = parsed(toml)
        self.steering = Steering(self.policy, toml)
        self.now_s = start_s
        self.hears_pool()

    def hears_pool(self, ready: int = 8) -> None:
        pool = pool_summary("b", ready=ready, kv_used=0.8, seats=Vector(capacity=100.0, used=50.0, queued=3.0))
        site = SiteSummary(site="b", cluster="k", epoch=0, n=1, period_s=0.5, age_s=0.1, gateways=(), pools=(pool,))
        self.steering.hear_summary(site)

    def delivers(self, *, met: int = 100, missed: int = 0, width_s: float = 10.0) -> None:
        """Chat's requests of the next window, which closes; long and batch need little."""
        start_s = self.now_s // 10.0 * 10.0
        rows = (
            row(start_s, "chat", met=met, missed=missed, offered_arrived=met + missed),
            row(start_s, "long", met=60, offered_arrived=60),
            row(start_s, "batch", met=60, offered_arrived=60),
        )
        self.now_s += width_s
        partial = GoodputPartial(site="f", partition=0, watermark_s=self.now_s, rows=rows, cluster="k")
        self.steering.hear_goodput(partial)

    def due(self, *, lag_s: float = 5.0) -> PolicyRevision | None:
        return self.steering.due(now_wall_s=self.now_s + lag_s)

    def reads(self, record: PolicyRevision) -> None:
        """The log has it."""
        if not record.is_canary and record.revision > self.policy.revision:
            self.policy = parsed(record.toml)
        self.log.append(record)
        self.steering.hear(record, self.policy, at_s=self.now_s + LAG_S)

    def passes(self, windows: int, **delivered: int) -> list[PolicyRevision]:
        """So many windows, with what was published read back at once; what was published."""
        said: list[PolicyRevision] = []
        for _ in range(windows):
            self.delivers(**delivered)
            if (revision := self.due()) is not None:
                self.reads(revision)
                said.append(revision)
        return said

    def share(self, name: str = "chat") -> float:
        return self.policy.slomax.controller.setting(POOL).shares[name]


def row(start_s: float, name: str, **counts: int) -> GoodputRow:
    return GoodputRow(
        start_s=start_s,
        width_s=10.0,
        request_class=name,
        tenant="acme",
        pool=POOL,
        version=1,
        output_tokens=1000,
        **counts,
    )


def by_hand(world: World, revision: int, toml: str = FILE, **facts: Any) -> PolicyRevision:
    text = renumbered(toml, revision)
    record = PolicyRevision(revision=revision, toml=text, sha256=policy_hash(text), by="ann", **facts)
    world.reads(record)
    return record


MISSING = {"met": 70, "missed": 30}


def test_a_window_that_misses_is_one_revision_with_old_new_and_why() -> None:
    world = World()
    (said,) = world.passes(1, **MISSING)
    assert (said.revision, said.by, said.reason) == (2, BY, f"{POOL}: chat 70.0% of 98.0%")
    (change,) = said.shares
    assert (change.pool, change.number, change.kind, change.at_s) == (POOL, 1, "step", 1_010.0)
    assert change.old.shares["chat"] == 0.5
    assert change.new.shares["chat"] == pytest.approx(0.53)
    assert said.toml.startswith(renumbered(FILE, 2).rstrip()), "what people wrote stays"
    assert world.share() == pytest.approx(0.53)


def test_one_change_is_in_flight_and_what_is_lost_is_written_again() -> None:
    world = World()
    world.delivers(**MISSING)
    first = world.due()
    assert first is not None
    for _ in range(3):
        world.delivers(**MISSING)
        assert world.due() == first
    world.reads(first)
    world.reads(first)  # it was written twice
    assert world.due() is None
    world.delivers(**MISSING)
    assert world.due() is None, "this window began before the revision was in force"
    (second,) = world.passes(1, **MISSING)
    assert (second.revision, second.shares[0].number) == (3, 2)


def test_nothing_is_published_while_a_canary_is_on_trial() -> None:
    world = World()
    by_hand(world, 2, canary_share=0.1, canary_for_s=600.0)
    assert world.passes(5, **MISSING) == []
    assert "canary revision 2" in world.steering.held[POOL]
    by_hand(world, 3)
    said = world.passes(2, **MISSING)
    assert [each.revision for each in said] == [4]


def test_nothing_is_published_while_the_watermark_lags_or_instances_come_and_go() -> None:
    world = World()
    world.delivers(**MISSING)
    assert world.due(lag_s=21.0) is None
    assert "behind" in world.steering.held[POOL]
    world.hears_pool(ready=9)
    world.delivers(**MISSING)
    assert world.due() is None
    assert "9 instances are ready, 8 were" in world.steering.held[POOL]
    assert len(world.passes(1, **MISSING)) == 1


def test_the_kill_switch_puts_the_static_shares_into_force_and_says_so_once() -> None:
    world = World()
    world.passes(1, **MISSING)
    by_hand(world, 3, world.log[-1].toml.replace("enabled = true", "enabled = false"))
    assert world.share() == 0.5, "at once"
    said = world.passes(5, **MISSING)
    assert [each.revision for each in said] == [4]
    assert said[0].shares[0].kind == "static"
    assert "switched off" in said[0].reason
    assert world.policy.slomax.controller.pools == {}
    assert said[0].toml.strip() == renumbered(FILE, 4).replace("enabled = true", "enabled = false").strip()


def test_a_revision_by_hand_is_the_base_from_then_on() -> None:
    world = World()
    world.passes(6, **MISSING)
    assert world.share() > 0.55
    theirs = FILE.replace("share = 0.5,", "share = 0.4,").replace("share = 0.3,", "share = 0.4,")
    by_hand(world, 20, theirs)
    assert world.share() == 0.4
    (said,) = world.passes(2, **MISSING)
    assert said.revision == 21
    assert said.shares[0].old.shares == {"chat": 0.4, "long": 0.4, "batch": 0.2}
    assert said.shares[0].new.shares["chat"] == pytest.approx(0.43)


def test_of_two_revisions_with_one_number_the_first_counts() -> None:
    world = World()
    world.delivers(**MISSING)
    ours = world.due()
    assert ours is not None
    by_hand(world, 2)
    world.reads(ours)
    assert world.share() == 0.5
    said = world.passes(2, **MISSING)
    assert [each.revision for each in said] == [3]
    assert said[0].shares[0].old.shares["chat"] == 0.5


def test_a_restart_applies_nothing_twice_and_goes_on_where_it_was() -> None:
    world = World()
    (said,) = world.passes(1, **MISSING)
    after = World(start_s=1_000.0)
    after.reads(said)  # it reads the log
    after.now_s = 1_000.0
    after.delivers(**MISSING)  # and the same window again
    assert after.due() is None
    after.steering.hear(said, after.policy, at_s=2_000.0)
    (further,) = after.passes(1, **MISSING)
    assert (further.revision, further.shares[0].number) == (3, 2)
    assert further.shares[0].old == said.shares[0].new


def test_after_a_restart_shares_do_not_turn_round_within_a_minute() -> None:
    world = World()
    (said,) = world.passes(1, **MISSING)
    after = World(start_s=1_010.0)
    after.reads(said)
    wants = replace(said.shares[0], old=said.shares[0].new, new=said.shares[0].old)
    assert wants.new.shares["chat"] < wants.old.shares["chat"]
    for _ in range(5):  # long misses now
        start_s = after.now_s
        rows = (row(start_s, "chat", met=100), row(start_s, "long", met=60, missed=40), row(start_s, "batch", met=60))
        after.now_s += 10.0
        after.steering.hear_goodput(
            GoodputPartial(site="f", partition=0, watermark_s=after.now_s, rows=rows, cluster="k")
        )
        assert after.due() is None, after.now_s
    assert "turned round" in after.steering.held[POOL]


def test_first_tokens_that_take_twice_what_was_predicted_freeze_it() -> None:
    world = World()
    event = OutcomeEvent(
        request="r", attempt=0, kind="first_token", decision="d", tenant="acme", request_class="chat",
        model="large-chat", origin="b", site="b", pool=POOL, at_wall_s=1_001.0, elapsed_s=1.0, attempt_s=1.0,
        predicted_ttft_s=0.5,
    )  # fmt: skip
    world.steering.observe([event] * 50)
    assert world.passes(1, **MISSING) == []
    assert "2.00 times as long as predicted" in world.steering.held[POOL]
    assert len(world.passes(1, **MISSING)) == 1


def test_a_file_that_sets_pools_by_hand_is_left_alone() -> None:
    own = f'\n[slomax.controller.pools."{POOL}"]\nceiling = 0.9\nshares = {{ chat = 0.4, long = 0.4, batch = 0.2 }}\n'
    world = World(FILE + own)
    assert world.passes(3, **MISSING) == []
    assert "set by hand, and so left alone" in world.steering.problem
    assert world.share() == 0.4


def test_without_shares_in_the_policy_nothing_happens() -> None:
    assert World(policy_text()).passes(5, **MISSING) == []


def test_pools_are_written_behind_what_people_wrote_and_replaced_as_a_whole() -> None:
    setting = Setting(shares={"chat": 0.1 + 0.2, "long": 0.5, "batch": 0.2}, ceiling=0.95)
    once = with_pools(FILE, 7, {POOL: setting, "small-chat@b": setting})
    assert parsed(once).slomax.controller.pools == {POOL: setting, "small-chat@b": setting}
    again = with_pools(once, 8, {POOL: setting})
    assert parsed(again).slomax.controller.pools == {POOL: setting}
    assert parsed(again).revision == 8
    assert with_pools(again, 1, {}) == FILE
    inline = "slomax = { controller = { enabled = true } }\n" + policy_text()
    with pytest.raises(PolicyError):
        with_pools(inline, 2, {POOL: setting})
