"""Up: a whole fleet on this machine, from nothing to decisions, until a signal or the end of its time.

Standard output is for the one object of `--json`; all else goes to standard error. Exit codes: 0 ended as asked,
1 something could not be started or the state folder is gone, 3 another fleet runs on the state folder.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from tokenfleet.adapters.clock import monotonic_s, wall_s
from tokenfleet.adapters.endpoints import Endpoints
from tokenfleet.adapters.policy_file import load_policy, policy_text
from tokenfleet.adapters.running import leaves
from tokenfleet.core.errors import BadRequestError, TokenFleetError
from tokenfleet.core.policy import parse_policy
from tokenfleet.local.broker import EmbeddedPartMissingError
from tokenfleet.local.child import Exit
from tokenfleet.local.children import StateInUseError, Supervisor
from tokenfleet.local.configs import load_config, write_configs
from tokenfleet.local.designs import design_change, designed
from tokenfleet.local.fleet import Fleet, mixed_fleet, refuse_strangers, shipped_fleet
from tokenfleet.local.layout import HOST, Layout, lay_out
from tokenfleet.local.load_stats import ANSWERED, STATS
from tokenfleet.local.options import UpOptions
from tokenfleet.local.parts import LOAD, Parts
from tokenfleet.local.policy_change import PolicyChange
from tokenfleet.local.policy_rule import rule_change
from tokenfleet.local.ports import refuse_taken
from tokenfleet.local.postgres import DataFolderError
from tokenfleet.local.real_engines import real_fleet
from tokenfleet.local.report import print_report, report_of
from tokenfleet.local.run import Run
from tokenfleet.local.stopping import Stopping
from tokenfleet.local.summary import Summary
from tokenfleet.local.totals import totals_of_books

EXIT_OK, EXIT_FAILED, EXIT_IN_USE, EXIT_KILLED = 0, 1, 3, 130


def run_up(options: UpOptions) -> int:
    """Run until the end; the exit code."""
    began_s = monotonic_s()
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)  # what matters of it, the adapters say
    try:
        return asyncio.run(_up(options, began_s))
    except StateInUseError as error:
        print(f"{error}: give this one its own folder and ports with --state-dir and --port-base", file=sys.stderr)
        return EXIT_IN_USE
    except (TokenFleetError, EmbeddedPartMissingError, DataFolderError) as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except ExceptionGroup as group:
        foreseen, others = group.split((TokenFleetError, EmbeddedPartMissingError, DataFolderError))
        if others is not None or foreseen is None:
            raise
        print(leaves(foreseen)[0], file=sys.stderr)
        return EXIT_FAILED
    except asyncio.CancelledError:
        return EXIT_KILLED


async def _up(options: UpOptions, began_s: float) -> int:
    fleet, layout = _planned(options)
    state_dir = options.state_dir.resolve()
    if not state_dir.exists():  # a try that is refused makes no folder; in one that is there, orphans end first
        refuse_taken(layout.ports())
    listeners: list[Parts | Summary] = []

    def ended(end: Exit) -> None:
        for listener in listeners:
            listener.ended(end)

    async with Supervisor(state_dir, on_exit=ended) as supervisor:
        stopping = Stopping(supervisor)
        with stopping.listening():
            refuse_taken(layout.ports())
            run = Run(id=f"load-{round(wall_s()):x}", began_s=began_s, began_wall_s=wall_s(), folder=state_dir / LOAD)
            _forget_books(run.folder)
            configs = write_configs(
                fleet,
                layout,
                state_dir=state_dir,
                discovery=options.engines.resolve() if options.engines else None,
                load=load_config(
                    fleet, layout, run=run.id, folder=run.folder, copies=options.copies, seed=options.seed
                ),
            )
            summary = Summary(layout, run, supervisor, design=options.design)
            parts = Parts(fleet, layout, configs, supervisor, change=_change(options), say=summary.say)
            listeners += [parts, summary]
            async with asyncio.TaskGroup() as tasks, summary:
                beside = [
                    tasks.create_task(parts.keep_topics()),
                    tasks.create_task(stopping.watch(state_dir / "lock")),
                    tasks.create_task(summary.watch_usage()),
                ]
                try:
                    await _live(options, layout, parts, summary, run, stopping, state_dir)
                    if stopping.why:
                        summary.say(stopping.why)
                    await _end(options, fleet, layout, summary, run, supervisor, stopping)
                finally:
                    for task in beside:
                        task.cancel()
    if stopping.killed:
        return EXIT_KILLED
    return EXIT_FAILED if stopping.lost else EXIT_OK


def _planned(options: UpOptions) -> tuple[Fleet, Layout]:
    """What is to run, and where. Raises PolicyError for files that don't agree with one another, and
    BadRequestError for a policy or design that there isn't, or options that exclude each other."""
    for name, given in (("policy", options.policy), ("engines", options.engines), ("copies", options.copies)):
        if options.design and given:
            raise BadRequestError(f"--{name}", "a design has its own; leave out one of the two")
    change = _change(options)
    policy = load_policy()[0] if change is None else parse_policy(change.of(policy_text()), source=change.reason)
    fleet = designed(mixed_fleet(), options.design) if options.design else shipped_fleet()
    if options.engines is not None:
        fleet = real_fleet(fleet, options.engines)
    refuse_strangers(fleet, policy, source=str(options.engines or "the shipped fleet"))
    layout = lay_out(
        fleet,
        port_base=options.port_base,
        kafka=options.kafka,
        postgres=options.postgres,
        simulated=options.engines is None,
    )
    return fleet, layout


def _change(options: UpOptions) -> PolicyChange | None:
    """What is asked for beside the policy that the fleet has."""
    if options.design:
        return design_change(options.design)
    return rule_change(options.policy) if options.policy else None


async def _live(
    options: UpOptions,
    layout: Layout,
    parts: Parts,
    summary: Summary,
    run: Run,
    stopping: Stopping,
    state_dir: Path,
) -> None:
    """From the first process to the moment when the end is asked for or the time is over."""
    await _unless(stopping, parts.start(loaded=not options.no_load))
    if stopping.asked.is_set():
        return
    Endpoints(
        kafka=layout.kafka,
        postgres=layout.postgres,
        audit=f"{HOST}:{layout.audit_port}",
        gateways=layout.gateways,
        status={name: f"{HOST}:{port}" for name, port in layout.status_ports.items()},
    ).write(state_dir)
    summary.say_where(state_dir)
    await _unless(stopping, parts.until_serving())
    if stopping.asked.is_set():
        return
    summary.say(f"decisions are served after {monotonic_s() - run.began_s:.1f} s")
    run.load_began_s = monotonic_s()
    await _unless(
        stopping, asyncio.gather(parts.start_rest(), summary.show(for_s=options.for_s, loaded=not options.no_load))
    )


async def _end(
    options: UpOptions,
    fleet: Fleet,
    layout: Layout,
    summary: Summary,
    run: Run,
    supervisor: Supervisor,
    stopping: Stopping,
) -> None:
    """End the load and tell what came of it; a signal meanwhile cuts it short."""
    run.load_ended_s = monotonic_s()
    stopped = asyncio.create_task(supervisor.stop(LOAD))
    draining = asyncio.create_task(summary.show_draining())
    await _first_of(stopped, stopping.asked.wait())
    if not stopped.done() and (load := supervisor.children.get(LOAD)) is not None and load.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(load.pid, signal.SIGINT)
    await stopped
    draining.cancel()
    if run.load_began_s is None:
        return
    if not (options.json or options.for_s is not None):
        if not options.no_load:
            summary.say(totals_of_books(run.folder))
        return
    report = await report_of(
        fleet, layout, summary, run, supervisor, loaded=not options.no_load, hurry=stopping.asked.is_set()
    )
    print_report(report, json=options.json, say=summary.say)


async def _unless(stopping: Stopping, work: Awaitable[object]) -> None:
    """Await `work`, or break it off when the end is asked for."""
    task = asyncio.ensure_future(work)
    try:
        await _first_of(task, stopping.asked.wait())
    finally:
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _first_of(task: "asyncio.Future[Any]", other: Awaitable[object]) -> None:
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


def _forget_books(folder: Path) -> None:
    """The books are of one run: what an earlier one was answered is in its own rows."""
    for name in (ANSWERED, STATS):
        (folder / name).unlink(missing_ok=True)
