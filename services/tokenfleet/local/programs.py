"""Programs: how each process of a fleet is started and ended as a child of `up`."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenfleet.adapters.settings import environment_of_child
from tokenfleet.local.child import Program
from tokenfleet.local.configs import Configs
from tokenfleet.local.layout import ALONE, Layout

# Waves of the end: who asks first, then who answers, last what everything is written to.
LOAD_WAVE, SERVICES_WAVE, STORES_WAVE = 0, 1, 2
TABLE_WRITERS = ("agent", "capacity")
LOAD_STOP_S = 35.0  # its open requests end within 30 s

# One BLAS thread and two malloc arenas a process: some 20 MB less each, and no thread pool to start.
LEAN = {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def needed_first(layout: Layout, configs: Configs) -> list[Program]:
    """What a first decision needs: a decision replica of each site, engines, and who keeps the tables."""
    first = [_process("decide", place.name, configs) for place in layout.decides if place.replica == 0]
    engines = [_local("engines", configs, wave=SERVICES_WAVE)] if layout.engines else []
    return first + engines + [_process(name, name, configs) for name in TABLE_WRITERS]


def needed_later(layout: Layout, configs: Configs) -> list[Program]:
    """The other replicas, and who reads what was decided."""
    replicas = [_process("decide", place.name, configs) for place in layout.decides if place.replica > 0]
    return [_process(name, name, configs) for name in ALONE if name not in TABLE_WRITERS] + replicas


def load(configs: Configs) -> Program:
    return _local("load", configs, wave=LOAD_WAVE, stop_budget_s=LOAD_STOP_S)


def _process(module: str, name: str, configs: Configs) -> Program:
    return Program(
        name=name,
        command=_python("-m", f"tokenfleet.processes.{module}"),
        environment=environment_of_child(configs.of(name), **LEAN),
        stop_wave=SERVICES_WAVE,
    )


def _local(name: str, configs: Configs, *, wave: int, stop_budget_s: float = 5.0) -> Program:
    path: Path = configs.of(name)
    return Program(
        name=name,
        command=_python("-m", f"tokenfleet.local.{name}", "--config", str(path)),
        environment=environment_of_child(path, **LEAN),
        stop_wave=wave,
        stop_budget_s=stop_budget_s,
    )


def _python(*arguments: str) -> Callable[[], Sequence[str]]:
    return lambda: [sys.executable, *arguments]
