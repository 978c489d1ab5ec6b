"""Decide: loops over a pool are compiled beside its decisions, and only once it is large."""

import asyncio
import threading

import pytest
from msgspec.structs import replace

from tests.core.fleets import Town
from tokenfleet.processes import decide


@pytest.mark.parametrize("fault", [None, ValueError("of the compiler")])
async def test_loops_are_compiled_in_a_thread_once_a_pool_is_large(
    fault: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town("b", small=3, large=2)
    compiled_in: list[threading.Thread] = []

    async def grows(_: float) -> None:
        assert not compiled_in  # five instances, but no pool of four
        town.beats.append(replace(town.beats[0], instance="b-small-9"))
        town.hears_telemetry()

    def load() -> bool:
        compiled_in.append(threading.current_thread())
        if fault is not None:
            raise fault
        return True

    monkeypatch.setattr(decide, "COMPILED_FROM", 4)
    monkeypatch.setattr(decide, "load", load)
    monkeypatch.setattr(asyncio, "sleep", grows)
    await decide._compile(town.site)  # a fault ends no process
    assert [thread is threading.main_thread() for thread in compiled_in] == [False]
