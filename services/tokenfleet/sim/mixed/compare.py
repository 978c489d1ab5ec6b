"""Compare: many mixed runs, design by design and seed by seed; a cell is one design on one seed."""

from pathlib import Path
from time import process_time

import msgspec
from msgspec import Struct

from tokenfleet.sim.mixed.measure import Result
from tokenfleet.sim.mixed.run import MixedOptions, run_mixed
from tokenfleet.sim.mixed.timeline import Timeline, timeline_of
from tokenfleet.sim.profiles import load_profile
from tokenfleet.sim.runs import Runs, named_by


class Cell(Struct, frozen=True, kw_only=True):
    """What is kept of one run."""

    result: Result
    timeline: Timeline

    @property
    def design(self) -> str:
        return self.result.design

    @property
    def seed(self) -> int:
        return self.result.seed

    @property
    def label(self) -> str:
        return f"{self.design}, seed {self.seed}"


def cell_of(options: MixedOptions) -> Cell:
    """Make one run. Raises PolicyError as run_mixed does."""
    made = run_mixed(options, cpu_s=process_time)
    return Cell(result=made.result, timeline=timeline_of(made.served, made.accounts, made.profile))


def mixed_runs(folder: Path | None) -> Runs[MixedOptions, Cell]:
    """Raises SetupError if the folder can't be made."""
    return Runs(folder, kind=Cell, make=cell_of, name=file_name)


def file_name(options: MixedOptions) -> str:
    """Readable in front, then what tells it from all others; a profile in a file may change under its name."""
    decides = msgspec.structs.replace(options, make_router=None)
    profile = load_profile(options.profile)
    return named_by(f"mixed.{options.design}", options.seed, msgspec.json.encode(decides), msgspec.json.encode(profile))
