"""Children are restarted, ended in order, and never outlive their parent."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenfleet.local.child import Child, Exit, Program, Restart
from tokenfleet.local.children import StateInUseError, Supervisor, restart_delay_s
from tokenfleet.local.orphans import birth_of, end_orphans, record, recorded, start_time_ticks

SLEEPER = "import time; time.sleep(600)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(grandchild.pid, flush=True)
time.sleep(600)
"""


def python(name: str, code: str, **fields: object) -> Program:
    return Program(name=name, command=lambda: [sys.executable, "-c", code], **fields)  # pyright: ignore[reportArgumentType] -- a builder


async def until(fact: object, *, wait_max_s: float = 20.0) -> None:
    assert callable(fact)
    async with asyncio.timeout(wait_max_s):
        while not fact():
            await asyncio.sleep(0.02)


def alive(pid: int | None) -> bool:
    return pid is not None and start_time_ticks(pid) is not None


def numbers_in(path: Path) -> list[int]:
    """Lines that are a number: other libraries of this process may write into a child's log when it forks."""
    return [int(line) for line in path.read_text().splitlines() if line.isdecimal()]


async def test_a_killed_child_comes_back_and_is_counted(tmp_path: Path) -> None:
    exits: list[Exit] = []
    async with Supervisor(tmp_path, on_exit=exits.append) as fleet:
        child = await fleet.start(python("a", SLEEPER))
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.restarts == 1)
        assert child.pid != first
        assert alive(child.pid)
        last = child.pid
    assert [(ended.name, ended.code, ended.restart_in_s) for ended in exits] == [("a", -signal.SIGKILL, 0.0)]
    assert not alive(last)


@pytest.mark.parametrize(
    ("restart", "code", "stays_down"),
    [
        (Restart.NEVER, 1, True),
        (Restart.ON_FAILURE, 0, True),
        (Restart.ON_FAILURE, 3, False),
        (Restart.ALWAYS, 0, False),
    ],
)
async def test_the_kind_of_restart_decides_who_stays_down(
    tmp_path: Path, restart: Restart, code: int, stays_down: bool
) -> None:
    exits: list[Exit] = []
    async with Supervisor(tmp_path, on_exit=exits.append) as fleet:
        child = await fleet.start(python("a", f"raise SystemExit({code})", restart=restart))
        await until(lambda: exits)
        assert exits[0].code == code
        assert (exits[0].restart_in_s is None) is stays_down
        if not stays_down:
            await until(lambda: child.restarts >= 1)


def test_restarts_begin_at_once_and_slow_down_to_a_bound() -> None:
    program = python("quick", "")
    delays = [restart_delay_s(program, code=1, quick_ends=n) for n in range(9)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]


def test_a_child_stays_down_as_long_as_others_need_to_notice() -> None:
    program = python("noticed", "", restart_after_s=3.5)
    assert [restart_delay_s(program, code=1, quick_ends=n) for n in (0, 3, 4)] == [3.5, 3.5, 4.0]


async def test_a_child_that_ignores_the_signal_is_killed_with_its_whole_group(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(python("stubborn", STUBBORN, stop_budget_s=0.3))
        await until(lambda: numbers_in(child.log_path))
        [grandchild] = numbers_in(child.log_path)
        await fleet.stop("stubborn")
        assert child.pid is None
        await until(lambda: not alive(grandchild))


async def test_what_a_child_leaves_behind_when_it_ends_is_ended_too(tmp_path: Path) -> None:
    polite = STUBBORN.replace("signal.SIG_IGN", "lambda *_: sys.exit()")
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(python("polite", polite))
        await until(lambda: numbers_in(child.log_path))
        [grandchild] = numbers_in(child.log_path)
        await fleet.stop("polite")
        await until(lambda: not alive(grandchild))


async def test_a_child_in_backoff_can_be_stopped(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(python("a", "raise SystemExit(1)"))
        await until(lambda: child.last_exit is not None and (child.last_exit.restart_in_s or 0) >= 0.5)
        await fleet.stop("a")
        restarts = child.restarts
        await asyncio.sleep(0.8)
        assert child.restarts == restarts


async def test_waves_end_one_after_the_other(tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    note = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep({delay}), "
    note += f"open({str(ends)!r}, 'a').write('{{name}} '), sys.exit()));"
    note += "print('ready', flush=True); time.sleep(600)"
    async with Supervisor(tmp_path) as fleet:
        children = [
            await fleet.start(python("broker", note.format(name="broker", delay=0), stop_wave=1)),
            await fleet.start(python("writer", note.format(name="writer", delay=0.4), stop_wave=0)),
        ]
        await until(lambda: all(is_ready(child) for child in children))
    assert ends.read_text().split() == ["writer", "broker"]


def is_ready(child: Child) -> bool:
    return "ready" in child.log_path.read_text()


async def test_a_program_that_is_not_there_fails_at_its_start(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as fleet:
        with pytest.raises(OSError, match="no-such-program"):
            await fleet.start(Program(name="a", command=lambda: ["/no-such-program"]))


async def test_a_program_that_goes_missing_is_tried_again(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(Program(name="a", command=lambda: [str(program)]))
        assert child.pid is not None
        program.rename(tmp_path / "away")
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.last_exit is not None and child.last_exit.code == 127)
        (tmp_path / "away").rename(program)
        await until(lambda: alive(child.pid))


async def test_a_listener_that_fails_does_not_stop_the_restarts(tmp_path: Path) -> None:
    def fail(_: Exit) -> None:
        raise ValueError("a listener's mistake")

    async with Supervisor(tmp_path, on_exit=fail) as fleet:
        child = await fleet.start(python("a", "raise SystemExit(1)"))
        await until(lambda: child.restarts >= 1)


@pytest.mark.parametrize("asked", [False, True])
async def test_a_child_that_nobody_follows_any_more_is_killed_and_closed(tmp_path: Path, asked: bool) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEPER}"
    child = Child(python("a", stubborn), log_path=tmp_path / "log")
    await child.start()
    await until(lambda: b"up" in child.log_path.read_bytes())
    pid, process = child.pid, child._process
    assert pid is not None
    assert process is not None
    if asked:
        child.asked_to_stop.set()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await child.ended()
    assert process._transport.is_closing()  # pyright: ignore[reportAttributeAccessIssue]
    assert process.returncode == -signal.SIGKILL  # reaped, or the interpreter warns of it later
    assert child.pid is None
    assert not alive(pid)


def test_children_start_while_grpc_calls_are_under_way() -> None:
    """gRPC's own fork handlers would abort one in four of them."""
    code = """
import subprocess, threading
from concurrent.futures import ThreadPoolExecutor
from tokenfleet.local.child import tied_to_this_process
import grpc

server = grpc.server(ThreadPoolExecutor(8))
echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", {"Echo": echo})])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
over = threading.Event()

def ask():
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/test/Echo")
        while not over.is_set():
            call(b"x")

askers = [threading.Thread(target=ask) for _ in range(4)]
for asker in askers:
    asker.start()
try:
    ends = {subprocess.Popen(["true"], preexec_fn=tied_to_this_process(None)).wait() for _ in range(100)}
finally:
    over.set()
    for asker in askers:
        asker.join()
    server.stop(0)
print(ends)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{0}\n", done.stderr[-2000:]


async def test_a_second_fleet_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with Supervisor(tmp_path) as fleet:
        child = await fleet.start(python("a", SLEEPER))
        with pytest.raises(StateInUseError):
            await Supervisor(tmp_path).__aenter__()
        assert alive(child.pid)


async def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    parent_code = f"""
import asyncio, sys
from pathlib import Path
from tokenfleet.local.child import Program
from tokenfleet.local.children import Supervisor

async def main():
    async with Supervisor(Path({str(tmp_path)!r})) as fleet:
        child = await fleet.start(Program(name="a", command=lambda: [sys.executable, "-c", {SLEEPER!r}]))
        print(child.pid, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    await until(lambda: not alive(pid))
    async with Supervisor(tmp_path):  # the folder is free again
        assert recorded(tmp_path / "pids.json") == []


def test_a_recorded_orphan_is_ended_and_a_stranger_with_its_pid_is_not(tmp_path: Path) -> None:
    path = tmp_path / "pids.json"
    with (
        subprocess.Popen([sys.executable, "-c", SLEEPER], process_group=0) as orphan,
        subprocess.Popen([sys.executable, "-c", SLEEPER], process_group=0) as stranger,
    ):
        left, other = birth_of(orphan.pid, name="orphan"), birth_of(stranger.pid, name="gone")
        assert left is not None
        assert other is not None
        assert left.started_ticks > 0
        earlier = type(other)(name="gone", pid=other.pid, started_ticks=other.started_ticks - 1, boot_id=other.boot_id)
        record(path, [left, earlier])
        assert end_orphans(path) == ["orphan"]
        assert orphan.wait() == -signal.SIGKILL
        time.sleep(0.05)
        assert stranger.poll() is None
        stranger.kill()
    assert not path.exists()


def test_a_damaged_record_ends_nobody(tmp_path: Path) -> None:
    path = tmp_path / "pids.json"
    path.write_text('[{"name": "a", "pid": 1')
    assert end_orphans(path) == []
