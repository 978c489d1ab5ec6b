"""Summary: what the user sees while a fleet runs: where it listens, how it fares, what ended unasked."""

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.live import Live

from tokenfleet.adapters.clock import monotonic_s
from tokenfleet.adapters.postgres import Postgres, PostgresAwayError, RowsRefusedError
from tokenfleet.local.child import Exit
from tokenfleet.local.children import Supervisor
from tokenfleet.local.layout import HOST, Layout
from tokenfleet.local.live_rows import NOTHING, live_rows
from tokenfleet.local.live_table import live_line, live_table
from tokenfleet.local.load_stats import read_stats
from tokenfleet.local.metrics import FleetMetrics
from tokenfleet.local.policy_rule import name_of
from tokenfleet.local.postgres import without_password
from tokenfleet.local.run import Run
from tokenfleet.local.usage import Usage, usage_of

TERMINAL_PERIOD_S = 2.0
LINE_PERIOD_S = 10.0
DRAIN_PERIOD_S = 5.0
LOAD_BEGIN_MAX_S = 60.0  # it waits until its origins know engines
USAGE_PERIOD_S = 5.0
UP = "up"
LOG_LINE_SHOWN_MAX = 300
AGE = "tokenfleet_telemetry_age_seconds"
RULE = "tokenfleet_tokenpilot_rule"


class Summary:
    """Speaks on standard error; a live table on a terminal, else a line every LINE_PERIOD_S. Use as `async with`.

    `usage` is what the processes took when they took most memory together.
    """

    def __init__(self, layout: Layout, run: Run, supervisor: Supervisor, *, design: str) -> None:
        self.metrics = FleetMetrics(layout.status_ports)
        self.postgres = Postgres(layout.postgres)
        self.usage: Mapping[str, Usage] = {}
        self.design = design
        self._layout = layout
        self._run = run
        self._supervisor = supervisor
        self._console = Console(stderr=True, highlight=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.postgres.__aexit__(*_)

    @property
    def rss_bytes(self) -> int:
        return sum(usage.rss_bytes for usage in self.usage.values())

    @property
    def rss_sum_bytes(self) -> int:
        return sum(usage.rss_sum_bytes for usage in self.usage.values())

    def policies(self) -> list[str]:
        """What people call the rules by which the decision replicas choose instances: one, but while it is changed."""
        rules = {self.metrics.state(RULE, place.name) for place in self._layout.decides}
        return sorted(name_of(rule) for rule in rules if rule is not None)

    @property
    def told_policy(self) -> str:
        """What is in force, in words; empty while nobody has told."""
        return ", ".join([*self.policies(), *([f"design {self.design}"] if self.design else [])])

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)

    def say_where(self, state_dir: Path) -> None:
        """Where everything listens."""
        layout = self._layout
        self.say(f"Kafka       {layout.kafka}")
        self.say(f"PostgreSQL  {without_password(layout.postgres)}")
        for site, addresses in layout.gateways.items():
            self.say(
                f"decide {site}    {', '.join(addresses)}  (gRPC: Scheduler, SLOMax, FleetMind, TokenPilot, Outcomes)"
            )
        self.say(f"Audit       {HOST}:{layout.audit_port}  (gRPC)")
        ports = ", ".join(f"{name} {port}" for name, port in layout.status_ports.items())
        self.say(f"/health and /metrics on {HOST}: {ports}")
        for engine in layout.engines:
            self.say(f"engine {engine.id:<12} {engine.address}  {engine.digest}")
        self.say(f"logs        {state_dir / 'logs'}")

    def ended(self, end: Exit) -> None:
        """A child ended unasked: say so, with the last line of its log."""
        how = f"was killed by signal {-end.code}" if end.code < 0 else f"ended with exit code {end.code}"
        again = "stays down" if end.restart_in_s is None else f"starts again in {end.restart_in_s:g} s"
        child = self._supervisor.children.get(end.name)
        last = _last_line(child.log_path) if child is not None and end.code > 0 else ""
        self.say(f"{end.name} {how} after {end.ran_s:.1f} s and {again}{': ' + last if last else ''}")

    async def show(self, *, for_s: float | None, loaded: bool) -> None:
        """Show how the fleet fares, for so long from the load's begin or until cancelled."""
        terminal = sys.stderr.isatty()
        shown_s = monotonic_s()
        end_s = None if for_s is None else self._load_began_s(shown_s, loaded=loaded) + for_s
        period_s = TERMINAL_PERIOD_S if terminal else LINE_PERIOD_S
        live = Live(console=self._console, auto_refresh=False, transient=True) if terminal else None
        if live is not None:
            live.start()
        try:
            while end_s is None or monotonic_s() < end_s:
                await asyncio.sleep(period_s if end_s is None else max(0.0, min(period_s, end_s - monotonic_s())))
                await self._tell(live)
                end_s = None if for_s is None else self._load_began_s(shown_s, loaded=loaded) + for_s
        finally:
            if live is not None:
                live.stop()

    def _load_began_s(self, shown_s: float, *, loaded: bool) -> float:
        """When it began; while it has not, the latest that is waited for."""
        if not loaded:
            return shown_s
        stats = read_stats(self._run.folder)
        return shown_s + LOAD_BEGIN_MAX_S if stats is None or stats.began_at_s is None else stats.began_at_s

    async def show_draining(self) -> None:
        """Say now and then how many requests the load still waits for; runs until cancelled."""
        while True:
            await asyncio.sleep(DRAIN_PERIOD_S)
            if (stats := read_stats(self._run.folder)) is not None:
                self.say(f"draining: {stats.open} requests open")

    async def watch_usage(self) -> None:
        """Look at memory now and then; runs until cancelled."""
        while True:
            await asyncio.sleep(USAGE_PERIOD_S)
            self.look_at_usage()

    def look_at_usage(self) -> None:
        pids = {name: child.pid for name, child in self._supervisor.children.items() if child.pid is not None}
        usage = usage_of({UP: os.getpid(), **pids})
        if sum(each.rss_bytes for each in usage.values()) >= self.rss_bytes:
            self.usage = usage

    async def _tell(self, live: Live | None) -> None:
        await self.metrics.refresh()
        ages_s: dict[str, float] = {}
        for place in self._layout.decides:
            if (age_s := self.metrics.gauge(AGE, place.name)) is not None:
                ages_s[place.site] = max(ages_s.get(place.site, 0.0), age_s)
        policy = self.told_policy
        foot = f"up {monotonic_s() - self._run.began_s:.0f} s, {self.rss_bytes / 1e6:,.0f} MB; lost: known at the end"
        try:
            rows = await live_rows(self.postgres, since_wall_s=self._run.began_wall_s)
        except (PostgresAwayError, RowsRefusedError) as error:
            rows, foot = NOTHING, f"{foot}; the database does not answer: {error}"
        if live is not None:
            width, height = self._console.size
            live.update(live_table(rows, ages_s, foot, policy=policy, width=width, height=height), refresh=True)
        else:
            self.say(live_line(rows, ages_s, foot, policy=policy))


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:LOG_LINE_SHOWN_MAX] for line in reversed(lines) if line.strip()), "")
