"""Made: the runs of a comparison made at a terminal, with a bar, and with a word when they are broken off."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import typer

from tokenfleet.sim.runs import Runs
from tokenfleet.sim.words import Labelled, runs_bar

Job = TypeVar("Job")
Cell = TypeVar("Cell", bound=Labelled)

EXIT_INTERRUPTED = 130  # as a shell says of SIGINT


def made_of(runs: Runs[Job, Cell], jobs: Sequence[Job], *, processes: int, what: str, keep: Path | None) -> list[Cell]:
    """The cells of all jobs. On Ctrl-C it says how many of `what` are done and how to go on, and exits."""
    done = 0
    with runs_bar(len(jobs)) as show:

        def made(cell: Cell) -> None:
            nonlocal done
            done += 1
            if show is not None:
                show(cell)

        try:
            return runs.cells(jobs, processes=processes, made=made)
        except KeyboardInterrupt:
            pass
    goes_on = f"the same command goes on from {keep}" if keep else "with --keep FOLDER the same command would go on"
    typer.echo(f"stopped: {done} of {len(jobs)} runs of {what} are done; {goes_on}", err=True)
    raise typer.Exit(EXIT_INTERRUPTED)
