"""Runs: those of a comparison, kept in a folder so that one that was broken off goes on.

A job is one run to make, a cell what is kept of it. A cell's file is named after all that decides it: the options and
the code of core and simulator. So a changed rule or engine is run again and nothing else is.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from multiprocessing import active_children, current_process, get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from tempfile import TemporaryFile
from typing import Generic, TypeVar

import msgspec

from tokenfleet.core.errors import SetupError

Job = TypeVar("Job")
Cell = TypeVar("Cell")


class Runs(Generic[Job, Cell]):
    """Makes and keeps the cells of one kind of job.

    `make` can be sent to another process, `name` gives a job's file; without a folder nothing is kept.
    """

    def __init__(
        self, folder: Path | None, *, kind: type[Cell], make: Callable[[Job], Cell], name: Callable[[Job], str]
    ) -> None:
        """Raises SetupError if the folder can't be made or written to."""
        self._folder = folder
        self._kind = kind
        self._make = make
        self._name = name
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                raise SetupError(
                    f"--keep {folder}: {error.strerror or error}; name a folder that can be written to"
                ) from error

    def cells(
        self, jobs: Sequence[Job], *, processes: int = 1, made: Callable[[Cell], None] | None = None
    ) -> list[Cell]:
        """The cells of all jobs in their order, made where they are not kept. `made` is told of each as it is there.

        Raises SetupError if one can't be kept, and if a process is ended by something else.
        """
        found = [self._kept(job) for job in jobs]
        tell = made or _nobody
        for cell in found:
            if cell is not None:
                tell(cell)
        missing = [place for place, cell in enumerate(found) if cell is None]
        for place, cell in self._made(jobs, missing, processes):
            self._keep(jobs[place], cell)
            found[place] = cell
            tell(cell)
        return [cell for cell in found if cell is not None]

    def _kept(self, job: Job) -> Cell | None:
        """One that can't be read is made anew."""
        if self._folder is None:
            return None
        try:
            return msgspec.json.decode((self._folder / self._name(job)).read_bytes(), type=self._kind)
        except (OSError, msgspec.DecodeError):
            return None

    def _keep(self, job: Job, cell: Cell) -> None:
        """A reader sees the whole file or none, also of two comparisons that keep the same run at once."""
        if self._folder is None:
            return
        path = self._folder / self._name(job)
        begun = path.with_suffix(f".{current_process().pid}.begun")
        try:
            begun.write_bytes(msgspec.json.encode(cell))
            begun.replace(path)
        except OSError as error:
            raise SetupError(f"--keep {path}: {error.strerror or error}; what was kept before is whole") from error

    def _made(self, jobs: Sequence[Job], places: Sequence[int], processes: int) -> Iterable[tuple[int, Cell]]:
        if processes <= 1 or len(places) <= 1:
            for place in places:
                yield place, self._make(jobs[place])
            return
        workers = min(processes, len(places))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ends_silently) as pool:
            coming = {pool.submit(self._make, jobs[place]): place for place in places}
            try:
                for future in as_completed(coming):
                    yield coming[future], future.result()
            except BrokenProcessPool as error:
                raise SetupError(
                    f"one of {workers} processes was killed, as when memory runs out: give fewer --jobs; "
                    "with --keep FOLDER the same command goes on"
                ) from error
            except BaseException:  # nobody waits for what is under way
                for worker in active_children():
                    worker.terminate()
                raise
            finally:
                pool.shutdown(cancel_futures=True)


def _ends_silently() -> None:
    """A terminal's Ctrl-C reaches every process; one of them tells of it."""
    signal(SIGINT, SIG_DFL)


def named_by(words: str, seed: int, *decides: bytes) -> str:
    """A file's name: readable in front, then a digest of all that `decides` the run, the code included."""
    digest = hashlib.sha256(b"".join(decides) + code_version().encode())
    readable = "".join(letter if letter.isalnum() else "-" for letter in words)
    return f"{readable}.{seed}.{digest.hexdigest()[:16]}.json"


@cache
def code_version() -> str:
    """A digest of the sources that a run consists of: core and simulator, without what only shows results."""
    digest = hashlib.sha256()
    for package in ("core", "sim"):
        for name, content in _sources(files("tokenfleet") / package, package):
            digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


# What only shows results, under the same names for every kind of run.
SHOWING = frozenset(
    {
        *("words", "command", "commands", "compared", "compare_words", "compare_command"),
        *("report", "page", "made", "pictures", "drawing", "tuned"),
    }
)


def _sources(folder: Traversable, path: str) -> Iterable[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        stem, _, suffix = entry.name.rpartition(".")
        if entry.is_dir():
            yield from _sources(entry, f"{path}/{entry.name}")
        elif suffix in ("py", "toml", "xz") and not (path.startswith("sim") and stem in SHOWING):
            yield f"{path}/{entry.name}", entry.read_bytes()


def _nobody(cell: object) -> None:
    del cell
