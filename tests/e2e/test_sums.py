"""Exact sums: the owner of a site's books and the goodput processor die again and again under load."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.faults import hurt
from tests.e2e.running import Fleet
from tests.e2e.sums import differing, judged, published
from tests.e2e.test_faults import HEAL_WAIT_MAX_S, healed, whole_fleet
from tokenfleet.adapters.policy_file import parse_policy, policy_text
from tokenfleet.adapters.postgres import Postgres
from tokenfleet.core.policy import Policy
from tokenfleet.local.http_get import get

pytestmark = pytest.mark.e2e

ROUNDS = 2
EQUAL_WAIT_MAX_S = 90.0  # a window closes 5 s after its end, and a processor that starts again reads the topic anew
OWNED = re.compile(r'^tokenfleet_shard_books_owned\{site="b"\} ([0-9.]+)', re.MULTILINE)


@pytest.mark.timeout(600)
async def test_goodput_is_exact_though_the_owner_of_the_books_and_its_own_processor_die(tmp_path: Path) -> None:
    async with whole_fleet(tmp_path, "--json") as (up, watch):
        policy = await with_books(up, tmp_path)
        for _ in range(ROUNDS):
            owner = await owner_of_books(up)
            healed(await hurt(up, watch, owner, wait_max_s=HEAL_WAIT_MAX_S))
            healed(await hurt(up, watch, "goodput", wait_max_s=HEAL_WAIT_MAX_S))
        async with Postgres(up.endpoints()["postgres"]) as postgres:
            up.signal("load", signal.SIGSTOP)  # no news: what is recorded and what is counted can become equal
            await equal(postgres, policy)
        up.signal("load", signal.SIGCONT)
        up.up.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(up.up.wait, 90.0) == 0
    report: dict[str, Any] = json.loads((tmp_path / "out").read_text())
    assert report["lost"] == 0, report["missing"]


async def with_books(up: Fleet, folder: Path) -> Policy:
    """The policy with the shard on, in force, once a replica of b owns books."""
    text = re.sub(r"^revision = \d+", "revision = 1000", policy_text(), flags=re.MULTILINE)
    path = folder / "policy.toml"
    path.write_text(text + "\n[slomax.shard]\nenabled = true\n")
    words = [sys.executable, "-m", "tokenfleet.cli", "policy", "apply", str(path), "--state-dir", str(up.state)]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 0, done.stderr
    await owner_of_books(up)
    return parse_policy(path.read_text(), source="test")


async def owner_of_books(up: Fleet) -> str:
    """The replica of b that owns most of the site's books."""
    ends_s = time.monotonic() + HEAL_WAIT_MAX_S
    while time.monotonic() < ends_s:
        owned: dict[str, float] = {}
        for name, address in up.endpoints()["status"].items():
            if name.startswith("decide-b-"):
                host, _, port = address.rpartition(":")
                _, page = await get(host, int(port), "/metrics")
                owned[name] = sum(map(float, OWNED.findall(page.decode())))
        if max(owned.values(), default=0.0) > 0.0:
            return max(owned, key=lambda name: owned[name])
        await asyncio.sleep(0.5)
    raise AssertionError("no replica of b owns a book")


async def equal(postgres: Postgres, policy: Policy) -> None:
    """All classes tell the same in the end, and nothing came too late."""
    ends_s = time.monotonic() + EQUAL_WAIT_MAX_S
    while True:
        (counted, late), recorded = await published(postgres), await judged(postgres, policy)
        if not differing(counted, recorded) and sum(recorded.values()):
            assert late == 0
            return
        assert time.monotonic() < ends_s, (differing(counted, recorded), late)
        await asyncio.sleep(2.0)
