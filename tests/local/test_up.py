"""Up says in one line why it can't start, and knows when it must end."""

import asyncio
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.ports import free_port
from tokenfleet.local.child import Program
from tokenfleet.local.children import Supervisor, lock
from tokenfleet.local.options import UpOptions
from tokenfleet.local.orphans import start_time_ticks
from tokenfleet.local.stopping import Stopping
from tokenfleet.local.up import run_up


def test_a_second_up_on_one_state_folder_says_so_and_ends_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock(tmp_path / "lock"):
        assert run_up(UpOptions(state_dir=tmp_path, port_base=free_port())) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "another fleet runs" in err
    assert "--state-dir" in err
    assert "--port-base" in err


def test_a_taken_port_ends_it_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert run_up(UpOptions(state_dir=tmp_path, port_base=port)) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "--port-base" in err
    assert not list((tmp_path / "logs").iterdir())


def test_a_try_that_is_refused_leaves_no_new_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert run_up(UpOptions(state_dir=tmp_path / "new", port_base=port)) == 1
    _, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "--state-dir" in err
    assert "--port-base" in err
    assert not (tmp_path / "new").exists()


def test_a_policy_without_the_fleets_models_ends_it_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = tmp_path / "engines.toml"
    engines.write_text('[[engine]]\nid = "x"\nsite = "b"\naddress = "127.0.0.1:1"\nmodel = "llama"\n')
    assert run_up(UpOptions(state_dir=tmp_path / "state", engines=engines)) == 1
    assert "no model 'llama' in the policy; there is: large-chat, small-chat" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()


async def test_children_end_as_usual_when_their_state_folder_is_gone(tmp_path: Path) -> None:
    async with Supervisor(tmp_path / "state") as supervisor:
        child = await supervisor.start(
            Program(name="sleeper", command=lambda: [sys.executable, "-c", "import time; time.sleep(600)"])
        )
        pid = child.pid
        shutil.rmtree(tmp_path / "state")
    assert pid is not None
    assert start_time_ticks(pid) is None


async def test_a_replaced_lock_file_asks_for_the_end(tmp_path: Path) -> None:
    async with Supervisor(tmp_path / "state") as supervisor:
        stopping = Stopping(supervisor)
        watching = asyncio.create_task(stopping.watch(tmp_path / "state" / "lock"))
        await asyncio.sleep(0)
        assert not stopping.asked.is_set()
        (tmp_path / "state" / "lock").unlink()
        (tmp_path / "state" / "lock").touch()  # of another fleet, perhaps
        async with asyncio.timeout(10.0):
            await stopping.asked.wait()
        await watching
    assert "no longer this fleet's" in stopping.why


async def test_one_signal_asks_and_the_second_kills_at_once(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    killed: list[bool] = []

    async def fleet() -> None:
        async with Supervisor(tmp_path) as supervisor:
            stopping = Stopping(supervisor)
            with stopping.listening():
                child = await supervisor.start(
                    Program(name="stubborn", command=lambda: [sys.executable, "-c", stubborn], stop_budget_s=600.0)
                )
                while b"up" not in child.log_path.read_bytes():
                    await asyncio.sleep(0.02)
                signal.raise_signal(signal.SIGTERM)
                await stopping.asked.wait()
                asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGINT)
                try:
                    await supervisor.stop("stubborn")
                finally:
                    killed.append(stopping.killed)

    async with asyncio.timeout(30.0):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(fleet())
    assert killed == [True]
