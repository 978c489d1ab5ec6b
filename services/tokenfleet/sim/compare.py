"""Compare: many runs, policy by policy and seed by seed, kept in a folder so that a broken-off comparison goes on.

A cell is one policy on one seed of one scenario. Its file is named after all that decides it: the options and the code
of core and simulator. So a changed rule or engine is run again and nothing else is.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from multiprocessing import active_children, get_context
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from time import process_time

import msgspec
from msgspec import Struct

from tokenfleet.core.errors import SetupError
from tokenfleet.sim.bounds import bounded
from tokenfleet.sim.measure import InstanceLoad, Quantiles, figures_of, quantiles
from tokenfleet.sim.policies import policy_named
from tokenfleet.sim.profiles import Profile, load_profile
from tokenfleet.sim.run import RunOptions, rows_of, run, trace_of, window
from tokenfleet.sim.served import Served
from tokenfleet.sim.watch import Reuse, Watch

BOUNDS = ("bound: pooled cache", "bound: endless cache")


class Job(Struct, frozen=True, kw_only=True):
    """One run to make; `options` name policy and seed."""

    scenario: str
    options: RunOptions


class Requests(Struct, frozen=True, kw_only=True):
    """All requests of one run as columns, by arrival; -1 as instance and None as seconds: it never got there.

    Of a bound, no request has an instance. Token columns count the prompt, what the engine found cached, and what KV
    events said was cached at placement: on the instance that had most, and on the one that it went to.
    """

    at_s: list[float]
    instance: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    available_tokens: list[int]
    captured_tokens: list[int]
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    e2e_s: list[float | None]


class Cell(Struct, frozen=True, kw_only=True):
    """One policy on one seed: the figures of those that arrived in [`warm_s`, `len_s`), and all requests.

    `lost` were rejected or never finished; `rho` is the offered load without any cache (measure.Result), 0 for a bound.
    """

    scenario: str
    policy: str
    seed: int
    warm_s: float
    len_s: float
    instances: int
    rho: float
    measured: int
    lost: int
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    hit_ratio: float
    throughput_tokens_per_s: float
    loads: tuple[InstanceLoad, ...]
    requests: Requests


def cell_of(job: Job) -> Cell:
    """Make one run. Raises PolicyError as run does."""
    return _bound(job) if job.options.policy in BOUNDS else _routed(job)


class Store:
    """Cells in a folder; without one, nothing is kept."""

    def __init__(self, folder: Path | None) -> None:
        """Raises SetupError if the folder can't be made."""
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise SetupError(f"--keep {folder}: {error.strerror or error}; name a folder") from error

    def get(self, job: Job) -> Cell | None:
        """The cell if it was made with the same options and code. One that can't be read is made anew."""
        if self._folder is None:
            return None
        try:
            return msgspec.json.decode((self._folder / file_name(job)).read_bytes(), type=Cell)
        except (OSError, msgspec.DecodeError):
            return None

    def put(self, job: Job, cell: Cell) -> None:
        """Keep it; a reader sees the whole file or none. Raises SetupError if it can't be written."""
        if self._folder is None:
            return
        path = self._folder / file_name(job)
        begun = path.with_suffix(".begun")
        try:
            begun.write_bytes(msgspec.json.encode(cell))
            begun.replace(path)
        except OSError as error:
            raise SetupError(f"--keep {path}: {error.strerror or error}; what was kept before is whole") from error


def cells(
    jobs: Sequence[Job], store: Store, *, processes: int = 1, made: Callable[[Cell], None] | None = None
) -> list[Cell]:
    """The cells of all jobs in their order, made where they are not kept. `made` is told of each as it is there."""
    found = [store.get(job) for job in jobs]
    tell = made or _nobody
    for cell in found:
        if cell is not None:
            tell(cell)
    missing = [place for place, cell in enumerate(found) if cell is None]
    for place, cell in _made(jobs, missing, processes):
        store.put(jobs[place], cell)
        found[place] = cell
        tell(cell)
    return [cell for cell in found if cell is not None]


def file_name(job: Job) -> str:
    """Readable in front, then what tells it from all others."""
    options = msgspec.structs.replace(job.options, make_router=None)
    digest = hashlib.sha256(msgspec.json.encode(options) + _trace_bytes(options.trace) + code_version().encode())
    words = "".join(letter if letter.isalnum() else "-" for letter in f"{job.scenario}.{options.policy}")
    return f"{words}.{options.seed}.{digest.hexdigest()[:16]}.json"


@cache
def code_version() -> str:
    """A digest of the sources that a run consists of: core and simulator, without what only shows results."""
    digest = hashlib.sha256()
    for package in ("core", "sim"):
        for name, content in _sources(files("tokenfleet") / package, package):
            digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


SHOWING = frozenset(
    {"words", "commands", "compared", "compare_words", "compare_command", "report", "pictures", "tuned"}
)


def _sources(folder: Traversable, path: str) -> Iterable[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        stem, _, suffix = entry.name.rpartition(".")
        if entry.is_dir():
            yield from _sources(entry, f"{path}/{entry.name}")
        elif suffix in ("py", "toml", "xz") and not (path == "sim" and stem in SHOWING):
            yield f"{path}/{entry.name}", entry.read_bytes()


def _trace_bytes(trace: str) -> bytes:
    """A trace of the user's own may change under its name; the shipped ones are part of the code."""
    path = Path(trace)
    return path.read_bytes() if path.is_file() else b""


def _made(jobs: Sequence[Job], places: Sequence[int], processes: int) -> Iterable[tuple[int, Cell]]:
    if processes <= 1 or len(places) <= 1:
        for place in places:
            yield place, cell_of(jobs[place])
        return
    workers = min(processes, len(places))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_ends_silently) as pool:
        coming = {pool.submit(cell_of, jobs[place]): place for place in places}
        try:
            for future in as_completed(coming):
                yield coming[future], future.result()
        except BaseException:  # nobody waits for what is under way
            for worker in active_children():
                worker.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _ends_silently() -> None:
    """A terminal's Ctrl-C reaches every process; one of them tells of it."""
    signal(SIGINT, SIG_DFL)


def _nobody(cell: Cell) -> None:
    del cell


def _routed(job: Job) -> Cell:
    watch = Watch()
    options = job.options
    made = run(
        msgspec.structs.replace(options, make_router=watch.over(policy_named(options.policy))), cpu_s=process_time
    )
    result = made.result
    return Cell(
        scenario=job.scenario,
        policy=options.policy,
        seed=options.seed,
        warm_s=result.warm_s,
        len_s=result.len_s,
        instances=options.instances,
        rho=result.rho,
        measured=result.measured,
        lost=result.unfinished + result.rejected,
        ttft_s=result.ttft_s,
        tpot_s=result.tpot_s,
        e2e_s=result.e2e_s,
        hit_ratio=result.hit_ratio,
        throughput_tokens_per_s=result.throughput_tokens_per_s,
        loads=result.loads,
        requests=_columns(made.served, watch),
    )


def _columns(served: Sequence[Served], watch: Watch) -> Requests:
    figures = [figures_of(each) for each in served]
    nothing = Reuse(available_tokens=0, captured_tokens=0)
    reuse = [watch.reuse.get(each.id, nothing) for each in served]
    return Requests(
        at_s=[each.at_s for each in figures],
        instance=[each.instance for each in figures],
        prompt_tokens=[each.prompt_tokens for each in figures],
        cached_tokens=[each.cached_tokens for each in figures],
        available_tokens=[each.available_tokens for each in reuse],
        captured_tokens=[each.captured_tokens for each in reuse],
        ttft_s=[each.ttft_s for each in figures],
        tpot_s=[each.tpot_s for each in figures],
        e2e_s=[each.e2e_s for each in figures],
    )


def _bound(job: Job) -> Cell:
    options = job.options
    len_s, warm_s = window(options)
    rows = rows_of(trace_of(options), options, len_s=len_s, warm_s=warm_s)
    profile = _sized(options, block_tokens=rows[0].block_tokens)
    pooled = options.policy == BOUNDS[0]
    alone = bounded(rows, profile, blocks_max=profile.kv_blocks * options.instances if pooled else None)
    measured = [(row, each) for row, each in zip(rows, alone, strict=True) if row.at_s >= warm_s]
    cached = [each.cached_tokens for each in alone]
    prompt_tokens = sum(row.prompt_tokens for row, _ in measured)
    return Cell(
        scenario=job.scenario,
        policy=options.policy,
        seed=options.seed,
        warm_s=warm_s,
        len_s=len_s,
        instances=options.instances,
        rho=0.0,
        measured=len(measured),
        lost=0,
        ttft_s=quantiles([each.ttft_s for _, each in measured]),
        tpot_s=quantiles([each.tpot_s for _, each in measured if each.tpot_s is not None]),
        e2e_s=quantiles([each.e2e_s for _, each in measured]),
        hit_ratio=sum(each.cached_tokens for _, each in measured) / prompt_tokens if prompt_tokens else 0.0,
        throughput_tokens_per_s=sum(row.output_tokens for row, _ in measured) / (len_s - warm_s),
        loads=(),
        requests=Requests(
            at_s=[row.at_s for row in rows],
            instance=[-1] * len(rows),
            prompt_tokens=[row.prompt_tokens for row in rows],
            cached_tokens=cached,
            available_tokens=cached,
            captured_tokens=cached,
            ttft_s=[each.ttft_s for each in alone],
            tpot_s=[each.tpot_s for each in alone],
            e2e_s=[each.e2e_s for each in alone],
        ),
    )


def _sized(options: RunOptions, *, block_tokens: int) -> Profile:
    return load_profile(options.profile).sized(block_size=block_tokens, kv_blocks=options.kv_blocks)
