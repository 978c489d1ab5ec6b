"""Quotas at many replicas: N a minute admits N, no more in any minute, whatever happens to whom."""

from random import Random

import pytest

from tests.core.shards import World


def owned(names: str, limit: int) -> World:
    world = World(names, limit_units=limit, quota=True)
    world["a"].assigned()
    return world


def run(world: World, seconds: float, *, busy: str = "", rate_per_s: float = 0.0, rng: Random | None = None) -> None:
    """Time passes; the `busy` replicas get requests at that rate each and admit what they can."""
    rng = rng or Random(1)
    for _ in range(round(seconds / 0.1)):
        for name in busy:
            replica = world[name]
            if rng.random() < 0.1 * rate_per_s and not replica.paused:
                replica.admit()
        step(world)


def step(world: World) -> None:
    """One move; a replica wants twice what was lately asked of it, an idle one nothing."""
    for replica in world.replicas.values():
        if not replica.paused and replica.leases.due(replica.now_s):
            replica.ask(wants=2 * replica.leases.asked)
    world.move(0.1, asks=False)


def most_in_a_minute(world: World) -> int:
    times = sorted(world.admitted_s)
    return max((sum(first <= at < first + 60.0 for at in times[i:]) for i, first in enumerate(times)), default=0)


@pytest.mark.parametrize("names", ["a", "ab", "abcdef"])
@pytest.mark.parametrize("busy", ["a", "all"])
def test_n_a_minute_admits_n(names: str, busy: str) -> None:
    world = owned(names, 60)
    run(world, 300.0, busy=names if busy == "all" else busy, rate_per_s=20.0)
    assert most_in_a_minute(world) <= 60
    assert sum(60.0 <= at < 300.0 for at in world.admitted_s) >= 0.85 * 60 * 4  # idle replicas hold a little of it


def test_two_a_minute_at_six_replicas_admits_two() -> None:
    world = owned("abcdef", 2)
    run(world, 600.0, busy="f", rate_per_s=5.0)
    assert most_in_a_minute(world) <= 2
    assert len(world.admitted_s) >= 12


def test_what_is_refused_after_all_is_given_back() -> None:
    world = owned("ab", 10)
    rng, refused = Random(4), 0
    for _ in range(6_000):
        credit = world["b"].admit() if rng.random() < 0.3 else None
        if credit is not None and rng.random() < 0.8:
            world["b"].refuse(credit)
            refused += 1
        step(world)
    assert refused > 200
    assert most_in_a_minute(world) <= 10
    assert len(world.admitted_s) >= 0.7 * 10 * 10


def test_a_refusal_that_comes_after_the_sum_was_told_is_given_back_too() -> None:
    world = owned("ab", 4)
    b = world["b"]
    run(world, 1.0)
    b.admit()  # finds nothing, so the next request wants some
    run(world, 1.5)
    taken = [credit for _ in range(9) if (credit := b.admit()) is not None]
    assert taken
    b.ask()
    run(world, 0.3)
    b.refuse(taken[-1])
    before = len(world.admitted_s)
    run(world, 3.0, busy="b", rate_per_s=20.0)
    assert len(world.admitted_s) <= 4
    assert len(world.admitted_s) > before


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(12))
def test_no_minute_has_more_than_n_and_one_ahead_a_life_through_kills_pauses_cuts_and_takeovers(
    seed: int, ahead: int
) -> None:
    rng, world = Random(seed), World("abc", limit_units=20, rates=(1.0, 1.01, 0.99), quota=True, ahead=ahead)
    world["a"].assigned()
    begun_s = [0.0, 0.0, 0.0]
    for _ in range(4_000):
        name = rng.choice("abc")
        replica = world[name]
        match rng.randrange(220):
            case 0:
                world.kill(name, loses=rng.random() < 0.5)
                begun_s.append(world.now_s)
            case 1 | 2:
                replica.paused ^= True
            case 3:
                replica.cut ^= True
            case 4:
                replica.assigned()
            case 5:
                for record in world.late[:1]:
                    world.append(record)
            case _:
                pass
        if not replica.paused and rng.random() < 0.4:
            credit = replica.admit()
            if credit is not None and rng.random() < 0.3:
                replica.refuse(credit)
        step(world)
    assert world.admitted_s
    for first_s in world.admitted_s:
        admitted = sum(first_s <= at_s < first_s + 60.0 for at_s in world.admitted_s)
        lives = 3 + sum(first_s <= at_s < first_s + 60.0 for at_s in begun_s[3:])
        assert admitted <= 20 + ahead * lives


def test_a_quiet_tenant_s_request_is_not_refused_and_is_counted() -> None:
    world = World("abcdef", limit_units=12, quota=True, ahead=1)
    world["a"].assigned()
    world.run(1.0, asks=False)
    for number in range(30):
        assert world["abcdef"[number % 6]].admit() is not None
        run(world, 6.0)  # what was lent has lapsed by the next time
    assert most_in_a_minute(world) <= 12


def test_who_heard_that_the_quota_is_used_up_is_not_ahead_of_it_for_a_minute() -> None:
    world = World("ab", limit_units=3, quota=True, ahead=1)
    world["a"].assigned()
    run(world, 3.0, busy="a", rate_per_s=20.0)
    spent = len(world.admitted_s)
    assert 3 <= spent <= 4
    assert world["b"].admit() is not None  # it has not heard
    run(world, 30.0, busy="b", rate_per_s=2.0)
    assert len(world.admitted_s) == spent + 1
