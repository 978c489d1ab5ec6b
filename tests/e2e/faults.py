"""Faults: hurt one process of a running fleet while it is asked for decisions, and tell when it is whole again.

By hand, a fault or several one after the other on one fleet:

    python -m tests.e2e.faults --base 21000 --state /tmp/faults kill:agent kill:decide-b-0 stop:broker:60
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.answers import SITES, Sample, Watch, ask, watching
from tests.e2e.running import LISTENING, Fleet, fleet, until
from tokenfleet.client.gateway import Gateway

HEALED_FOR_S = 2.0  # so long all must be well again
WATCHED_MIN_S = 6.0  # what a fault breaks may show only when its last word grows old
UP_WAIT_MAX_S = 90.0


@dataclass(frozen=True, kw_only=True)
class Healed:
    """What one fault cost. `back_s` counts from the end of the fault (a kill: from the kill), None if never; then
    `unwell` says why. `drift_s`: how far the ages told during a stop differed from time's own pace.
    """

    fault: str
    back_s: float | None
    gap_s: float
    asked: int
    errors: int
    empty: int
    refused: int
    stale_age_max_s: float
    drift_s: float
    unwell: str = ""

    def line(self) -> str:
        back = "never" if self.back_s is None else f"{self.back_s:.1f}"
        return (
            f"{self.fault:<24} back {back:>6}  gap {self.gap_s:5.2f}  asked {self.asked:5d}  errors {self.errors:3d}  "
            f"empty {self.empty:3d}  refused {self.refused:3d}  stale to {self.stale_age_max_s:5.1f}  "
            f"drift {self.drift_s:.1f} {self.unwell}"
        )


async def hurt(
    fleet: Fleet, watch: Watch, name: str, *, stopped_s: float | None = None, wait_max_s: float = 60.0
) -> Healed:
    """SIGKILL the process `name`, or SIGSTOP it for `stopped_s`; return when all is well again or time is up."""
    began_s = time.monotonic()
    if stopped_s is None:
        before = fleet.signal(name, signal.SIGKILL)
    else:
        before = fleet.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(stopped_s)
        finally:
            os.kill(before, signal.SIGCONT)
    over_s = time.monotonic()
    unwell = await until_well(
        fleet,
        watch,
        over_s,
        wait_max_s,
        lambda: fleet.pid(name) not in (None, before) if stopped_s is None else fleet.pid(name) is not None,
    )
    samples = [sample for sample in watch.samples if sample.asked_s >= began_s]
    return Healed(
        fault=f"{'kill -9' if stopped_s is None else f'stop {stopped_s:.0f} s'} {name}",
        back_s=None if isinstance(unwell, str) else unwell,
        gap_s=watch.longest_gap_s(began_s - 1.0),
        asked=len(samples),
        errors=len(watch.errors(began_s)),
        empty=len(watch.empty(began_s)),
        refused=sum(sample.verdict == "reject" for sample in samples),
        stale_age_max_s=max((sample.age_s or 0.0 for sample in samples if sample.mode == "stale"), default=0.0),
        drift_s=_drift_s(watch, began_s, over_s) if stopped_s else 0.0,
        unwell=unwell if isinstance(unwell, str) else "",
    )


def _drift_s(watch: Watch, began_s: float, over_s: float) -> float:
    return max(watch.age_drift_s(site, since_s=began_s + 1.0, until_s=over_s - 0.5) for site in SITES)


async def first_words(fleet: Fleet, name: str, *, stopped_s: float) -> list[Sample]:
    """Freeze a decide replica; what it alone says when it goes on, in the order of its answers.

    Questions wait at its door when it wakes, so that they are answered from what it knew before.
    """
    _, site, replica = name.split("-")
    async with Gateway([fleet.gateways(site)[int(replica)]]) as gateway:
        heard = Watch()
        await ask(Watch(), site, gateway, "before")
        pid = fleet.signal(name, signal.SIGSTOP)
        try:
            await asyncio.sleep(stopped_s)
            waiting = [asyncio.create_task(ask(heard, site, gateway, f"first-{n}")) for n in range(5)]
            await asyncio.sleep(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        for n in range(20):
            await ask(heard, site, gateway, f"then-{n}")
    return sorted(heard.samples, key=lambda sample: sample.answered_s)


async def until_well(
    fleet: Fleet, watch: Watch, over_s: float, wait_max_s: float, there: Callable[[], bool]
) -> float | str:
    """Seconds from `over_s` until all was well for HEALED_FOR_S at least; in words what is not well in the end."""
    well_since_s: float | None = None
    while True:
        await asyncio.sleep(0.3)
        now_s = time.monotonic()
        unwell = await fleet.unwell() if there() else ["it does not run"]
        if not unwell and not watch.is_fresh(now_s - 0.8):
            unwell = ["not fresh: " + "; ".join(_last(watch))]
        if unwell:
            well_since_s = None
        elif well_since_s is None:
            well_since_s = now_s
        if well_since_s is not None and now_s - well_since_s >= HEALED_FOR_S and now_s - over_s >= WATCHED_MIN_S:
            return well_since_s - over_s
        if now_s - over_s > wait_max_s:
            return ", ".join(unwell)


def _last(watch: Watch) -> Iterator[str]:
    for site in SITES:
        if samples := watch.of(site):
            last = samples[-1]
            yield f"{site} {last.error or last.verdict} {last.mode} {last.age_s} {last.reason}"


async def _by_hand(options: argparse.Namespace) -> None:
    command = [
        *(sys.executable, "-m", "tokenfleet.cli", "up", "--json", "--state-dir", str(options.state / "state")),
        *("--port-base", str(options.base), "--copies", "1", *options.up),
    ]
    with fleet(options.state, command) as up:
        await until(lambda: LISTENING in up.said() or up.up.poll() is not None, up.said(), wait_max_s=UP_WAIT_MAX_S)
        async with watching(up) as watch:
            print(f"whole after {await until_well(up, watch, time.monotonic(), 60.0, lambda: True)}", flush=True)
            for fault in options.faults:
                what, name, *seconds = fault.split(":")
                if what == "words":
                    said = await first_words(up, name, stopped_s=float(seconds[0]))
                    print(name, [(each.error or each.mode, each.age_s) for each in said], flush=True)
                    continue
                stopped_s = float(seconds[0]) if what == "stop" else None
                print((await hurt(up, watch, name, stopped_s=stopped_s)).line(), flush=True)
        (options.state / "samples.json").write_text(json.dumps([vars(sample) for sample in watch.samples]))
    report = (options.state / "out").read_text()
    if report:
        told = json.loads(report)
        names = ("decisions", "outcomes", "audit_rows", "lost", "missing", "unanswered", "longest_gap_s", "restarts")
        print({name: told[name] for name in names})
    print(up.said()[-2000:], file=sys.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hurt a fleet and tell how it healed.")
    parser.add_argument("--base", type=int, default=21_000)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--up", action="append", default=[], help="an option for `up`, as --up=--no-load")
    parser.add_argument("faults", nargs="+", help="kill:NAME, stop:NAME:SECONDS or words:DECIDE-SITE-N:SECONDS")
    asyncio.run(_by_hand(parser.parse_args()))
