"""Restart and staleness on a whole fleet: what is killed or frozen heals, answers go on meanwhile, nothing is lost.

How fast is measured by hand with `python -m tests.e2e.faults`; here only that it happens.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.answers import Watch, watching
from tests.e2e.faults import Healed, first_words, hurt, until_well
from tests.e2e.running import LISTENING, Fleet, fleet, until
from tests.e2e.test_up import UP_WAIT_MAX_S, command, left_behind
from tests.kafka_server import OwnKafka
from tokenfleet.adapters.postgres import Postgres
from tokenfleet.local.books_check import find, read_books
from tokenfleet.local.orphans import recorded, runs

pytestmark = pytest.mark.e2e

KILLED = ("agent", "capacity", "goodput", "audit", "decide-a-0", "decide-b-0", "engines", "load", "postgres")
HEAL_WAIT_MAX_S = 90.0  # 20 s on an idle machine; one under load must not fail the test
ROWS_WAIT_MAX_S = 60.0
FROZEN_S = 12.0  # telemetry is stale after 5 s
FRESH_MAX_S = 5.0


@asynccontextmanager
async def whole_fleet(folder: Path, *options: str) -> AsyncGenerator[tuple[Fleet, Watch]]:
    """A fleet that answers fresh from all origins, and what it answers."""
    with fleet(folder, command(folder, *options)) as up:
        await until(lambda: LISTENING in up.said() or up.up.poll() is not None, "no start", wait_max_s=UP_WAIT_MAX_S)
        async with watching(up) as watch:
            well = await until_well(up, watch, time.monotonic(), HEAL_WAIT_MAX_S, lambda: True)
            assert isinstance(well, float), well
            yield up, watch


@pytest.mark.timeout(600)
async def test_what_is_killed_heals_while_answers_go_on_and_nothing_is_lost(tmp_path: Path) -> None:
    async with whole_fleet(tmp_path, "--json") as (up, watch):
        for name in KILLED:
            healed(await hurt(up, watch, name, wait_max_s=HEAL_WAIT_MAX_S))
        assert await missing_rows(up) == ()
        broker = await hurt(up, watch, "broker", wait_max_s=HEAL_WAIT_MAX_S)
        healed(broker)
        up.up.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.up.wait, 90.0) == 0
    report: dict[str, Any] = json.loads((tmp_path / "out").read_text())
    assert report["lost"] is not None  # the broker's memory is gone: what that cost is counted
    assert all(report["restarts"][name] >= 1 for name in (*KILLED, "broker"))
    assert left_behind(tmp_path) == []


@pytest.mark.timeout(400)
async def test_while_kafka_is_frozen_every_answer_is_marked_stale_with_its_age(
    tmp_path: Path, own_kafka: OwnKafka
) -> None:
    async with whole_fleet(tmp_path, "--no-load", "--kafka", own_kafka.bootstrap) as (up, watch):
        began_s = time.monotonic()
        own_kafka.freeze()
        try:
            await asyncio.sleep(FROZEN_S)
        finally:
            own_kafka.thaw()
        over_s = time.monotonic()
        well = await until_well(up, watch, over_s, HEAL_WAIT_MAX_S, lambda: True)
        assert isinstance(well, float), well
        assert watch.errors(began_s) == []
        assert watch.empty(began_s) == []
        for site in "abcd":
            late = watch.of(site, since_s=began_s + FRESH_MAX_S + 2.0, until_s=over_s - 0.5)
            assert {sample.mode for sample in late} == {"stale"}, site
            assert watch.age_drift_s(site, since_s=began_s + 1.0, until_s=over_s - 0.5) <= 2.0, site
        # A paused replica speaks first from what it knew, unless it is so late that it has caught up.
        said = await first_words(up, "decide-b-0", stopped_s=FRESH_MAX_S + 2.0)
        caught_up = said[0].answered_s - said[0].asked_s > 0.5
        assert said[0].mode == "stale" or said[0].error or caught_up, said[0]
        assert watch.errors(over_s) == []


@pytest.mark.timeout(300)
async def test_dead_and_drained_engines_get_no_decision_and_a_new_life_has_no_old_cache(tmp_path: Path) -> None:
    async with whole_fleet(tmp_path, "--json") as (up, watch):
        await inject(up, "b-small-0", kind="crash", for_s=15.0)
        crashed_s = time.monotonic()
        await asyncio.sleep(6.0)
        assert not decided_for(watch, "b-small-0", since_s=crashed_s + 4.0)
        await until(lambda: decided_for(watch, "b-small-0", since_s=crashed_s + 10.0), "no way back", wait_max_s=60.0)
        await drain(up, "b-small-0")
        drained_s = time.monotonic()
        await asyncio.sleep(5.0)
        assert not decided_for(watch, "b-small-0", since_s=drained_s + 2.0)
        assert watch.empty(crashed_s) == []
        await drain(up, "b-small-0", "--undo")
        undone_s = time.monotonic()
        await until(lambda: decided_for(watch, "b-small-0", since_s=undone_s), "still drained", wait_max_s=30.0)


@pytest.mark.timeout(200)
async def test_a_killed_up_leaves_no_child_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    async with whole_fleet(tmp_path, "--no-load") as (up, _):
        children = recorded(up.state / "pids.json")
        up.up.kill()
        up.up.wait()
        await until(lambda: not any(map(runs, children)), "children outlive it", wait_max_s=20.0)
    async with whole_fleet(tmp_path, "--no-load") as (up, watch):
        assert watch.errors(time.monotonic()) == []
        os.kill(up.up.pid, signal.SIGTERM)
        assert await asyncio.to_thread(up.up.wait, 60.0) == 0
    assert left_behind(tmp_path) == []


def healed(found: Healed) -> None:
    print(found.line())
    assert found.back_s is not None, found.line()
    assert not found.errors, found.line()
    assert not found.empty, found.line()


async def missing_rows(up: Fleet) -> tuple[str, ...]:
    """What the load was told that has no row after a while; it goes on, so only what it was told by now counts."""
    books = await asyncio.to_thread(read_books, up.state / "load")
    assert books.decisions
    ends_s = time.monotonic() + ROWS_WAIT_MAX_S
    async with Postgres(up.endpoints()["postgres"]) as postgres:
        while (missing := (await find(postgres, books, run="load-", since_wall_s=0.0)).missing) and (
            time.monotonic() < ends_s
        ):
            await asyncio.sleep(1.0)
    return missing


def decided_for(watch: Watch, instance: str, *, since_s: float) -> bool:
    return any(sample.target == instance for sample in watch.samples if sample.asked_s >= since_s)


async def inject(up: Fleet, instance: str, **fault: Any) -> None:
    """A fault of one engine, by its control port."""
    port = json.loads((up.state / "config" / "engines.json").read_text())["control_port"]
    body = json.dumps(fault)
    head = f"POST /instances/{instance}/fault HTTP/1.1\r\nHost: e\r\nConnection: close\r\nContent-Length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\n\r\n{body}".encode())
    assert b" 200 " in (await reader.readline())
    writer.close()


async def drain(up: Fleet, instance: str, *options: str) -> None:
    words = [sys.executable, "-m", "tokenfleet.cli", "drain", instance, *options, "--state-dir", str(up.state)]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
